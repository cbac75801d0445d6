"""Rows of one kv head after the other out of K and V as llama.cpp lays them out, in runs of bytes.

A row is the `head_dim` values of one cell.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

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


class Cells:
    """Cells of a stream: all of them, or those of one sequence.

    Parameters
    ----------
    count
        In the stream.
    spans
        ``(begin, end)`` of those that are taken; None for all.
    """

    def __init__(self, count: int, spans: Sequence[tuple[int, int]] | None = None) -> None:
        self.of = count
        self.spans = ((0, count),) if spans is None else tuple(spans)
        self._begins = [0, *accumulate(end - begin for begin, end in self.spans)]
        self.count = self._begins.pop()

    def run(self, number: int) -> tuple[int, int]:
        """Which cell of the stream is number `number` of those taken, and how many from there on lie together."""
        span = bisect_right(self._begins, number) - 1
        begin, end = self.spans[span]
        cell = begin + number - self._begins[span]
        return cell, end - cell


def head_runs(file: FileBytes, tensor: Tensor, heads: int, taken: Cells, step: int) -> Iterator[Piece]:
    """``[kv_head, cell, head_dim]`` words, of blocks float32, in runs of `step` bytes, the last one shorter."""
    row, cells = tensor.row // heads * dtypes.by_name(tensor.type.dtype).itemsize, taken.count
    if step % row:
        whole = max(step // row, 1) * row
        yield from rechunked(head_runs(file, tensor, heads, taken, whole), step, heads * cells * row)
        return
    fill = _filler(file, tensor, heads, taken.of)
    total, most = heads * cells, step // row
    for start in range(0, total, most):
        run = np.empty(min(most, total - start) * row, np.uint8)
        done = 0
        while done < run.size:
            head, number = divmod(start + done // row, cells)
            cell, together = taken.run(number)
            nbytes = min(together * row, run.size - done)
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


def cell_runs(file: FileBytes, tensor: Tensor, taken: Cells, step: int) -> Iterator[Piece]:
    """The bytes of cells as they lie in the file, one cell behind the other; not of transposed tensors."""
    if taken.spans == ((0, taken.of),):
        yield from file_runs(file, tensor, step)
        return
    row = tensor.nbytes // taken.of
    parts = (file.view(tensor.offset + begin * row, (end - begin) * row) for begin, end in taken.spans)
    yield from rechunked(parts, step, taken.count * row)


def file_runs(file: FileBytes, tensor: Tensor, step: int) -> Iterator[Piece]:
    """The bytes of a tensor as they lie in the file, in runs of `step` bytes, the last one shorter."""
    for start in range(0, tensor.nbytes, step):
        nbytes = min(step, tensor.nbytes - start)
        yield file.view(tensor.offset + start, nbytes)
        file.drop(tensor.offset + start, nbytes)
