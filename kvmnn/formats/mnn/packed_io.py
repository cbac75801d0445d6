"""Plain rows read from packed files, and written into them, in chunks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from ...arrays.array import Chunk, rechunk
from ...dtypes import Part
from ...errors import KvmnnError, SourceError
from ...files.atomic import wrap_os_errors
from ...files.mapped_file import MappedFile
from ...packed.cache_info import LayerInfo
from ...packed.layout import HeadRowAccessor, PackLayout, get_head_bytes, get_row_bytes, get_tile_tokens

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


RowOrder = Literal["head", "token"]
"""Which axis runs slowest: ``[kv_head, token, head_dim]`` or ``[token, kv_head, head_dim]``."""

_WRITE_RELEASE_BYTES = 16 << 20
_READ_CHUNK_BYTES = 256 << 10
_MAX_IN_MEMORY_BYTES = 16 << 20
"""Bytes of a file that is filled in memory and written in one go: its pages one by one cost the system far more."""


class PackedPartWriter:
    """One layer's K or V file being filled; padding is zero, as in the files that the engine makes.

    Parameters
    ----------
    target
        The name that the caller knows the file by.
    path
        Where the bytes go; an existing empty file.
    layout, part, capacity
        What it holds, and for how many tokens it has room.
    num_tokens
        How many come.
    order
        Of the axes of what comes.
    """

    def __init__(
        self,
        target: Path,
        path: Path,
        layout: PackLayout,
        part: Part,
        *,
        capacity: int,
        num_tokens: int,
        order: RowOrder = "head",
    ) -> None:
        self._num_heads, self._num_tokens, self._order = layout.kv_heads, num_tokens, order
        self._accessor = HeadRowAccessor(layout, part, capacity)
        self._row_bytes = layout.head_dim * layout.itemsize
        head_bytes = get_head_bytes(layout, part, capacity)
        self._partial_row: Chunk = np.empty(0, np.uint8)
        self._num_rows = 0  # rows that have come
        self._unreleased_bytes = 0
        self._num_filled = 0  # bytes besides rows that have come
        self._target, self._path = target, path
        self._mapping: mmap.mmap | None = None
        if head_bytes * layout.kv_heads <= _MAX_IN_MEMORY_BYTES:
            self._buffer = np.zeros((layout.kv_heads, head_bytes), np.uint8)
        else:
            with wrap_os_errors(target), open(path, "r+b") as file:
                reserve_file_size(file.fileno(), head_bytes * layout.kv_heads)
                self._mapping = mmap.mmap(file.fileno(), 0)
            self._buffer = np.frombuffer(self._mapping, np.uint8).reshape(layout.kv_heads, head_bytes)

    def fill_unused(self, chunk: Chunk) -> None:
        """Take the next bytes of what the file holds besides rows, before any row comes."""
        buffer = self._buffer.reshape(-1)
        if self._num_filled + chunk.size > buffer.size:
            raise KvmnnError(f"{self._target}: more bytes came than the file has")
        buffer[self._num_filled : self._num_filled + chunk.size] = chunk
        self._num_filled += chunk.size

    def write_rows(self, chunk: Chunk) -> None:
        """The next bytes of the array, little-endian words."""
        for head, token, rows in self._iter_placed_rows(chunk):
            self._accessor.write_rows(self._buffer[head], token, rows)
        self._unreleased_bytes += chunk.size
        if self._unreleased_bytes >= _WRITE_RELEASE_BYTES:
            self._release_pages()
            self._unreleased_bytes = 0

    def rewind(self) -> None:
        """Check that every row has come, and go back to the first one; from now on the file is what is looked at."""
        expected_rows = self._num_tokens * self._num_heads
        if self._num_rows != expected_rows or self._partial_row.size:
            raise KvmnnError(f"{self._target}: {self._num_rows} rows came, {expected_rows} were announced")
        self._num_rows = 0
        if self._buffer.flags.writeable and self._mapping is None:
            self._write_buffer()

    def _write_buffer(self) -> None:
        """What was filled in memory into the file, which takes its place."""
        with wrap_os_errors(self._target):
            with open(self._path, "r+b", buffering=0) as file:
                remaining = self._buffer.reshape(-1).data
                while remaining:
                    remaining = remaining[file.write(remaining) :]
            mapped_file = MappedFile(self._path)
        self._buffer = mapped_file.view(0, mapped_file.size).reshape(self._buffer.shape)

    def matches_next(self, chunk: Chunk) -> bool:
        """Whether the next bytes of the array are in the file."""
        for head, token, rows in self._iter_placed_rows(chunk):
            stored_rows = np.empty_like(rows)
            self._accessor.read_rows(self._buffer[head], token, stored_rows)
            if not np.array_equal(stored_rows, rows):
                return False
        return True

    def iter_chunks(self) -> Iterator[Chunk]:
        """The rows in the file, head after head, behind `rewind`; each run is good until the next."""
        buffer = np.empty(max(1, _READ_CHUNK_BYTES // self._row_bytes) * self._row_bytes, np.uint8)
        for head_buffer in self._buffer:
            for first_token in range(0, self._num_tokens, buffer.size // self._row_bytes):
                chunk = buffer[: (self._num_tokens - first_token) * self._row_bytes]
                self._accessor.read_rows(head_buffer, first_token, chunk)
                yield chunk
            self._release_pages()

    def close(self) -> None:
        """Let go of the file."""
        del self._buffer
        if self._mapping:
            self._mapping.close()

    def _release_pages(self) -> None:
        if self._mapping and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)  # shared pages: what was written stays in the file

    def _iter_placed_rows(self, chunk: Chunk) -> Iterator[tuple[int, int, Chunk]]:
        """The complete rows that have come, as runs of one head: ``(head, first token, rows)``."""
        if self._partial_row.size:
            chunk = np.concatenate([self._partial_row, chunk])
        num_rows = chunk.size // self._row_bytes
        self._partial_row = chunk[num_rows * self._row_bytes :].copy()
        if self._num_rows + num_rows > self._num_tokens * self._num_heads:
            raise KvmnnError(f"{self._target}: more rows came than {self._num_tokens} tokens have")
        table = chunk[: num_rows * self._row_bytes].reshape(num_rows, self._row_bytes)
        yield from self._iter_head_major(table) if self._order == "head" else self._iter_token_major(table)
        self._num_rows += num_rows

    def _iter_head_major(self, table: Chunk) -> Iterator[tuple[int, int, Chunk]]:
        num_done = 0
        while num_done < len(table):
            head, token = divmod(self._num_rows + num_done, self._num_tokens)
            num_rows = min(self._num_tokens - token, len(table) - num_done)
            yield head, token, table[num_done : num_done + num_rows].reshape(-1)
            num_done += num_rows

    def _iter_token_major(self, table: Chunk) -> Iterator[tuple[int, int, Chunk]]:
        num_heads = self._num_heads
        for head in range(num_heads):
            first_row = (head - self._num_rows) % num_heads
            if first_row < len(table):
                head_rows = np.ascontiguousarray(table[first_row::num_heads])
                yield head, (self._num_rows + first_row) // num_heads, head_rows.reshape(-1)


def reserve_file_size(handle: int, nbytes: int) -> None:
    """Give the file its size; where the system can, reserve it too: a full disk under a mapping would kill us."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, nbytes)
    else:
        os.ftruncate(handle, nbytes)
