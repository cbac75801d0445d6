"""Threads, processes, forks and kills leave a consistent store."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prefixes import MODEL, layers_of, same
from store_soak import killed, together

from kvmnn.store import PrefixStore

WAYS = [("lru", "plain"), ("benefit", "plain"), ("benefit", "encrypted")]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "encryption"), WAYS, indirect=["encryption"])
def test_store_parallel_processes_share_it(policy: str, encryption: str, tmp_path: Path) -> None:
    assert min(together(tmp_path / "s", processes=4, seconds=0.5, policy=policy)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "encryption"), WAYS, indirect=["encryption"])
def test_store_survives_kill_at_any_moment(policy: str, encryption: str, tmp_path: Path) -> None:
    killed(tmp_path / "s", times=2, policy=policy)


def test_store_is_shared_by_threads(tmp_path: Path, encryption: str) -> None:
    """All put the same texts and get each other's."""
    texts = [[*range(6), *[number] * number] for number in range(1, 12)]
    with PrefixStore(tmp_path / "s", block_tokens=4) as store, ThreadPoolExecutor(8) as pool:

        def one(number: int) -> bool:
            ids = texts[number % len(texts)]
            store.put(ids, layers_of(ids), model=MODEL)
            found = store.get(ids, model=MODEL)
            return found.tokens == len(ids) and same(found.layers, ids, len(ids))

        assert all(pool.map(one, range(44)))
        assert store.verify().damaged == ()
        assert store.gc().units == 0
        assert len(list(tmp_path.glob("s/units/*/*.unit"))) == store.stats().units


@pytest.mark.parametrize("codec", ["dense", "frames"])
@pytest.mark.parametrize(
    ("tokens", "known_tokens", "stored_from"),
    [(716, 538, 512), (538, 538, 538), (540, 538, 0), (400, 400, 400)],
    ids=["other end", "whole", "one unit", "within a unit"],
)
def test_put_that_another_overtakes_counts_what_it_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, tokens: int, known_tokens: int, stored_from: int
) -> None:
    """A text that begins alike is added between search and addition of a put: its units are known, not new."""
    first_ids, ids = [*range(538), 7, 7], [*range(538), *range(1000, 1178)][:tokens]
    with PrefixStore(tmp_path / "s", codec=codec) as first, PrefixStore(tmp_path / "s") as second:
        add = second._backend.add_units

        def add_late(*arguments: Any) -> Any:
            first.put(first_ids, layers_of(first_ids), model=MODEL)
            return add(*arguments)

        monkeypatch.setattr(second._backend, "add_units", add_late)
        result = second.put(ids, layers_of(ids), model=MODEL)
        first_units = first.stats().units - bool(result.stored_bytes)
        assert (result.known_tokens, result.stored_from, result.stored_tokens) == (known_tokens, stored_from, tokens)
        token_bytes = sum(part.nbytes for cache in layers_of([0]) for part in (cache.keys, cache.values))
        assert result.raw_bytes == (tokens - stored_from) * token_bytes
        files = sorted((tmp_path / "s" / "units").glob("*/*"))
        assert result.stored_bytes == sum(path.stat().st_size for path in files[first_units:])
        counters = second.usage(own=True).counters
        assert (counters["put_raw_bytes"], counters["put_bytes"]) == (result.raw_bytes, result.stored_bytes)
        assert counters["put_tokens"] == tokens - known_tokens
        assert same(second.get(ids, model=MODEL).layers, ids, tokens)


def test_put_same_text_from_two_stores_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find nothing and encode; of the second put only the new part is stored."""
    one, two = range(10), [*range(8), 60, 61, 62, 63]
    with PrefixStore(tmp_path / "s", block_tokens=4) as first, PrefixStore(tmp_path / "s") as second:
        add = second._backend.add_units

        def late(*arguments):
            first.put(one, layers_of(one), model=MODEL)
            return add(*arguments)

        monkeypatch.setattr(second._backend, "add_units", late)
        assert second.put(one, layers_of(one), model=MODEL).stored_bytes == 0
        first.delete(one, model=MODEL)
        assert second.put(two, layers_of(two), model=MODEL).stored_bytes > 0
        for ids in (one, two):
            assert same(first.get(ids, model=MODEL).layers, ids, len(ids))
        assert first.verify().damaged == ()
        assert first.stats().units == 2
        assert first.gc(max_bytes=0).units == 2


def test_put_prefix_deleted_during_put_is_stored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, ids = range(8), range(12)
    with PrefixStore(tmp_path / "s", block_tokens=4) as store:
        store.put(begin, layers_of(begin), model=MODEL)
        add, gone = store._backend.add_units, []

        def late(*arguments):
            if not gone:
                gone.append(store.delete(begin, model=MODEL))
            return add(*arguments)

        monkeypatch.setattr(store._backend, "add_units", late)
        store.put(ids, layers_of(ids), model=MODEL)
        assert gone[0].units == 1
        assert same(store.get(ids, model=MODEL).layers, ids, 12)


def test_get_unit_evicted_during_get_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a miss, and no note calls it damaged."""
    with PrefixStore(tmp_path / "s", block_tokens=4) as store, PrefixStore(tmp_path / "s") as other:
        store.put(range(8), layers_of(range(8)), model=MODEL)
        read = store._backend.read_units

        def late(units):
            other.gc(max_bytes=0)
            return read(units)

        monkeypatch.setattr(store._backend, "read_units", late)
        found = store.get(range(8), model=MODEL)
        assert (found.tokens, found.notes) == (0, ())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process")
def test_store_forked_child_has_own_connection_and_folder(tmp_path: Path, encryption: str) -> None:
    with PrefixStore(tmp_path / "s", block_tokens=4) as store:
        store.put(range(6), layers_of(range(6)), model=MODEL)
        (mine,) = (tmp_path / "s" / "staging").iterdir()
        child = os.fork()
        if child == 0:
            try:
                store.put(range(9), layers_of(range(9)), model=MODEL)
                found = store.match(range(9), model=MODEL)
                store.close()
                os._exit(0 if found == 9 else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert list((tmp_path / "s" / "staging").iterdir()) == [mine]
        assert same(store.get(range(9), model=MODEL).layers, range(9), 9)
