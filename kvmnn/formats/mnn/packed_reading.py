"""Pieces of plain rows from packed files."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...arrays.named_array import Piece, rechunked
from ...dtypes import Part
from ...errors import SourceError
from ...files.mapped import MappedFile
from ...packed.cache_info import LayerInfo
from ...packed.layout import PackLayout
from ...packed.rows import HeadRows, head_bytes, row_bytes, tile_tokens

_BLOCK_BYTES = 1 << 20


_DROP_BYTES = 16 << 20


def packed_runs(path: str, layout: PackLayout, part: Part, layer: LayerInfo, step: int) -> Iterator[Piece]:
    """The live elements of a file in logical order, in runs of `step` bytes; mapped only while they are read."""
    file = MappedFile(path)
    size = head_bytes(layout, part, layer.capacity)
    if file.size != size * layout.kv_heads:
        raise SourceError(f"{path}: changed while it was read: has {file.size} bytes, had {size * layout.kv_heads}")
    row = row_bytes(layout, part)
    blocks = _row_blocks(file, layout, part, layer, max(_BLOCK_BYTES // row, 1))
    yield from rechunked(blocks, step, row * layer.tokens * layout.kv_heads)


def _row_blocks(file: MappedFile, layout: PackLayout, part: Part, layer: LayerInfo, rows: int) -> Iterator[Piece]:
    row = row_bytes(layout, part)
    size = head_bytes(layout, part, layer.capacity)
    tile = tile_tokens(layout, part, layer.capacity)
    tile_bytes = size // -(-layer.capacity // tile)
    rows = rows // tile * tile or min(rows, tile)
    access = HeadRows(layout, part, layer.capacity)
    for head in range(layout.kv_heads):
        buffer, dropped = file.view(head * size, size), 0
        for start in range(0, layer.tokens, rows):
            out = np.empty(min(rows, layer.tokens - start) * row, np.uint8)
            access.read(buffer, start, out)
            yield out
            read = (start + rows) // tile * tile_bytes
            if read - dropped >= _DROP_BYTES and read <= size:
                file.drop(head * size + dropped, read - dropped)
                dropped = read
        file.drop(head * size + dropped, size - dropped)
