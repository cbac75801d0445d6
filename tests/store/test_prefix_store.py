"""Stored texts are found to the token and bit for bit, and nothing else is."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encrypted_stores import KEY
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixes import MODEL, agreeing, layers_of, same

from kvmnn import KvmnnError, LayerCache
from kvmnn.errors import OptionError, SourceError
from kvmnn.store import PrefixStore


@pytest.fixture
def store(tmp_path: Path):
    with PrefixStore(tmp_path / "store", block_tokens=4) as found:
        yield found


def put(store: PrefixStore, ids, **options):
    return store.put(ids, layers_of(ids, **options), model=MODEL)


def test_put_and_get_round_trip(store: PrefixStore) -> None:
    ids = list(range(11))
    made = put(store, ids)
    assert (made.tokens, made.known_tokens, made.raw_bytes) == (11, 0, 11 * 2 * 2 * 2 * 4 * 2)
    found = store.get(ids, model=MODEL)
    assert (found.tokens, found.requested_tokens, found.notes) == (11, 11, ())
    assert same(found.layers, ids, 11)
    assert [cache.positions.tolist() for cache in found.layers] == [ids, ids]
    assert put(store, ids).known_tokens == 11
    assert store.stats().units == 1


@pytest.mark.parametrize("dtype", ["<f2", "<f4"])
def test_get_dtypes_are_separate(store: PrefixStore, dtype: str) -> None:
    ids = [5, 6, 7, 8, 9]
    put(store, ids, dtype="<f2")
    put(store, [*ids, 1], dtype="<f4")
    name = {"<f2": "fp16", "<f4": "fp32"}[dtype]
    found = store.get([*ids, 1, 2], model=MODEL, dtype=name)
    assert same(found.layers, [*ids, 1], 5 if name == "fp16" else 6, dtype=dtype)
    assert store.match([*ids, 1, 2], model=MODEL) == 6
    assert store.match(ids, model=MODEL, dtype="bf16") == 0
    assert (found.dtype, dict(found.other_precisions)) == (name, {})


def test_get_reports_the_chosen_precision(store: PrefixStore) -> None:
    """The one that covers most; of two equal ones the one that was put first."""
    ids = [5, 6, 7, 8, 9]
    put(store, ids, dtype="<f2")
    put(store, [*ids, 1], dtype="<f4")
    for asked, taken, others in (([*ids, 1], "fp32", {"fp16": 5}), (ids, "fp16", {"fp32": 5}), ([4], None, {})):
        found, matched = store.get(asked, model=MODEL), store.find(asked, model=MODEL)
        assert (
            (found.dtype, dict(found.other_precisions))
            == (matched.dtype, dict(matched.other_precisions))
            == (taken, others)
        )
        assert found.tokens == matched.tokens == store.match(asked, model=MODEL)
        assert {cache.dtype for cache in found.layers} == ({taken} if taken else set())


def test_pin_and_delete_apply_to_all_precisions(store: PrefixStore, tmp_path: Path) -> None:
    """`pin`, `unpin` and `delete` apply to every precision of the text unless one is named; `export` reports it."""
    ids = [5, 6, 7, 8, 9]
    put(store, ids, dtype="<f2")
    put(store, ids, dtype="<f4")
    put(store, [*ids, 1], dtype="<f4")
    exported = store.export(ids, tmp_path / "f", model=MODEL)
    assert (exported.dtype, dict(exported.other_precisions)) == ("fp16", {"fp32": 5})
    assert store.export([*ids, 1], tmp_path / "g", model=MODEL).dtype == "fp32"
    assert store.pin(ids, model=MODEL, dtype="fp32").dtypes == ("fp32",)
    pinned = store.pin(ids, model=MODEL)
    assert (pinned.was_pinned, pinned.dtypes, store.stats().pinned) == (False, ("fp16", "fp32"), 2)
    assert store.pin(ids, model=MODEL).was_pinned
    assert str(pinned) == "5 tokens in fp16 and fp32: pinned"
    assert store.delete(ids, model=MODEL).units == 0
    assert store.unpin(ids, model=MODEL, dtype="fp16").dtypes == ("fp16",)
    assert store.unpin(ids, model=MODEL).dtypes == ("fp32",)
    assert store.unpin(ids, model=MODEL).dtypes == ()
    gone = store.delete([*ids, 1], model=MODEL)
    assert (gone.units, gone.dtypes) == (2, ("fp32",))  # with the shorter text in fp32
    gone = store.delete(ids, model=MODEL)
    assert (gone.units, gone.dtypes) == (1, ("fp16",))
    assert store.match(ids, model=MODEL) == 0 == store.stats().units
    with pytest.raises(KvmnnError, match="holds 0 tokens of this text of 5 under this model"):
        store.delete(ids, model=MODEL)


def test_get_bf16_is_uint16_words(store: PrefixStore) -> None:
    caches = [LayerCache(layer=0, keys=np.arange(24, dtype="<u2").reshape(2, 3, 4), values=np.ones((2, 3, 4), "<u2"))]
    store.put([1, 2, 3], caches, model=MODEL)
    (found,) = store.get([1, 2, 3, 4], model=MODEL).layers
    assert found.dtype == "bf16"
    assert (found.keys == caches[0].keys).all() and (found.values == caches[0].values).all()


def test_put_accepts_views_and_different_layers(store: PrefixStore) -> None:
    """Token-major views, big-endian words, another number of heads in each layer, layers in any order."""
    wide = np.arange(2 * 9 * 6, dtype=np.float32).reshape(9, 2, 6).transpose(1, 0, 2)
    narrow = np.arange(9 * 3, dtype=">f4").reshape(1, 9, 3)
    caches = [LayerCache(layer=3, keys=narrow, values=narrow.copy()), LayerCache(layer=1, keys=wide, values=wide + 1)]
    store.put(np.arange(9, dtype=np.int16), caches, model=MODEL)
    found = store.get(tuple(range(9)), model=MODEL).layers
    assert [cache.layer for cache in found] == [1, 3]
    assert (found[0].keys == wide).all() and (found[0].values == wide + 1).all()
    assert (found[1].keys == narrow).all() and (found[1].values == narrow).all()


def test_put_texts_with_common_prefix_share_blocks(store: PrefixStore) -> None:
    one, two = [*range(20)], [*range(12), 99, 98, 97]
    put(store, one)
    made = put(store, two)
    assert made.known_tokens == 12
    assert made.raw_bytes == 3 * 64
    assert same(store.get(two, model=MODEL).layers, two, 15)
    assert same(store.get(one, model=MODEL).layers, one, 20)


@pytest.mark.parametrize("cut", range(21))
def test_get_finds_every_prefix_to_the_token(store: PrefixStore, cut: int) -> None:
    ids = list(range(100, 121))
    put(store, ids)
    asked = [*ids[:cut], 7, 7, 7]
    assert store.match(asked, model=MODEL) == cut
    found = store.get(asked, model=MODEL)
    assert found.tokens == cut
    assert same(found.layers, ids, cut) if cut else found.layers == []


def test_get_finds_longest_of_many_branches(store: PrefixStore) -> None:
    begin = [1, 2, 3, 4]
    for last in range(40):
        put(store, [*begin, 50, last, last, last, last])
    asked = [*begin, 50, 17, 17, 3]
    assert store.match(asked, model=MODEL) == 7
    assert same(store.get(asked, model=MODEL).layers, [*begin, 50, 17, 17, 17], 7)


def test_ls_lists_texts_that_are_no_prefix(store: PrefixStore) -> None:
    """Every text that is no prefix of a longer one, whatever units others share."""
    for ids in (range(8), range(20), [*range(12), 99, 98, 97], [*range(12), 50, 51, 52, 53], [7]):
        put(store, ids)
    listed = [(entry.tokens, entry.unused_for) for entry in store.ls().texts]
    assert sorted(tokens for tokens, _ in listed) == [1, 15, 16, 20]
    assert [ago for _, ago in listed] == sorted(ago for _, ago in listed if ago is not None)
    assert store.stats().texts == 4


def test_put_growing_text_leaves_no_tails(store: PrefixStore) -> None:
    ids = list(range(8))
    put(store, ids)
    for more in range(9, 12):
        put(store, list(range(more)))
    assert store.stats().units == 2
    assert same(store.get(range(11), model=MODEL).layers, range(11), 11)


def test_put_prefix_of_stored_text_stores_nothing(store: PrefixStore) -> None:
    put(store, range(11))
    for end in (1, 4, 6, 8, 10):
        assert put(store, range(end)).stored_bytes == 0


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_store_equals_dictionary_model(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Texts of few ids, so that many begin alike: what covers most of a text is found, bit for bit.

    Of three namespaces in one store one has a quota: of it no more is found, and of the others nothing goes.
    """
    block, quota = data.draw(st.sampled_from([1, 2, 3, 8])), data.draw(st.sampled_from([700, 2500, 1 << 20]))
    texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
    tenants = st.sampled_from(["limited", "b", None])
    stored: dict[str | None, dict[tuple[int, ...], None]] = {"limited": {}, "b": {}, None: {}}
    seeds = {"limited": b"l", "b": b"b", None: b""}
    folder = tmp_path_factory.mktemp("s")
    with ExitStack() as stack:
        stores = {
            tenant: stack.enter_context(
                PrefixStore(folder, block_tokens=block, namespace=tenant, quota=quota if tenant == "limited" else None)
            )
            for tenant in stored
        }
        for tenant, ids in data.draw(st.lists(st.tuples(tenants, texts), min_size=1, max_size=12)):
            made = put(stores[tenant], ids, seed=seeds[tenant])
            known = max((agreeing(ids, other) for other in stored[tenant]), default=0)
            stored[tenant][tuple(ids)] = None
            assert made.known_tokens <= known if tenant == "limited" else made.known_tokens == known
            assert made.stored_tokens == len(ids) or (tenant == "limited" and "the quota (" in made.notes[0])
            assert stores[tenant].match(ids, model=MODEL) == made.stored_tokens
            assert stores["limited"].stats().bytes <= quota
        for tenant, store in stores.items():
            for ids in [*data.draw(st.lists(texts, max_size=4)), *stored[tenant]]:
                wanted = max((agreeing(ids, other) for other in stored[tenant]), default=0)
                found = store.get(ids, model=MODEL)
                assert store.match(ids, model=MODEL) == found.tokens <= wanted
                assert found.tokens == wanted or (tenant == "limited" and quota < 1 << 20)
                assert same(found.layers, ids, found.tokens, seed=seeds[tenant]) if found.tokens else not found.layers
            assert store.stats().texts <= len(stored[tenant])
        assert store.verify().damaged == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"max_bytes": 1500}, {"namespace": "a", "quota": 1500, "key": KEY}], ids=["limit", "quota, encrypted"]
)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_store_evictions_never_yield_other_rows(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], data: st.DataObject
) -> None:
    texts = st.lists(st.integers(0, 1), min_size=1, max_size=24)
    with PrefixStore(tmp_path_factory.mktemp("s"), block_tokens=3, **options) as store:
        stored: list[list[int]] = []
        for ids in data.draw(st.lists(texts, min_size=1, max_size=20)):
            put(store, ids)
            stored.append(ids)
            if data.draw(st.booleans()) and store.match(ids, model=MODEL) == len(ids):
                store.delete(ids, model=MODEL)
            assert store.stats().bytes <= 1500
            asked = data.draw(texts)
            found = store.get(asked, model=MODEL)
            assert found.tokens <= max(agreeing(asked, other) for other in stored)
            assert found.tokens == 0 or same(found.layers, asked, found.tokens)
        assert store.verify().damaged == ()
        assert store.gc().other_files == 0


