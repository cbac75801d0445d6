"""Rows of one kv head after the other out of K and V as llama.cpp lays them out, in runs of bytes.

A row is the `head_dim` values of one cell.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np

from ... import dtypes
from ...arrays.array import Chunk, rechunk
from ...dtypes import Bytes
from ...packed.layout import HeadRowAccessor, PackLayout
from ..base import FileBytes
from .ggml_types import dequantize
from .state import CacheTensor

_VALUES_PER_BATCH = 1 << 16
"""Numbers of blocks across heads that are made at a time: they fit a cache of the processor."""

_FillFunction = Callable[[int, int, Bytes], None]
"""``fill(head, first cell, out)``: rows of consecutive cells of one head."""


class CellSelection:
    """Cells of a stream: all of them, or those of one sequence.

    Parameters
    ----------
    num_cells
        In the stream.
    spans
        ``(begin, end)`` of those that are taken; None for all.
    """

    def __init__(self, num_stream_cells: int, spans: Sequence[tuple[int, int]] | None = None) -> None:
        self.num_stream_cells = num_stream_cells
        self.spans = ((0, num_stream_cells),) if spans is None else tuple(spans)
        self._begins = [0, *accumulate(end - begin for begin, end in self.spans)]
        self.num_cells = self._begins.pop()

    def locate(self, index: int) -> tuple[int, int]:
        """Which cell of the stream is number `index` of those taken, and how many from there on lie together."""
        span = bisect_right(self._begins, index) - 1
        begin, end = self.spans[span]
        cell = begin + index - self._begins[span]
        return cell, end - cell


def iter_head_chunks(
    file: FileBytes, tensor: CacheTensor, heads: int, selection: CellSelection, chunk_bytes: int
) -> Iterator[Chunk]:
    """``[kv_head, cell, head_dim]`` words, of blocks float32, in runs of `chunk_bytes` bytes, the last one shorter."""
    row_bytes, num_cells = (
        tensor.row_values // heads * dtypes.parse_dtype(tensor.type.dtype).itemsize,
        selection.num_cells,
    )
    if chunk_bytes % row_bytes:
        aligned_bytes = max(chunk_bytes // row_bytes, 1) * row_bytes
        yield from rechunk(
            iter_head_chunks(file, tensor, heads, selection, aligned_bytes), chunk_bytes, heads * num_cells * row_bytes
        )
        return
    fill = _make_filler(file, tensor, heads, selection.num_stream_cells)
    total_rows, max_rows = heads * num_cells, chunk_bytes // row_bytes
    for start in range(0, total_rows, max_rows):
        chunk = np.empty(min(max_rows, total_rows - start) * row_bytes, np.uint8)
        num_filled = 0
        while num_filled < chunk.size:
            head, cell_index = divmod(start + num_filled // row_bytes, num_cells)
            cell, num_contiguous = selection.locate(cell_index)
            nbytes = min(num_contiguous * row_bytes, chunk.size - num_filled)
            fill(head, cell, chunk[num_filled : num_filled + nbytes])
            num_filled += nbytes
        yield chunk
        del chunk
    file.release_pages(tensor.offset, tensor.nbytes)


def _make_filler(file: FileBytes, tensor: CacheTensor, heads: int, num_cells: int) -> _FillFunction:
    data = file.view(tensor.offset, tensor.nbytes)
    if tensor.type.is_block:
        return _make_block_filler(data, tensor, heads, num_cells)
    if tensor.is_transposed:
        return _make_channel_filler(data, tensor, heads, num_cells)
    rows = data.reshape(num_cells, heads, -1)
    row_elements = rows.view(f"V{rows.shape[2]}")[:, :, 0]  # a row as one element: copied as such

    def fill(head: int, cell: int, out: Bytes) -> None:
        rows_view = out.view(row_elements.dtype)
        rows_view[:] = row_elements[cell : cell + rows_view.size, head]

    return fill


def _make_channel_filler(data: Bytes, tensor: CacheTensor, heads: int, num_cells: int) -> _FillFunction:
    """Rows out of ``[channel, cell]``: what a backend without tiles makes of V."""
    layout = PackLayout(heads, tensor.row_values // heads, tensor.type.dtype, 1, 1, None)
    rows, by_head = HeadRowAccessor(layout, "value", num_cells), data.reshape(heads, -1)

    def fill(head: int, cell: int, out: Bytes) -> None:
        rows.read_rows(by_head[head], cell, out)

    return fill


def _make_block_filler(data: Bytes, tensor: CacheTensor, heads: int, num_cells: int) -> _FillFunction:
    """Numbers out of blocks, which may lie across heads."""
    ggml_type, head_dim = tensor.type, tensor.row_values // heads
    blocks = data.reshape(num_cells, -1, ggml_type.nbytes)
    is_head_aligned = head_dim % ggml_type.values_per_block == 0

    def fill(head: int, cell: int, out: Bytes) -> None:
        values = out.view("=f4").reshape(-1, head_dim)
        first_block, block_end = (
            head * head_dim // ggml_type.values_per_block,
            -(-(head + 1) * head_dim // ggml_type.values_per_block),
        )
        selected_blocks = blocks[cell : cell + len(values), first_block:block_end]
        if is_head_aligned:
            dequantize(ggml_type, selected_blocks, values)
            return
        begin, rows_per_batch = (
            head * head_dim - first_block * ggml_type.values_per_block,
            max(1, _VALUES_PER_BATCH // ((block_end - first_block) * ggml_type.values_per_block)),
        )
        for start in range(0, len(values), rows_per_batch):
            rows = values[start : start + rows_per_batch]
            block_values = np.empty((len(rows), (block_end - first_block) * ggml_type.values_per_block), np.float32)
            dequantize(ggml_type, selected_blocks[start : start + rows_per_batch], block_values)
            rows[:] = block_values[:, begin : begin + head_dim]

    return fill


def iter_cell_chunks(
    file: FileBytes, tensor: CacheTensor, selection: CellSelection, chunk_bytes: int
) -> Iterator[Chunk]:
    """The bytes of cells as they lie in the file, one cell behind the other; not of transposed tensors."""
    if selection.spans == ((0, selection.num_stream_cells),):
        yield from iter_tensor_chunks(file, tensor, chunk_bytes)
        return
    cell_bytes = tensor.nbytes // selection.num_stream_cells
    parts = (
        file.view(tensor.offset + begin * cell_bytes, (end - begin) * cell_bytes) for begin, end in selection.spans
    )
    yield from rechunk(parts, chunk_bytes, selection.num_cells * cell_bytes)


def iter_tensor_chunks(file: FileBytes, tensor: CacheTensor, chunk_bytes: int) -> Iterator[Chunk]:
    """The bytes of a tensor as they lie in the file, in runs of `chunk_bytes` bytes, the last one shorter."""
    for start in range(0, tensor.nbytes, chunk_bytes):
        nbytes = min(chunk_bytes, tensor.nbytes - start)
        yield file.view(tensor.offset + start, nbytes)
        file.release_pages(tensor.offset + start, nbytes)
