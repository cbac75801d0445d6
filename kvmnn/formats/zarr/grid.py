"""How arrays are cut into chunks, and what lies where: all shapes are those of memory order, the last axis fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

ArrayRegion = tuple[tuple[int, int], ...]
"""From where to where along each axis."""
ChunkIndex = tuple[int, ...]

MAX_CHUNKS = 1 << 24
MAX_SLAB_BYTES = 128 << 20
"""Of a part of an array that is put together from chunks which do not lie one behind the other."""


def choose_chunk_shape(shape: ChunkIndex, itemsize: int, max_bytes: int) -> ChunkIndex:
    """Chunks of at most `max_bytes` bytes (0: any number) that lie one behind the other in memory: one element along
    the first axes, part of the next, all of the others. The chunks along that axis are as equal as can be."""
    if max_bytes == 0:
        return shape
    inner_bytes = itemsize * math.prod(shape)
    for axis, length in enumerate(shape):
        inner_bytes //= length
        if inner_bytes * length <= max_bytes:
            return (1,) * axis + shape[axis:]
        if inner_bytes <= max_bytes:
            num_parts = -(-length // (max_bytes // inner_bytes))
            return (1,) * axis + (-(-length // num_parts),) + shape[axis + 1 :]
    return (1,) * len(shape)


def count_chunks(shape: ChunkIndex, chunk_shape: ChunkIndex) -> ChunkIndex:
    """Chunks along each axis."""
    return tuple(-(-length // size) for length, size in zip(shape, chunk_shape, strict=True))


def iter_slabs(shape: ChunkIndex, chunk_shape: ChunkIndex, itemsize: int) -> Iterator[ArrayRegion]:
    """Parts of the array that lie one behind the other in memory, each at most `MAX_SLAB_BYTES` or one row of a
    chunk.
    """
    axis = find_split_axis(chunk_shape)
    if chunk_shape[axis + 1 :] == shape[axis + 1 :]:  # every chunk is such a part
        rows_per_slab = chunk_shape[axis] if chunk_shape else 1
    else:
        axis = next(a for a in range(len(shape)) if itemsize * math.prod(shape[a + 1 :]) <= MAX_SLAB_BYTES)
        rows_per_slab = min(chunk_shape[axis], max(1, MAX_SLAB_BYTES // (itemsize * math.prod(shape[axis + 1 :]))))
    trailing_ranges = tuple((0, length) for length in shape[axis + 1 :])
    if not shape:
        yield ()
        return
    for leading_index in product(*(range(length) for length in shape[:axis])):
        for start in range(0, shape[axis], rows_per_slab):
            yield (
                *((i, i + 1) for i in leading_index),
                (start, min(start + rows_per_slab, shape[axis])),
                *trailing_ranges,
            )


def find_split_axis(chunk_shape: ChunkIndex) -> int:
    """The first axis along which chunks have more than one element."""
    return next((axis for axis, size in enumerate(chunk_shape) if size > 1), max(len(chunk_shape) - 1, 0))


def iter_overlapping_chunks(
    region: ArrayRegion, chunk_shape: ChunkIndex
) -> Iterator[tuple[ChunkIndex, tuple[slice, ...], tuple[slice, ...]]]:
    """The chunks that a region is of: index, what of the region and what of the chunk."""
    first_index = [begin // size for (begin, _), size in zip(region, chunk_shape, strict=True)]
    last_index = [(end - 1) // size for (_, end), size in zip(region, chunk_shape, strict=True)]
    for index in product(*(range(a, b + 1) for a, b in zip(first_index, last_index, strict=True))):
        region_slices, chunk_slices = [], []
        for i, size, (begin, end) in zip(index, chunk_shape, region, strict=True):
            low, high = max(begin, i * size), min(end, (i + 1) * size)
            region_slices.append(slice(low - begin, high - begin))
            chunk_slices.append(slice(low - i * size, high - i * size))
        yield index, tuple(region_slices), tuple(chunk_slices)


def count_elements(region: ArrayRegion) -> int:
    """Elements in a region."""
    return math.prod(end - begin for begin, end in region)