def test_eviction_removes_least_recently_used(tmp_path: Path) -> None:
    with PrefixStore(tmp_path / "s", block_tokens=4) as store:
        size = put(store, range(8)).stored_bytes
    with PrefixStore(tmp_path / "t", max_bytes=3 * size, block_tokens=4) as store:
        texts = [[first, *range(7)] for first in (10, 20, 30, 40)]
        for ids in texts[:3]:
            put(store, ids)
        store.get(texts[0], model=MODEL)
        put(store, texts[3])
        assert [store.match(ids, model=MODEL) for ids in texts] == [8, 0, 8, 8]


def test_eviction_removes_ends_before_prefixes(tmp_path: Path) -> None:
    with PrefixStore(tmp_path / "s", block_tokens=4) as store:
        put(store, range(8))
        put(store, range(16))
        store.get(range(8), model=MODEL)
        assert store.gc(max_bytes=store.stats().bytes - 1).units == 1
        assert store.match(range(16), model=MODEL) == 8


def test_gc_keeps_pinned_texts(store: PrefixStore) -> None:
    put(store, range(8))
    put(store, range(16))
    put(store, [9, 9, 9])
    store.pin(range(8), model=MODEL)
    store.pin(range(8), model=MODEL)
    result, nbytes = store.gc(max_bytes=7), store.stats().bytes
    assert result.kept == f"{nbytes:,} bytes are left, {nbytes - 7:,} above the limit, of texts that are pinned"
    assert result.excess_bytes == nbytes - 7
    assert store.match(range(16), model=MODEL) == 8
    assert store.stats().pinned == 1
    assert store.ls().texts[0].pinned
    assert store.delete(range(8), model=MODEL).units == 0
    assert store.unpin(range(8), model=MODEL).was_pinned
    assert not store.unpin(range(8), model=MODEL).was_pinned
    assert store.gc(max_bytes=0).units == 1
    assert store.stats().bytes == 0
    for call in (store.pin, store.unpin):
        with pytest.raises(KvmnnError, match=r"holds 0 tokens of this text of 8"):
            call(range(8), model=MODEL)


