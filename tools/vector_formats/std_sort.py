"""The order in which libstdc++'s ``std::sort`` leaves (score, block) pairs, highest score first.

The sort is not stable, yet deterministic: median of three, partition, heap sort when that goes too deep, insertion at
the end. Only with it can be told whether a case's result depends on how the reference breaks ties.
"""

from __future__ import annotations

from collections.abc import Sequence

SMALL = 16

Item = tuple[float, int]


def sorted_as_libstdcxx(items: Sequence[Item]) -> list[Item]:
    """A sorted copy."""
    data = list(items)
    if data:
        _introsort(data, 0, len(data), 2 * (len(data).bit_length() - 1))
        for i in range(1, len(data)):
            _insert(data, i)
    return data


def _before(a: Item, b: Item) -> bool:
    return a[0] > b[0]


def _swap(data: list[Item], i: int, j: int) -> None:
    data[i], data[j] = data[j], data[i]


def _introsort(data: list[Item], first: int, last: int, depth: int) -> None:
    while last - first > SMALL:
        if depth == 0:
            _heap_sort(data, first, last)
            return
        depth -= 1
        _median_to_first(data, first, first + 1, first + (last - first) // 2, last - 1)
        cut = _partition(data, first + 1, last, first)
        _introsort(data, cut, last, depth)
        last = cut


def _median_to_first(data: list[Item], to: int, a: int, b: int, c: int) -> None:
    if _before(data[a], data[b]):
        median = b if _before(data[b], data[c]) else c if _before(data[a], data[c]) else a
    else:
        median = a if _before(data[a], data[c]) else c if _before(data[b], data[c]) else b
    _swap(data, to, median)


def _partition(data: list[Item], first: int, last: int, pivot: int) -> int:
    while True:
        while _before(data[first], data[pivot]):
            first += 1
        last -= 1
        while _before(data[pivot], data[last]):
            last -= 1
        if first >= last:
            return first
        _swap(data, first, last)
        first += 1


def _insert(data: list[Item], i: int) -> None:
    value = data[i]
    while i > 0 and _before(value, data[i - 1]):
        data[i] = data[i - 1]
        i -= 1
    data[i] = value


def _heap_sort(data: list[Item], first: int, last: int) -> None:
    heap = data[first:last]
    for parent in range(len(heap) // 2 - 1, -1, -1):
        _sift(heap, parent, len(heap), heap[parent])
    for end in range(len(heap) - 1, 0, -1):
        value, heap[end] = heap[end], heap[0]
        _sift(heap, 0, end, value)
    data[first:last] = heap


def _sift(heap: list[Item], hole: int, size: int, value: Item) -> None:
    """To the bottom along the later children, then up again to where `value` belongs."""
    top = hole
    while 2 * hole + 1 < size:
        child = 2 * hole + 2
        if child == size or _before(heap[child], heap[child - 1]):
            child -= 1
        heap[hole], hole = heap[child], child
    while hole > top and _before(heap[(hole - 1) // 2], value):
        heap[hole], hole = heap[(hole - 1) // 2], (hole - 1) // 2
    heap[hole] = value
