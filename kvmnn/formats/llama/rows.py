"""Rows of one kv head after the other out of K and V as llama.cpp lays them out, in runs of bytes.

A row is the `head_dim` values of one cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ... import dtypes
from ...arrays.named_array import Piece, rechunked
from ...dtypes import Bytes
from ...packed.layout import PackLayout
from ...packed.rows import HeadRows
from ..file_bytes import FileBytes
from .state import Tensor
from .types import numbers

_VALUES = 1 << 16
"""Numbers of blocks across heads that are made at a time: they fit a cache of the processor."""

_Fill = Callable[[int, int, Bytes], None]
"""``fill(head, first cell, out)``: rows of consecutive cells of one head."""


def head_runs(file: FileBytes, tensor: Tensor, heads: int, cells: int, step: int) -> Iterator[Piece]:
    """``[kv_head, cell, head_dim]`` words, of blocks float32, in runs of `step` bytes, the last one shorter."""
    row = tensor.row // heads * dtypes.by_name(tensor.type.dtype).itemsize
    if step % row:
        whole = max(step // row, 1) * row
        yield from rechunked(head_runs(file, tensor, heads, cells, whole), step, heads * cells * row)
        return
    fill = _filler(file, tensor, heads, cells)
    total, most = heads * cells, step // row
    for start in range(0, total, most):
        run = np.empty(min(most, total - start) * row, np.uint8)
        done = 0
        while done < run.size:
            head, cell = divmod(start + done // row, cells)
            nbytes = min((cells - cell) * row, run.size - done)
            fill(head, cell, run[done : done + nbytes])
            done += nbytes
        yield run
        del run
    file.drop(tensor.offset, tensor.nbytes)


def _filler(file: FileBytes, tensor: Tensor, heads: int, cells: int) -> _Fill:
    data = file.view(tensor.offset, tensor.nbytes)
    if tensor.type.is_block:
        return _of_blocks(data, tensor, heads, cells)
    if tensor.transposed:
        return _of_channels(data, tensor, heads, cells)
    rows = data.reshape(cells, heads, -1)
    whole = rows.view(f"V{rows.shape[2]}")[:, :, 0]  # a row as one element: copied as such

    def fill(head: int, cell: int, out: Bytes) -> None:
        found = out.view(whole.dtype)
        found[:] = whole[cell : cell + found.size, head]

    return fill


def _of_channels(data: Bytes, tensor: Tensor, heads: int, cells: int) -> _Fill:
    """Rows out of ``[channel, cell]``: what a backend without tiles makes of V."""
    layout = PackLayout(heads, tensor.row // heads, tensor.type.dtype, 1, 1, None)
    rows, by_head = HeadRows(layout, "value", cells), data.reshape(heads, -1)

    def fill(head: int, cell: int, out: Bytes) -> None:
        rows.read(by_head[head], cell, out)

    return fill


def _of_blocks(data: Bytes, tensor: Tensor, heads: int, cells: int) -> _Fill:
    """Numbers out of blocks, which may lie across heads."""
    kind, dims = tensor.type, tensor.row // heads
    blocks = data.reshape(cells, -1, kind.nbytes)
    split = dims % kind.values == 0

    def fill(head: int, cell: int, out: Bytes) -> None:
        found = out.view("=f4").reshape(-1, dims)
        first, last = head * dims // kind.values, -(-(head + 1) * dims // kind.values)
        chosen = blocks[cell : cell + len(found), first:last]
        if split:
            numbers(kind, chosen, found)
            return
        begin, step = head * dims - first * kind.values, max(1, _VALUES // ((last - first) * kind.values))
        for start in range(0, len(found), step):
            rows = found[start : start + step]
            made = np.empty((len(rows), (last - first) * kind.values), np.float32)
            numbers(kind, chosen[start : start + step], made)
            rows[:] = made[:, begin : begin + dims]

    return fill


def file_runs(file: FileBytes, tensor: Tensor, step: int) -> Iterator[Piece]:
    """The bytes of a tensor as they lie in the file, in runs of `step` bytes, the last one shorter."""
    for start in range(0, tensor.nbytes, step):
        nbytes = min(step, tensor.nbytes - start)
        yield file.view(tensor.offset + start, nbytes)
        file.drop(tensor.offset + start, nbytes)