def test_delete_keeps_blocks_of_longer_texts(store: PrefixStore) -> None:
    put(store, range(8))
    put(store, [*range(8), 50, 51])
    put(store, [*range(8), 60, 61, 62, 63, 64])
    assert store.delete(range(8), model=MODEL).units == 0
    assert store.delete([*range(8), 50], model=MODEL).units == 0, "a longer text goes on"
    removed = store.delete([*range(8), 50, 51], model=MODEL)
    assert (removed.units, removed.kept) == (1, "its first 8 tokens stay, which other texts have or a pin keeps")
    assert store.match([*range(8), 50], model=MODEL) == 8
    removed = store.delete([*range(8), 60, 61, 62, 63, 64], model=MODEL)
    assert (removed.units, removed.kept) == (2, "")
    assert store.stats().units == 0
    with pytest.raises(KvmnnError, match="holds 0 tokens"):
        store.delete(range(8), model=MODEL)


def test_park_and_resume_sessions(store: PrefixStore) -> None:
    ids = list(range(10))
    store.park("chat 1", ids, layers_of(ids), model=MODEL)
    store.park("chat 1", [*ids, 11], layers_of([*ids, 11]), model=MODEL)
    assert store.sessions() == ["chat 1"]
    found = store.resume("chat 1")
    assert found.token_ids == [*ids, 11]
    assert same(found.prefix.layers, found.token_ids, 11)
    store.gc(max_bytes=0)
    assert store.resume("chat 1").prefix.tokens == 0
    store.forget("chat 1")
    for call in (store.resume, store.forget):
        with pytest.raises(KvmnnError, match="there is no session 'chat 1'"):
            call("chat 1")


