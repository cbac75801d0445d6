"""How arrays are cut into chunks, and what lies where: all shapes are those of memory order, the last axis fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

Region = tuple[tuple[int, int], ...]
"""From where to where along each axis."""
Index = tuple[int, ...]

MAX_CHUNKS = 1 << 24
SLAB_BYTES = 128 << 20
"""Of a part of an array that is put together from chunks which do not lie one behind the other."""


def chunk_shape(shape: Index, itemsize: int, limit: int) -> Index:
    """Chunks of at most `limit` bytes (0: any number) that lie one behind the other in memory: one element along the
    first axes, part of the next, all of the others. The chunks along that axis are as equal as can be."""
    if limit == 0:
        return shape
    inner = itemsize * math.prod(shape)
    for axis, length in enumerate(shape):
        inner //= length
        if inner * length <= limit:
            return (1,) * axis + shape[axis:]
        if inner <= limit:
            count = -(-length // (limit // inner))
            return (1,) * axis + (-(-length // count),) + shape[axis + 1 :]
    return (1,) * len(shape)


def counts(shape: Index, chunks: Index) -> Index:
    """Chunks along each axis."""
    return tuple(-(-length // size) for length, size in zip(shape, chunks, strict=True))


def regions(shape: Index, chunks: Index, itemsize: int) -> Iterator[Region]:
    """Parts of the array that lie one behind the other in memory, each at most `SLAB_BYTES` or one row of a chunk."""
    axis = cut_axis(chunks)
    if chunks[axis + 1 :] == shape[axis + 1 :]:  # every chunk is such a part
        rows = chunks[axis] if chunks else 1
    else:
        axis = next(a for a in range(len(shape)) if itemsize * math.prod(shape[a + 1 :]) <= SLAB_BYTES)
        rows = min(chunks[axis], max(1, SLAB_BYTES // (itemsize * math.prod(shape[axis + 1 :]))))
    behind = tuple((0, length) for length in shape[axis + 1 :])
    if not shape:
        yield ()
        return
    for lead in product(*(range(length) for length in shape[:axis])):
        for start in range(0, shape[axis], rows):
            yield (*((i, i + 1) for i in lead), (start, min(start + rows, shape[axis])), *behind)


def cut_axis(chunks: Index) -> int:
    """The first axis along which chunks have more than one element."""
    return next((axis for axis, size in enumerate(chunks) if size > 1), max(len(chunks) - 1, 0))


def touched(region: Region, chunks: Index) -> Iterator[tuple[Index, tuple[slice, ...], tuple[slice, ...]]]:
    """The chunks that a region is of: index, what of the region and what of the chunk."""
    first = [begin // size for (begin, _), size in zip(region, chunks, strict=True)]
    last = [(end - 1) // size for (_, end), size in zip(region, chunks, strict=True)]
    for index in product(*(range(a, b + 1) for a, b in zip(first, last, strict=True))):
        ours, theirs = [], []
        for i, size, (begin, end) in zip(index, chunks, region, strict=True):
            low, high = max(begin, i * size), min(end, (i + 1) * size)
            ours.append(slice(low - begin, high - begin))
            theirs.append(slice(low - i * size, high - i * size))
        yield index, tuple(ours), tuple(theirs)


def size_of(region: Region) -> int:
    """Elements in a region."""
    return math.prod(end - begin for begin, end in region)
