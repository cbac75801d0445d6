"""Pieces of plain rows from packed files."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...arrays.named_array import Chunk, rechunk
from ...dtypes import Part
from ...errors import SourceError
from ...files.mapped import MappedFile
from ...packed.cache_info import LayerInfo
from ...packed.layout import PackLayout
from ...packed.rows import HeadRowAccessor, get_head_bytes, get_row_bytes, get_tile_tokens

_READ_BLOCK_BYTES = 1 << 20


_READ_RELEASE_BYTES = 16 << 20


def iter_packed_chunks(
    path: str, layout: PackLayout, part: Part, layer: LayerInfo, chunk_bytes: int
) -> Iterator[Chunk]:
    """The live elements of a file in logical order, in runs of `chunk_bytes` bytes; mapped only while they are read."""
    file = MappedFile(path)
    head_bytes = get_head_bytes(layout, part, layer.capacity)
    if file.size != head_bytes * layout.kv_heads:
        raise SourceError(
            f"{path}: changed while it was read: has {file.size} bytes, had {head_bytes * layout.kv_heads}"
        )
    row_bytes = get_row_bytes(layout, part)
    blocks = _iter_row_blocks(file, layout, part, layer, max(_READ_BLOCK_BYTES // row_bytes, 1))
    yield from rechunk(blocks, chunk_bytes, row_bytes * layer.tokens * layout.kv_heads)


def _iter_row_blocks(
    file: MappedFile, layout: PackLayout, part: Part, layer: LayerInfo, rows_per_block: int
) -> Iterator[Chunk]:
    row_bytes = get_row_bytes(layout, part)
    head_bytes = get_head_bytes(layout, part, layer.capacity)
    tile_tokens = get_tile_tokens(layout, part, layer.capacity)
    tile_bytes = head_bytes // -(-layer.capacity // tile_tokens)
    rows_per_block = rows_per_block // tile_tokens * tile_tokens or min(rows_per_block, tile_tokens)
    accessor = HeadRowAccessor(layout, part, layer.capacity)
    for head in range(layout.kv_heads):
        buffer, num_released = file.view(head * head_bytes, head_bytes), 0
        for start in range(0, layer.tokens, rows_per_block):
            block = np.empty(min(rows_per_block, layer.tokens - start) * row_bytes, np.uint8)
            accessor.read_rows(buffer, start, block)
            yield block
            num_read = (start + rows_per_block) // tile_tokens * tile_bytes
            if num_read - num_released >= _READ_RELEASE_BYTES and num_read <= head_bytes:
                file.release_pages(head * head_bytes + num_released, num_read - num_released)
                num_released = num_read
        file.release_pages(head * head_bytes + num_released, head_bytes - num_released)