def test_get_models_are_separate(store: PrefixStore) -> None:
    put(store, range(6))
    store.put(range(6), layers_of(range(6), seed=b"x"), model="another")
    assert same(store.get(range(6), model="another").layers, range(6), 6, seed=b"x")
    assert same(store.get(range(6), model=MODEL).layers, range(6), 6)
    assert store.match(range(6), model="a third") == 0
    assert store.models == (MODEL, "another")


def test_put_invalid_ids_or_layers_are_refused(store: PrefixStore) -> None:
    ids = list(range(6))
    caches = layers_of(ids)
    for wrong in ([], [[1]], [1.5], [-1], [1 << 32], ["a"], [[1], [2, 3]], [10**30]):
        with pytest.raises(KvmnnError, match="token ids"):
            store.match(wrong, model=MODEL)
    with pytest.raises(KvmnnError, match="layer 0 holds 6 tokens, there are 5 token ids"):
        store.put(ids[:5], caches, model=MODEL)
    cut = LayerCache(layer=0, keys=caches[0].keys, values=caches[0].values, positions=np.array([0, 1, 2, 3, 4, 9]))
    with pytest.raises(KvmnnError, match="does not hold the tokens 0 to 5 of its text"):
        store.put(ids, [cut, caches[1]], model=MODEL)
    with pytest.raises(KvmnnError, match="expected each once"):
        store.put(ids, [caches[0], caches[0]], model=MODEL)
    with pytest.raises(KvmnnError, match="there are 0 layers"):
        store.put(ids, [], model=MODEL)
    with pytest.raises(KvmnnError, match="expected one dtype"):
        store.put(ids, [caches[0], layers_of(ids, dtype="<f4")[1]], model=MODEL)
    for model in ("", "x" * 257, "a\nb"):
        with pytest.raises(KvmnnError, match=r"model is .*: expected a fingerprint"):
            store.put(ids, caches, model=model)
    assert store.stats().units == 0


def test_open_other_block_size_is_refused(tmp_path: Path) -> None:
    with PrefixStore(tmp_path / "s", block_tokens=16) as store:
        put(store, range(40))
    with PrefixStore(tmp_path / "s") as store:
        assert store.block_tokens == 16
        assert store.match(range(40), model=MODEL) == 40
    with pytest.raises(OptionError, match="has blocks of 16 tokens, not of 64"):
        PrefixStore(tmp_path / "s", block_tokens=64)


def test_put_long_text_is_several_units(tmp_path: Path) -> None:
    ids = np.random.default_rng(3).integers(0, 50_000, 1300)
    with PrefixStore(tmp_path / "s") as store:
        put(store, ids)
        assert [store.stats().units, store.stats().blocks] == [3, 20]
        for tokens in (1, 63, 64, 511, 512, 513, 1024, 1299, 1300):
            found = store.get([*ids[:tokens], 60_000], model=MODEL)
            assert found.tokens == tokens
            assert same(found.layers, ids, tokens)


def test_open_missing_store_is_refused(tmp_path: Path) -> None:
    with PrefixStore(tmp_path / "s") as store:
        put(store, [1, 2, 3])
    with pytest.raises(KvmnnError, match="the store is closed"):
        store.match([1], model=MODEL)
    store.close()
    with pytest.raises(SourceError, match=r"is not a prefix store: there is no such directory"):
        PrefixStore(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()
