"""Arrays whose words lie anywhere in memory, in any order of axes, read in runs as if they were contiguous."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .named_array import ArrayInfo, NamedArray, Piece, rechunked

View = Callable[[], npt.NDArray[Any]]
"""Makes a view of words: any strides and byte order; what is mapped is mapped only while it is read."""


def strided(info: ArrayInfo, view: View) -> NamedArray:
    """An array in C order over a view.

    Parameters
    ----------
    info
        What the array is: little-endian, of the view's shape and word size, in C order.
    view
        Makes the view.
    """
    return _array_in_c_order(info, partial(_runs, view, np.dtype(f"<u{info.itemsize}")))


def in_c_order(array: NamedArray, index: tuple[int, ...] = ()) -> NamedArray:
    """An array of words, or the part of it at an index of its first axes, in C order; read anew whenever it is read."""
    info = ArrayInfo(
        name=array.name,
        dtype=array.dtype,
        shape=array.shape[len(index) :],
        array_dtype=array.array_dtype.replace(">", "<"),
        element=array.element,
    )
    return strided(info, lambda: words_of(array)[index])


def words_of(array: NamedArray) -> npt.NDArray[Any]:
    """The words of an array as they lie in memory; a view of the file where they lie there as they are."""
    pieces = list(array.pieces())
    data = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint8), *pieces])
    return data.view(f"<u{array.itemsize}").reshape(array.shape, order=array.order)


def strided_pages(info: ArrayInfo, views: Sequence[View]) -> NamedArray:
    """The same over several views that follow each other along the last axis but one."""
    return _array_in_c_order(info, partial(_page_runs, info, views))


def _array_in_c_order(info: ArrayInfo, reader: Callable[[int], Iterator[Piece]]) -> NamedArray:
    return NamedArray(
        name=info.name,
        dtype=info.dtype,
        shape=info.shape,
        array_dtype=info.array_dtype,
        order="C",
        element=info.element,
        reader=reader,
    )


def _page_runs(info: ArrayInfo, views: Sequence[View], step: int) -> Iterator[Piece]:
    words = np.dtype(f"<u{info.itemsize}")
    runs = (
        run
        for lead in np.ndindex(*info.shape[:-2])
        for view in views
        for run in _runs(lambda view=view, lead=lead: view()[lead], words, step)  # type: ignore[misc]
    )
    yield from rechunked(runs, step, info.nbytes)


def _runs(view: View, words: np.dtype[Any], step: int) -> Iterator[Piece]:
    seen = view()
    seen = seen.view(words.newbyteorder(seen.dtype.byteorder))  # bits, not numbers: a NaN keeps its payload
    if seen.flags.c_contiguous and seen.dtype == words:
        data = seen.reshape(-1).view(np.uint8)
        yield from (data[begin : begin + step] for begin in range(0, data.size, step))
        return
    run = step // words.itemsize
    for begin in range(0, seen.size, max(run, 1)):
        out = np.empty(min(run, seen.size - begin), words)
        _copy(seen, begin, begin + out.size, out)
        yield out.view(np.uint8)
        del out


def _copy(view: npt.NDArray[Any], begin: int, end: int, out: npt.NDArray[Any]) -> None:
    """The elements from `begin` to `end`, in C order."""
    if view.ndim <= 1:
        out[:] = view.reshape(-1)[begin:end]
        return
    row = math.prod(view.shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:
        _copy(view[last], begin - last * row, end - last * row, out)
        return
    head, middle = first * row - begin, (last - first) * row
    if head:
        _copy(view[first - 1], row - head, row, out[:head])
    if middle:
        out[head : head + middle].reshape(last - first, *view.shape[1:])[...] = view[first:last]
    if head + middle < out.size:
        _copy(view[last], 0, end - last * row, out[head + middle :])
