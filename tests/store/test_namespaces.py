"""Namespaces: no hit, no listing and no eviction across them; their keys are those of another implementation."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from prefixes import DIMS, HEADS, MODEL, agreeing, layers_of, same

from kvmnn import KvmnnError
from kvmnn.errors import OptionError
from kvmnn.store import PrefixStore

pytest.importorskip("fsspec")

IDS = list(range(150))


@pytest.fixture(params=["directory", "redis", "file"])
def url(request: pytest.FixtureRequest, new_url: Callable[[str], str]) -> str:
    return new_url(request.param)


def model_key(tenant: str, ids: list[int]) -> str:
    """Key of a text, as docs/format-store.md says it, from hashlib and json alone."""
    document = {"dtype": "fp16", "layers": [[0, HEADS, DIMS], [1, HEADS, DIMS]], "model": MODEL, "tenant": tenant}
    if not tenant:
        del document["tenant"]
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    space = hashlib.blake2b(b"kvmnn prefix store 1\n" + text.encode(), digest_size=16).digest()
    return hashlib.blake2b(b"text" + space + struct.pack(f"<{len(ids)}I", *ids), digest_size=16).hexdigest()


@pytest.mark.parametrize("tenant", ["", "a", "B.c_d-9", "x" * 64])
def test_namespace_salts_keys_as_documented(url: str, tenant: str) -> None:
    with PrefixStore(url, namespace=tenant or None) as store:
        store.put(IDS, layers_of(IDS), model=MODEL)
        (entry,) = store.ls().texts
        assert entry.key == model_key(tenant, IDS)


def test_namespace_key_of_a_vector() -> None:
    assert model_key("a", [1, 2, 3]) == "80611e16bf17fefc662603c92fecdd8a"


def test_namespaces_share_and_show_nothing(url: str, encryption: str) -> None:
    for tenant, ids in (("a", IDS), ("b", IDS[:70]), (None, [1, 2])):
        with PrefixStore(url, namespace=tenant) as store:
            assert (store.match(IDS, model=MODEL), store.models, store.sessions()) == (0, (), [])
            put = store.put(ids, layers_of(ids), model=MODEL, label="same")
            assert (put.known_tokens, put.stored_tokens) == (0, len(ids))
            store.park("chat", ids, layers_of(ids), model=MODEL)
            store.pin(ids, model=MODEL)
    for tenant, ids in (("a", IDS), ("b", IDS[:70]), (None, [1, 2])):
        with PrefixStore(url, namespace=tenant) as store:
            (entry,) = store.ls().texts
            stats = store.stats()
            assert (entry.tokens, store.ls().bytes, stats.bytes) == (len(ids), entry.bytes, entry.bytes)
            assert (stats.texts, stats.tokens, stats.sessions, stats.pinned) == (1, len(ids), 1, 1)
            assert store.resolve("same").ids.tolist() == store.resume("chat").token_ids == ids
            assert store.sessions() == ["chat"]
    with PrefixStore(url, namespace="a") as store:
        store.forget("chat")
        store.unpin(IDS, model=MODEL)
        store.delete(IDS, model=MODEL)
        assert (store.ls().texts, store.sessions()) == ((), [])
    with PrefixStore(url, namespace="b") as store:
        assert store.resume("chat").prefix.tokens == 70
        assert store.verify().units == 2


def test_ls_and_stats_show_nothing_of_what_others_do(url: str) -> None:
    with PrefixStore(url, namespace="a", max_bytes=1 << 30) as store:  # of object stores, limits alone count uses
        for ids in (IDS[:70], [7, 8]):
            store.put(ids, layers_of(ids), model=MODEL)
    with PrefixStore(url, namespace="a", read_only=True) as store:
        before = [entry.to_dict() for entry in store.ls().texts], store.stats().to_dict()
    with PrefixStore(url, namespace="b", max_bytes=1 << 30) as other:
        for number in range(5):
            ids = [number, *IDS]
            other.put(ids, layers_of(ids), model=MODEL)
            other.get(ids, model=MODEL)
    with PrefixStore(url, namespace="a", read_only=True) as store:
        assert before == ([entry.to_dict() for entry in store.ls().texts], store.stats().to_dict())
        assert [entry.unused_for for entry in store.ls().texts] == [0, 1]
        assert store.stats().index_bytes is None and "index" not in str(store.stats())


def test_namespaces_are_listed_with_their_bytes(url: str, encryption: str, run) -> None:
    sizes = {}
    for tenant, tokens in (("b", 70), ("a", 150), (None, 2)):
        with PrefixStore(url, namespace=tenant) as store:
            store.put(IDS[:tokens], layers_of(IDS[:tokens]), model=MODEL)
            store.put(IDS[:tokens], [*layers_of(IDS[:tokens])], model="other")
            sizes[tenant or ""] = 2 * tokens, store.stats().bytes
    with PrefixStore(url) as store:
        assert {entry.name: (entry.tokens, entry.bytes) for entry in store.namespaces()} == sizes
        assert [entry.name for entry in store.namespaces()] == ["", "a", "b"]
    if "memory" not in url:
        document = json.loads(run("store", "stat", url, "--namespaces", "--json").out)
        assert [entry["bytes"] for entry in document["namespaces"]] == [sizes[name][1] for name in ("", "a", "b")]
        assert (document["tokens"], document["bytes"]) == (444, sum(nbytes for _, nbytes in sizes.values()))
        assert (
            f"namespace b: 2 units, 140 tokens summed over units, {sizes['b'][1]:,} bytes"
            in run("store", "stat", url, "--namespaces").out
        )
        assert "namespaces" not in json.loads(run("store", "stat", url, "--json").out)
        assert "no --namespace" in run("store", "stat", url, "--namespaces", "--namespace", "a", code=2).err


def test_quota_evicts_its_own_namespace_alone(url: str, encryption: str) -> None:
    texts = [[number, *range(70)] for number in range(6)]
    with PrefixStore(url, namespace="b") as store:
        store.put(IDS, layers_of(IDS), model=MODEL)
        other_bytes = store.stats().bytes
    with PrefixStore(url, namespace="a") as store:
        one_bytes = store.put(texts[0], layers_of(texts[0]), model=MODEL).stored_bytes
    with PrefixStore(url, namespace="a", quota=3 * one_bytes + one_bytes // 2) as store:
        for ids in texts[1:]:
            store.put(ids, layers_of(ids), model=MODEL)
        assert store.stats().bytes <= 3 * one_bytes + one_bytes // 2
        assert [store.match(ids, model=MODEL) > 0 for ids in texts] == [False] * 3 + [True] * 3
    with PrefixStore(url, namespace="b", quota=1) as store:
        assert store.match(IDS, model=MODEL) == 150
        put = store.put([7], layers_of([7]), model=MODEL)  # for what has no room nothing goes
        assert (put.stored_tokens, put.removed_bytes, store.stats().bytes) == (0, 0, other_bytes)
    with PrefixStore(url, namespace="a") as store:
        assert store.stats().texts == 3


def test_put_with_keep_label_replaces_no_label(url: str) -> None:
    with PrefixStore(url, namespace="a") as store:
        for label, keep_label, expected in (("one", True, "one"), ("two", True, "one"), ("three", False, "three")):
            store.put(IDS, layers_of(IDS), model=MODEL, label=label, keep_label=keep_label)
            assert [entry.label for entry in store.ls().texts] == [expected]


def test_ls_of_namespaces_alone_counts_them_and_names_none(url: str) -> None:
    for tenant in ("team-b", "team-a"):
        with PrefixStore(url, namespace=tenant) as store:
            store.put(IDS, layers_of(IDS), model=MODEL, label="secret")
    with PrefixStore(url) as store:
        assert store.ls().namespaces == 2  # whose names are their own
        assert str(store.ls()).startswith("no texts outside of the 2 namespaces (--namespace NAME; store stat")
    with PrefixStore(url, namespace="team-c") as store:
        assert (str(store.ls()), store.ls().namespaces) == ("no texts", 0)
    with PrefixStore(url) as store:
        store.put([1], layers_of([1]), model=MODEL)
        assert "namespaces" not in store.ls().to_dict()


@pytest.mark.parametrize(("name", "said"), [("", "namespace is ''"), ("a/b", "namespace is 'a/b'"), ("x" * 65, "is")])
def test_invalid_namespace_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        PrefixStore(tmp_path, namespace=name)
    with pytest.raises(TypeError, match="namespace must be a string"):
        PrefixStore(tmp_path, namespace=5)  # type: ignore[arg-type]
    with pytest.raises(KvmnnError, match="quota is 0"):
        PrefixStore(tmp_path, quota=0)


@pytest.mark.parametrize(("steps", "lookups"), [(40, 5)])
def test_random_operations_never_cross_namespaces(tmp_path: Path, steps: int, lookups: int) -> None:
    """Against a model that knows what each namespace has put; test_encryption.py has 100,800 look-ups."""
    rng = random.Random(steps)
    tenants = ["a", "b", "c", None]
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 40))] for _ in range(60)]
    common = [[agreeing(one, other) for other in texts] for one in texts]
    seeds = {tenant: bytes([number]) for number, tenant in enumerate(tenants)}
    known: dict[str | None, set[int]] = {tenant: set() for tenant in tenants}
    stores = {tenant: PrefixStore(tmp_path, block_tokens=8, codec="frames", namespace=tenant) for tenant in tenants}
    for _ in range(steps):
        tenant, number = rng.choice(tenants), rng.randrange(len(texts))
        store, action, ids = stores[tenant], rng.randrange(10), texts[number]
        if action < 3:
            store.put(ids, layers_of(ids, seed=seeds[tenant]), model=MODEL)
            known[tenant].add(number)
        elif action == 3:
            try:
                store.delete(ids, model=MODEL)
            except KvmnnError:
                continue
            known[tenant] -= {other for other, text in enumerate(texts) if text == ids}
        elif action == 4 and rng.random() < 0.1:
            stores[None].gc(rng.randrange(20_000))
        for other in tenants:
            for asked in [number, *rng.choices(range(len(texts)), k=lookups - 1)]:
                found = stores[other].match(texts[asked], model=MODEL)
                assert found <= max((common[asked][each] for each in known[other]), default=0)
        prefix = store.get(ids, model=MODEL)
        assert same(prefix.layers, ids, prefix.tokens, seed=seeds[tenant]) or not prefix.tokens
    for opened in stores.values():
        opened.close()


def test_stats_of_all_namespaces_are_their_sums(url: str) -> None:
    lengths = {"a": 150, "b": 70, None: 10}
    for tenant, tokens in lengths.items():
        with PrefixStore(url, namespace=tenant) as store:
            store.park("chat", IDS[:tokens], layers_of(IDS[:tokens]), model=MODEL)
            store.pin(IDS[:tokens], model=MODEL)
    for tenant, tokens in lengths.items():
        with PrefixStore(url, namespace=tenant) as store:
            own, total = store.stats(), store.stats(all_namespaces=True)
        assert (own.texts, own.tokens, own.sessions, own.pinned) == (1, tokens, 1, 1)
        assert (total.texts, total.tokens, total.sessions, total.pinned) == (3, 230, 3, 3)


def test_pin_of_a_lost_text_counts_in_its_namespace(tmp_path: Path) -> None:
    with PrefixStore(tmp_path, namespace="a") as store:
        store.put(IDS, layers_of(IDS), model=MODEL)
        store.pin(IDS, model=MODEL)
        (unit,) = (tmp_path / "units").rglob("*.unit")
        unit.write_bytes(b"damage")
        assert store.verify().damaged
        assert (store.stats().texts, store.stats().pinned) == (0, 1)
    for tenant in ("b", None):
        with PrefixStore(tmp_path, namespace=tenant) as store:
            assert store.stats().pinned == 0
            assert store.stats(all_namespaces=True).pinned == 1
