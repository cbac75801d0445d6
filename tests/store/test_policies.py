"""What a store evicts first: the least recently used, or what saves the fewest seconds per byte."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefixes import MODEL, layers_of, same

from kvmnn.errors import OptionError
from kvmnn.store import PrefixStore, unit_codec
from kvmnn.store.backend import BENEFIT_SCALE, MAX_UNIT_PRIORITY, compute_benefit
from kvmnn.store.directory import backend as directory_backend
from kvmnn.store.remote import backend as remote_backend
from kvmnn.store.remote.records import UnitUse, decode_use, encode_tick, encode_use

BACKENDS = ["directory", "redis", "memory"]
TEXTS = [[number] * 8 for number in range(1, 9)]


@pytest.fixture(autouse=True)
def _write_uses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (directory_backend, remote_backend):
        monkeypatch.setattr(backend, "_TOUCH_INTERVAL_SECONDS", 0.0)


def put(store: PrefixStore, ids: list[int]) -> int:
    return store.put(ids, layers_of(ids), model=MODEL).stored_bytes


def list_stored(store: PrefixStore) -> list[int]:
    return [ids[0] for ids in TEXTS if store.match(ids, model=MODEL) == len(ids)]


def measure_unit_bytes(folder: Path) -> int:
    with PrefixStore(folder, block_tokens=4, codec="frames") as store:
        return max(put(store, ids) for ids in TEXTS)


@pytest.mark.parametrize("engine", BACKENDS)
@pytest.mark.parametrize(("policy", "stored"), [("lru", [4, 5, 6]), ("benefit", [1, 5, 6])])
def test_put_beyond_limit_evicts_by_policy(new_url, tmp_path, engine, policy, stored) -> None:
    max_bytes = 3 * measure_unit_bytes(tmp_path / "sizes") + 100
    with PrefixStore(new_url(engine), max_bytes, block_tokens=4, codec="frames", policy=policy) as store:
        assert store.policy == store.stats().policy == policy
        put(store, TEXTS[0])
        for _ in range(3):
            assert same(store.get(TEXTS[0], model=MODEL).layers, TEXTS[0], 8)
        for ids in TEXTS[1:6]:
            put(store, ids)
        assert list_stored(store) == stored


@pytest.mark.parametrize("engine", BACKENDS)
def test_put_of_texts_of_equal_benefit_evicts_the_least_recently_used(new_url, engine) -> None:
    caches = layers_of(TEXTS[0])  # equal K and V of all texts have equal sizes
    with PrefixStore(new_url(engine), block_tokens=4, codec="frames") as store:
        unit_bytes = store.put(TEXTS[0], caches, model=MODEL).stored_bytes
    limit = 3 * unit_bytes + unit_bytes // 2
    with PrefixStore(new_url(engine), limit, block_tokens=4, codec="frames", policy="benefit") as store:
        for ids in TEXTS[:3]:
            assert store.put(ids, caches, model=MODEL).stored_bytes == unit_bytes
        for number, ids in enumerate(TEXTS[3:], 4):
            store.put(ids, caches, model=MODEL)
            assert list_stored(store) == [number - 2, number - 1, number]


@pytest.mark.parametrize("engine", BACKENDS)
@pytest.mark.parametrize("policy", ["lru", "benefit"])
def test_gc_at_once_and_in_steps_evict_the_same(new_url, engine, policy) -> None:
    """Units that others followed are candidates at once: the least used texts go as a whole, others stay whole."""
    lengths = []
    for num_steps in (1, 8):
        with PrefixStore(new_url(engine), 10**6, block_tokens=4, codec="frames", policy=policy) as store:
            for ids in TEXTS:  # two units each
                put(store, ids[:4])
                put(store, ids)
            for ids in TEXTS[4:]:
                store.get(ids, model=MODEL)
            stored_bytes = store.stats().bytes
            for step in range(1, num_steps + 1):
                store.gc(stored_bytes - stored_bytes * 7 * step // num_steps // 16)
            lengths.append([store.match(ids, model=MODEL) for ids in TEXTS])
    assert lengths[0] == lengths[1]
    if policy == "lru":  # units of a text need not be of equal benefit
        assert lengths[0][:3] == [0] * 3 and lengths[0][4:] == [8] * 4


@pytest.mark.parametrize("engine", BACKENDS)
def test_uses_fade_when_others_are_evicted(new_url, tmp_path, engine) -> None:
    """A text that was used three times goes after about three rounds of a full store, not never."""
    max_bytes = 3 * measure_unit_bytes(tmp_path / "sizes") + 100
    with PrefixStore(new_url(engine), max_bytes, block_tokens=4, codec="frames", policy="benefit") as store:
        put(store, TEXTS[0])
        for _ in range(2):
            store.get(TEXTS[0], model=MODEL)
        num_puts = 0
        while 1 in list_stored(store):
            put(store, TEXTS[1 + num_puts % 7])
            num_puts += 1
            assert num_puts < 40
        assert num_puts > 4


@pytest.mark.parametrize("engine", BACKENDS)
def test_put_of_texts_that_share_a_first_token_keeps_the_newest(new_url, engine) -> None:
    """A put reuses a token of an older text: that text must not be newer than the one that was put."""
    texts = [[1, *range(number, number + 7)] for number in (10, 20, 30)]
    with PrefixStore(new_url(engine), 1 << 20, block_tokens=4, codec="frames") as store:
        sizes = [put(store, ids) for ids in texts]
        if engine == "directory":
            assert next(entry.last_ids[-1] for entry in store.ls().texts) == texts[-1][-1]
        store.gc(max(sizes))
        assert store.match(texts[-1], model=MODEL) == 8


@pytest.mark.parametrize("engine", BACKENDS)
@pytest.mark.parametrize(("option", "name"), [("max_bytes", "--size-limit"), ("quota", "--quota")])
def test_put_of_text_beyond_limit_evicts_nothing(new_url, tmp_path, engine, option, name) -> None:
    limit = 2 * measure_unit_bytes(tmp_path / "sizes") + 100
    long_ids = np.random.default_rng(0).integers(0, 1000, 700).tolist()
    options = {"block_tokens": 4, "codec": "frames", "namespace": "a", option: limit}
    with PrefixStore(new_url(engine), **options) as store:
        put(store, TEXTS[0])
        refused = store.put(long_ids, layers_of(long_ids), model=MODEL)
        assert (refused.stored_tokens, refused.stored_bytes, refused.raw_bytes, refused.removed_bytes) == (0, 0, 0, 0)
        assert name in refused.notes[0]
        assert list_stored(store) == [1]
        counters = store.usage(own=True).counters
        assert counters["put_tokens"] == 8
        assert counters["evicted_bytes"] == 0
        assert counters["put_raw_bytes"] == 8 * sum(cache.nbytes for cache in layers_of([0]))


def test_put_of_long_text_stores_the_units_that_fit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(unit_codec, "MAX_UNIT_TOKENS", 8)
    unit_bytes = measure_unit_bytes(tmp_path / "sizes")
    with PrefixStore(tmp_path / "s", 3 * unit_bytes + 100, block_tokens=4, codec="frames") as store:
        put(store, TEXTS[0])
        store.pin(TEXTS[0], model=MODEL)
        result = store.put(TEXTS[1] * 4, layers_of(TEXTS[1] * 4), model=MODEL)
        assert result.stored_tokens == store.match(TEXTS[1] * 4, model=MODEL) == 16
        assert result.raw_bytes == 16 * sum(cache.nbytes for cache in layers_of([0]))
        assert result.removed_bytes == 0


@pytest.mark.parametrize("engine", BACKENDS)
def test_policy_is_kept_by_a_store(new_url, engine) -> None:
    url = new_url(engine)
    with PrefixStore(url, policy="benefit") as store:
        put(store, TEXTS[0])
    with PrefixStore(url, create=False) as store:
        assert store.policy == "benefit"
    with pytest.raises(OptionError, match="evicts by policy benefit, not by lru"):
        PrefixStore(url, policy="lru")
    with pytest.raises(OptionError, match="expected one of lru, benefit"):
        PrefixStore(url, policy="belady")


@pytest.mark.parametrize("lost_name", ["index.sqlite", "settings.json"])
def test_policy_survives_loss_of_index_or_settings(tmp_path, lost_name) -> None:
    folder = tmp_path / "s"
    with PrefixStore(folder, block_tokens=4, policy="benefit") as store:
        put(store, TEXTS[0])
    (folder / lost_name).write_bytes(b"{")
    with PrefixStore(folder) as store:
        assert store.policy == "benefit"
        assert same(store.get(TEXTS[0], model=MODEL).layers, TEXTS[0], 8)
    with closing(sqlite3.connect(next(folder.glob("index*.sqlite")))) as index:
        assert index.execute("SELECT policy FROM state").fetchall() == [("benefit",)]
        tokens, nbytes, uses, priority = index.execute("SELECT tokens, bytes, uses, priority FROM unit").fetchone()
    assert priority == uses * compute_benefit(tokens, nbytes) > 0


@pytest.mark.parametrize("policy", ["lru", "benefit"])
def test_object_store_uses_without_limit_count_by_benefit_alone(new_url, run, tmp_path, policy) -> None:
    """A `get` of the command has no limit. stat says what is not counted."""
    url = new_url("file")
    with PrefixStore(url, policy=policy) as store:
        for first_id in (1, 2):
            store.put([first_id, 5, 5], layers_of([first_id, 5, 5]), model=MODEL)
    before = read_uses(url)
    run("store", "get", url, "--token-ids", "1,5,5", "-o", tmp_path / "back.npz")
    is_counted = policy == "benefit"
    assert (read_uses(url) != before) == is_counted
    assert ("uses are those by processes with a limit alone" in run("store", "stat", url).out) != is_counted


def read_uses(url: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(url.removeprefix("file://")).glob("uses/*")}


def test_uses_of_all_processes_are_added(tmp_path) -> None:
    folder = tmp_path / "s"
    with PrefixStore(folder, block_tokens=4, policy="benefit") as store, PrefixStore(folder) as other:
        put(store, TEXTS[0])
        for user in (store, other, other):
            user.get(TEXTS[0], model=MODEL)
        assert put(other, TEXTS[0]) == 0  # which saves nothing
    with closing(sqlite3.connect(folder / "index.sqlite")) as index:
        assert index.execute("SELECT uses FROM unit").fetchall() == [(4,)]


def test_compute_benefit_is_exact_and_bounded() -> None:
    assert compute_benefit(512, 512 * 131072) == BENEFIT_SCALE // 131072
    assert compute_benefit(1, 0) == BENEFIT_SCALE
    use = UnitUse(7, 1 << 40, (1 << 64) - 1)
    assert decode_use(encode_use(use)) == UnitUse(7, 1 << 20, MAX_UNIT_PRIORITY)
    assert decode_use(encode_tick(7)) == UnitUse(7, 1, 0)
    assert decode_use(None) == decode_use(b"damaged") == UnitUse(0, 1, 0)


def test_put_command_takes_the_policy_of_a_new_store(run, tmp_path) -> None:
    cache, folder = tmp_path / "kv.npz", str(tmp_path / "s")
    rows = np.ones((2, 8, 16), np.float16)
    np.savez(cache, **{"layer_0.key": rows, "layer_0.value": rows})
    words = ["store", "put", folder, str(cache), "--token-ids", "1,2,3,4,5,6,7,8", "--fingerprint", "m"]
    run(*words, "--policy", "benefit")
    assert "policy benefit" in run("store", "stat", folder).out
    assert "expected lru or benefit" in run(*words, "--policy", "belady", code=2).err
    assert "evicts by policy benefit" in run(*words, "--policy", "lru", code=2).err


@pytest.mark.parametrize("engine", BACKENDS)
@pytest.mark.parametrize("limit", ["max_bytes", "quota"])
def test_put_above_a_lower_limit_evicts_nothing(new_url, engine, limit) -> None:
    url = new_url(engine)
    with PrefixStore(url, block_tokens=4, codec="frames") as store:
        unit_bytes = put(store, TEXTS[7])
    with PrefixStore(url, block_tokens=4, codec="frames", **{limit: unit_bytes // 4}) as store:
        result = store.put(TEXTS[0], layers_of(TEXTS[0]), model=MODEL)
        assert (result.stored_tokens, result.removed_bytes) == (0, 0) and "nothing was stored" in str(result)
        assert list_stored(store) == [8]


def put_zeros(store: PrefixStore, ids: list[int]) -> int:
    """Put a text whose K and V compress well: its unit has few bytes a token, and so a high benefit."""
    zeros = [
        replace(cache, keys=np.zeros_like(cache.keys), values=np.zeros_like(cache.values)) for cache in layers_of(ids)
    ]
    return store.put(ids, zeros, model=MODEL).stored_bytes


@pytest.mark.parametrize("engine", BACKENDS)
def test_put_of_text_of_lowest_benefit_evicts_another(new_url, engine) -> None:
    with PrefixStore(new_url(engine), block_tokens=4, codec="frames") as store:
        unit_bytes, zeros_bytes = put(store, TEXTS[7]), max(put_zeros(store, ids) for ids in TEXTS[:2])
    assert zeros_bytes < unit_bytes
    limit = unit_bytes + zeros_bytes + 10
    with PrefixStore(new_url(engine), limit, block_tokens=4, codec="frames", policy="benefit") as store:
        for ids in TEXTS[:2]:
            put_zeros(store, ids)
        store.pin(TEXTS[0], model=MODEL)
        result = store.put(TEXTS[7], layers_of(TEXTS[7]), model=MODEL)
        assert result.stored_tokens == 8 and result.stored_bytes == unit_bytes and result.removed_bytes
        assert list_stored(store) == [1, 8]


@pytest.mark.parametrize("engine", BACKENDS)
def test_put_without_space_next_to_pins_of_others_counts_none_of_them(new_url, engine) -> None:
    url = new_url(engine)
    with PrefixStore(url, block_tokens=4, codec="frames", namespace="a") as store:
        limit = put(store, TEXTS[7]) + 10
        store.pin(TEXTS[7], model=MODEL)
    with PrefixStore(url, limit, namespace="b") as store:
        result = store.put(TEXTS[0], layers_of(TEXTS[0]), model=MODEL)
        assert result.stored_tokens == 0 and result.notes[0].endswith(f"{limit:,} are allowed")


@pytest.mark.parametrize("policy", ["lru", "benefit"])
@pytest.mark.parametrize("engine", BACKENDS)
def test_put_without_space_next_to_pins_is_refused(new_url, engine, policy) -> None:
    with PrefixStore(new_url(engine), block_tokens=4, codec="frames") as store:
        limit = put(store, TEXTS[7]) + 10
    with PrefixStore(new_url(engine), limit, block_tokens=4, codec="frames", policy=policy) as store:
        put_zeros(store, TEXTS[0])
        store.pin(TEXTS[0], model=MODEL)
        put_zeros(store, TEXTS[1])
        (pinned_bytes,) = (entry.bytes for entry in store.ls().texts if entry.pinned)
        tokens_before = store.stats().usage.counters["put_tokens"]
        result = store.put(TEXTS[7], layers_of(TEXTS[7]), model=MODEL)
        assert str(result) == (
            "8 tokens: nothing was stored: the size limit (max_bytes, --size-limit) has no room for more: at least "
            f"{limit - 10:,} bytes are needed, {limit:,} are allowed, {pinned_bytes:,} of them taken by pinned texts "
            "and what comes before in this one"
        )
        assert (result.stored_tokens, result.raw_bytes, result.stored_bytes, result.removed_bytes) == (0, 0, 0, 0)
        assert store.stats().usage.counters["put_tokens"] == tokens_before
        assert list_stored(store) == [1, 2]  # for what has no room the unpinned one does not go either
