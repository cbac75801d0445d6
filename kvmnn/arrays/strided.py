"""Arrays whose words lie anywhere in memory, in any order of axes, read in runs as if they were contiguous."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .named_array import ArrayInfo, Chunk, LazyArray, rechunk

ViewFactory = Callable[[], npt.NDArray[Any]]
"""Makes a view of words: any strides and byte order; what is mapped is mapped only while it is read."""


def from_strided_view(info: ArrayInfo, make_view: ViewFactory) -> LazyArray:
    """An array in C order over a view.

    Parameters
    ----------
    info
        What the array is: little-endian, of the view's shape and word size, in C order.
    make_view
        Makes the view.
    """
    return _array_in_c_order(info, partial(_iter_view_chunks, make_view, np.dtype(f"<u{info.itemsize}")))


def to_c_contiguous(array: LazyArray, index: tuple[int, ...] = ()) -> LazyArray:
    """An array of words, or the part of it at an index of its first axes, in C order; read anew whenever it is read."""
    info = ArrayInfo(
        name=array.name,
        dtype=array.dtype,
        shape=array.shape[len(index) :],
        array_dtype=array.array_dtype.replace(">", "<"),
        element=array.element,
    )
    return from_strided_view(info, lambda: read_elements(array)[index])


def read_elements(array: LazyArray) -> npt.NDArray[Any]:
    """The words of an array as they lie in memory; a view of the file where they lie there as they are."""
    chunks = list(array.iter_chunks())
    data = chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.uint8), *chunks])
    return data.view(f"<u{array.itemsize}").reshape(array.shape, order=array.order)


def from_strided_pages(info: ArrayInfo, view_factories: Sequence[ViewFactory]) -> LazyArray:
    """The same over several views that follow each other along the last axis but one."""
    return _array_in_c_order(info, partial(_iter_page_chunks, info, view_factories))


def _array_in_c_order(info: ArrayInfo, reader: Callable[[int], Iterator[Chunk]]) -> LazyArray:
    return LazyArray(
        name=info.name,
        dtype=info.dtype,
        shape=info.shape,
        array_dtype=info.array_dtype,
        order="C",
        element=info.element,
        reader=reader,
    )


def _iter_page_chunks(info: ArrayInfo, view_factories: Sequence[ViewFactory], chunk_bytes: int) -> Iterator[Chunk]:
    element_type = np.dtype(f"<u{info.itemsize}")
    chunks = (
        chunk
        for lead in np.ndindex(*info.shape[:-2])
        for view in view_factories
        for chunk in _iter_view_chunks(lambda view=view, lead=lead: view()[lead], element_type, chunk_bytes)  # type: ignore[misc]
    )
    yield from rechunk(chunks, chunk_bytes, info.nbytes)


def _iter_view_chunks(make_view: ViewFactory, element_type: np.dtype[Any], chunk_bytes: int) -> Iterator[Chunk]:
    elements = make_view()
    elements = elements.view(
        element_type.newbyteorder(elements.dtype.byteorder)
    )  # bits, not numbers: a NaN keeps its payload
    if elements.flags.c_contiguous and elements.dtype == element_type:
        data = elements.reshape(-1).view(np.uint8)
        yield from (data[begin : begin + chunk_bytes] for begin in range(0, data.size, chunk_bytes))
        return
    chunk_elements = chunk_bytes // element_type.itemsize
    for begin in range(0, elements.size, max(chunk_elements, 1)):
        chunk = np.empty(min(chunk_elements, elements.size - begin), element_type)
        _copy_elements(elements, begin, begin + chunk.size, chunk)
        yield chunk.view(np.uint8)
        del chunk


def _copy_elements(view: npt.NDArray[Any], begin: int, end: int, target: npt.NDArray[Any]) -> None:
    """The elements from `begin` to `end`, in C order."""
    if view.ndim <= 1:
        target[:] = view.reshape(-1)[begin:end]
        return
    row_size = math.prod(view.shape[1:])
    first_row, last_row = -(-begin // row_size), end // row_size
    if first_row > last_row:
        _copy_elements(view[last_row], begin - last_row * row_size, end - last_row * row_size, target)
        return
    head_size, middle_size = first_row * row_size - begin, (last_row - first_row) * row_size
    if head_size:
        _copy_elements(view[first_row - 1], row_size - head_size, row_size, target[:head_size])
    if middle_size:
        target[head_size : head_size + middle_size].reshape(last_row - first_row, *view.shape[1:])[...] = view[
            first_row:last_row
        ]
    if head_size + middle_size < target.size:
        _copy_elements(view[last_row], 0, end - last_row * row_size, target[head_size + middle_size :])
