"""What is the same for a store in a directory, in Redis, and over the file systems of fsspec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from prefixes import MODEL, layers_of, same
from redis_server import Server, redis_server

from kvmnn import KvmnnError, LayerCache
from kvmnn.store import PrefixStore

pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture(params=["directory", "redis", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a store that nobody has used before."""
    if request.param == "redis":
        import redis

        found = request.getfixturevalue("server").url
        with redis.Redis.from_url(found) as client:
            client.flushall()
        return str(found)
    places = {"directory": tmp_path / "s", "file": f"file://{tmp_path}/s", "memory": f"memory:/{tmp_path}/s"}
    return str(places[request.param])


def put(store: PrefixStore, ids, **options):
    return store.put(ids, layers_of(ids, **options), model=MODEL)


def test_what_the_bound_has_no_room_for_is_said(url: str) -> None:
    """Of the same text put again with a smaller bound, too."""
    ids = list(range(40))
    said = "of these 40 tokens 0 are stored now: the bound (max_bytes) has no room for more"
    with PrefixStore(url, max_bytes=10) as store:
        made = put(store, ids)
        assert (made.stored_tokens, made.notes, made.removed_bytes) == (0, (said,), made.stored_bytes)
        assert store.match(ids, model=MODEL) == 0
    with PrefixStore(url, max_bytes=1 << 20) as store:
        made = put(store, ids)
        assert (made.stored_tokens, made.notes) == (40, ())
        assert put(store, ids).stored_tokens == 40
    with PrefixStore(url, max_bytes=10) as store:
        again = put(store, ids)
        assert (again.known_tokens, again.stored_tokens, again.notes) == (40, 0, (said,))
        assert (again.removed_bytes, store.stats().bytes) == (made.stored_bytes, 0)


@pytest.mark.parametrize(("bound", "said"), [(0, "max_bytes is 0: expected at least 1"), (-5, "max_bytes is -5")])
def test_a_bound_is_a_number_above_zero(url: str, bound: int, said: str) -> None:
    with pytest.raises(KvmnnError, match=said):
        PrefixStore(url, max_bytes=bound)


def test_a_closed_store_says_so(url: str) -> None:
    """Every call, and the same."""
    store = PrefixStore(url)
    ids = list(range(8))
    put(store, ids)
    store.park("chat", ids, layers_of(ids), model=MODEL)
    store.close()
    store.close()
    texts: tuple[Callable, ...] = (store.match, store.find, store.get, store.pin, store.unpin, store.delete)
    calls: list[Callable[[], object]] = [lambda call=call: call(ids, model=MODEL) for call in texts]
    calls += [store.sessions, store.gc, store.verify, store.stats, store.ls, lambda: store.models]
    calls += [lambda: put(store, ids), lambda: put(store, [1, 2]), lambda: store.export(ids, "none", model=MODEL)]
    calls += [lambda: store.resume("chat"), lambda: store.forget("chat")]
    calls += [lambda: store.park("chat", ids, layers_of(ids), model=MODEL)]
    for call in calls:
        with pytest.raises(KvmnnError, match=r": the store is closed$"):
            call()
    store.close()


def test_a_model_has_one_shape(url: str) -> None:
    """That of what is stored; where nothing is left of it another may come."""
    ids = list(range(8))
    with PrefixStore(url, block_tokens=4) as store:
        put(store, ids)
        with pytest.raises(KvmnnError) as error:
            put(store, [*ids, 9], layers=3)
        said = "under the model a model it holds 2 layers, 2 kv heads x 4 dims, fp16, these are 3 layers, "
        assert said in str(error.value) and "another model needs a fingerprint of its own" in str(error.value)
        one, two = layers_of(ids)
        others = [one, LayerCache(layer=5, keys=two.keys, values=two.values)]
        with pytest.raises(KvmnnError, match="it holds a layer 1 of 2 kv heads x 4, V 4, these are a layer 5 of 2 kv"):
            store.put(ids, others, model=MODEL)
        with pytest.raises(KvmnnError, match=r"these are 2 layers, 2 kv heads x 4 dims \(V 3\), fp16: another"):
            narrow = [LayerCache(layer=c.layer, keys=c.keys, values=c.values[:, :, :3].copy()) for c in layers_of(ids)]
            store.put(ids, narrow, model=MODEL)
        assert put(store, ids, layers=2, dtype="<f4").stored_tokens == 8
        assert same(store.get([*ids, 9], model=MODEL).layers, ids, 8)
        store.put(ids, others, model="another")
        store.delete(ids, model=MODEL)
        assert (store.models, store.stats().models) == (("another",), ("another",))
        put(store, ids, layers=3)
        assert same(store.get(ids, model=MODEL).layers, ids, 8, layers=3)


def test_of_precisions_that_cover_as_much_the_first_put_is_taken(url: str) -> None:
    ids = list(range(8))
    for model, types in (("one", ("<f4", "<f2")), ("two", ("<f2", "<f4"))):
        with PrefixStore(url) as store:
            for dtype in types:
                store.put(ids, layers_of(ids, dtype=dtype), model=model)
    with PrefixStore(url) as store:
        caches = [LayerCache(layer=0, keys=np.ones((1, 8, 4), "<u2"), values=np.ones((1, 8, 4), "<u2"))]
        store.put(ids, caches, model="two")
        assert [store.get(ids, model=model).dtype for model in ("one", "two")] == ["fp32", "fp16"]
