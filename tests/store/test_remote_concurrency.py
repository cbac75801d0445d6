"""Several users of one remote store at once: one acts in the middle of another's call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from prefixes import MODEL, layers_of, same

from kvmnn.store import PrefixStore

pytest.importorskip("fsspec")


@pytest.fixture(params=["redis", "file", "memory"])
def url(request: pytest.FixtureRequest, new_url: Callable[[str], str]) -> str:
    return new_url(request.param)


def put(store: PrefixStore, ids):
    return store.put(ids, layers_of(ids), model=MODEL)


def test_remote_pin_during_eviction_is_respected(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pin is seen before anything is removed."""
    with PrefixStore(url, block_tokens=4) as store, PrefixStore(url) as other:
        put(store, range(8))
        put(store, [5, 5, 5])
        real, pinned = store._backend.key_values._key_values.delete_if_unchanged, []

        def late(*arguments):
            if not pinned:
                pinned.append(other.pin(range(8), model=MODEL))
            return real(*arguments)

        monkeypatch.setattr(store._backend.key_values._key_values, "delete_if_unchanged", late)
        assert store.gc(max_bytes=0).units == 1
        assert same(other.get(range(8), model=MODEL).layers, range(8), 8)


@pytest.mark.parametrize("end", [540, 600])
def test_remote_put_that_another_overtakes_counts_what_it_stores(
    url: str, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first unit of both is another (540 and 512 tokens), or one value under one name, which both write."""
    one, two = [*range(538), *range(end - 538)], [*range(538), *range(1000, 1178)]
    with PrefixStore(url) as first, PrefixStore(url) as second:
        add = second._backend.add_units

        def add_late(*arguments):
            put(first, one)
            return add(*arguments)

        monkeypatch.setattr(second._backend, "add_units", add_late)
        result = put(second, two)
        token_bytes = sum(part.nbytes for cache in layers_of([0]) for part in (cache.keys, cache.values))
        assert (result.known_tokens, result.stored_from, result.stored_tokens) == (512, 512, 716)
        assert result.raw_bytes == (716 - 512) * token_bytes
        before = first.stats().bytes
        first.delete(two, model=MODEL)
        assert result.stored_bytes == before - first.stats().bytes


def test_remote_two_first_puts_lose_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find nothing; the second put detects the first and stores only the remaining part."""
    one, two = [*range(20)], [*range(10), 99, 98, 97, 96]
    with PrefixStore(url, block_tokens=4) as first, PrefixStore(url) as second:
        add, done = second._backend.add_units, []

        def late(*arguments):
            if not done:
                done.append(put(first, one))
            return add(*arguments)

        monkeypatch.setattr(second._backend, "add_units", late)
        assert put(second, two).known_tokens == 10
    with PrefixStore(url) as store:
        for ids in (one, two):
            assert same(store.get(ids, model=MODEL).layers, ids, len(ids))
        assert store.gc().other_files == 0


def test_remote_threads_and_two_stores_share_it(url: str) -> None:
    texts = [[*range(6), *[number] * number] for number in range(1, 10)]
    with PrefixStore(url, block_tokens=4) as one, PrefixStore(url) as two, ThreadPoolExecutor(4) as pool:

        def use(number: int) -> bool:
            store, ids = (one, two)[number % 2], texts[number % len(texts)]
            put(store, ids)
            found = store.get(ids, model=MODEL)
            return found.notes == () and (found.tokens == 0 or same(found.layers, ids, found.tokens))

        assert all(pool.map(use, range(27)))
        assert one.verify().damaged == ()


def test_remote_gc_during_put_removes_nothing_of_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each of the calls that a put of a new model makes of the engine; object stores know no transactions."""
    calls, ids = 0, list(range(300))
    with PrefixStore(url, block_tokens=4) as store, PrefixStore(url) as cleaner:
        engine = store._backend.key_values._key_values
        names = ("put_many", "put_if_absent", "_create", "get_many", "list_names", "list_neighbours", "contains_many")
        for at in range(100):
            model, left = f"model {at}", [at]

            def cleaned_before(real, left=left):
                def call(*arguments):
                    if not left[0]:
                        cleaner.gc()
                    left[0] -= 1
                    return real(*arguments)

                return call

            with monkeypatch.context() as patched:
                for name in filter(lambda name: hasattr(engine, name), names):
                    patched.setattr(engine, name, cleaned_before(getattr(engine, name)))
                store.put(ids, layers_of(ids), model=model)
            if left[0] >= 0:
                break
            calls += 1
            with PrefixStore(url) as fresh:
                found = fresh.get(ids, model=model)
                assert found.notes == () and found.tokens == 300 and same(found.layers, ids, 300)
    assert 3 < calls < 99


def test_remote_put_during_gc_is_kept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each of the calls that gc makes of the engine."""
    calls = 0
    with PrefixStore(url, block_tokens=4) as cleaner, PrefixStore(url) as store:
        put(store, list(range(8)))
        for at in range(100):
            ids, left = [at, *range(9)], [at]

            def ask(call, left=left, ids=ids):
                if not left[0]:
                    put(store, ids)
                left[0] -= 1
                return call()

            monkeypatch.setattr(cleaner._backend.key_values, "_with_retry", ask)
            cleaner.gc()
            if left[0] >= 0:
                break
            calls += 1
            assert store.match(ids, model=MODEL) == 10
            with PrefixStore(url) as fresh:
                assert same(fresh.get(ids, model=MODEL).layers, ids, 10)
    assert 4 < calls < 99
