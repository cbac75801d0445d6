"""Memory of what `get` returns: used again only when nothing refers to it."""

import numpy as np

from kvmnn import LayerCache
from kvmnn.store import PrefixStore
from kvmnn.store.output_memory import MAX_KEPT_BYTES, OutputMemory


def address(data):
    return data.__array_interface__["data"][0]


def test_output_memory_without_references_is_used_again():
    memory = OutputMemory()
    first = memory.allocate(1000)
    where = address(first)
    del first
    assert address(memory.allocate(900)) == where


def test_output_memory_with_a_view_left_is_not_used_again():
    memory = OutputMemory()
    view = memory.allocate(1000).view(np.uint16)[10:20].reshape(2, 5).T
    other = memory.allocate(1000)
    view[:], other[:] = 7, 0
    assert (view == 7).all()
    assert not np.shares_memory(view, other)


def test_output_memory_for_a_small_result_is_not_part_of_a_large_buffer():
    memory = OutputMemory()
    memory.allocate(1 << 20)
    assert memory.allocate(1000).base.size == 1000


def test_output_memory_of_a_huge_result_is_not_kept():
    memory = OutputMemory()
    memory.allocate(MAX_KEPT_BYTES + 1)
    assert memory._buffer.size == 0


def test_get_while_an_earlier_result_is_used_leaves_it_unchanged(tmp_path):
    rng = np.random.default_rng(5)
    texts = [(list(range(n, n + 128)), rng.standard_normal((2, 1, 2, 128, 16)).astype(np.float16)) for n in (0, 500)]
    with PrefixStore(tmp_path / "s") as store:
        for ids, (keys, values) in texts:
            store.put(ids, [LayerCache(layer=0, keys=keys[0], values=values[0])], model="m")
        held = store.get(texts[0][0], model="m").layers[0].keys  # the values are gone
        for _ in range(3):
            other = store.get(texts[1][0], model="m").layers[0]
            assert (other.keys == texts[1][1][0][0]).all()
            assert (other.values == texts[1][1][1][0]).all()
            del other
        assert (held == texts[0][1][0][0]).all()
