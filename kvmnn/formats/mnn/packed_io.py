"""Read plain rows from packed files, write them in chunks, and account for every byte of the files.

Besides the rows of live tokens there is unused capacity and padding inside tiles, which an exact restore needs. In a
freshly computed prefix all of it is zero; if a session continued, or tokens were dropped, it has stale rows.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

from ... import dtypes
from ..._util.dataclass import dataclass
from ...arrays.array import Chunk, LazyArray, rechunk
from ...bundle.manifest import PackedFileEntry, PackedRecord, format_unused_name, name_state
from ...dtypes import PARTS, Bytes, Part
from ...errors import KvmnnError, SourceError
from ...files.atomic import wrap_os_errors
from ...files.mapped_file import MappedFile
from ...packed.cache_info import CacheInfo, LayerInfo
from ...packed.layout import HeadRowAccessor, PackLayout, get_head_bytes, get_row_bytes, get_row_dtype, get_tile_tokens
from ...packed.params import locate_element
from .packed_files import PackedFiles, PackedLayer

_READ_BLOCK_BYTES = 1 << 20
_READ_RELEASE_BYTES = 16 << 20


def make_packed_array(name: str, path: str, layout: PackLayout, part: Part, layer: LayerInfo) -> LazyArray:
    """Return the live elements of a file as an array ``[kv_head, token, head_dim]``; mapped only while read."""
    dtype = get_row_dtype(layout, part)
    return LazyArray(
        name=name,
        dtype=dtype,
        shape=(layout.kv_heads, layer.tokens, layout.head_dim),
        array_dtype=dtypes.parse_dtype(dtype).numpy_dtype.str,
        reader=partial(_iter_packed_chunks, path, layout, part, layer),
    )


def _iter_packed_chunks(
    path: str, layout: PackLayout, part: Part, layer: LayerInfo, chunk_bytes: int
) -> Iterator[Chunk]:
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
"""Slowest axis: ``[kv_head, token, head_dim]`` or ``[token, kv_head, head_dim]``."""

_WRITE_RELEASE_BYTES = 16 << 20
_READ_CHUNK_BYTES = 256 << 10
_MAX_IN_MEMORY_BYTES = 16 << 20
"""Maximum size of a file that is filled in memory and written at once, which is faster than page by page."""


class PackedPartWriter:
    """Writer of one layer's K or V file; padding is zero, as in the engine's files.

    Parameters
    ----------
    target
        The file's name in messages.
    path
        The temporary file to write; it must exist and be empty.
    layout, part, capacity
        Its layout, and its capacity in tokens.
    num_tokens
        Number of tokens to write.
    order
        Order of the axes of the input.
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
        """Write the next unused bytes of the file; call it before any rows are written."""
        buffer = self._buffer.reshape(-1)
        if self._num_filled + chunk.size > buffer.size:
            raise KvmnnError(f"{self._target}: more bytes came than the file has")
        buffer[self._num_filled : self._num_filled + chunk.size] = chunk
        self._num_filled += chunk.size

    def write_rows(self, chunk: Chunk) -> None:
        """Write the next bytes of the array, as little-endian elements."""
        for head, token, rows in self._iter_placed_rows(chunk):
            self._accessor.write_rows(self._buffer[head], token, rows)
        self._unreleased_bytes += chunk.size
        if self._unreleased_bytes >= _WRITE_RELEASE_BYTES:
            self._release_pages()
            self._unreleased_bytes = 0

    def rewind(self) -> None:
        """Check that every row was written, and return to the first one; from now on the file itself is read."""
        expected_rows = self._num_tokens * self._num_heads
        if self._num_rows != expected_rows or self._partial_row.size:
            raise KvmnnError(f"{self._target}: {self._num_rows} rows came, {expected_rows} were announced")
        self._num_rows = 0
        if self._buffer.flags.writeable and self._mapping is None:
            self._write_buffer()

    def _write_buffer(self) -> None:
        """Write the memory buffer to the file, and map the file in its place."""
        with wrap_os_errors(self._target):
            with open(self._path, "r+b", buffering=0) as file:
                remaining = self._buffer.reshape(-1).data
                while remaining:
                    remaining = remaining[file.write(remaining) :]
            mapped_file = MappedFile(self._path)
        self._buffer = mapped_file.view(0, mapped_file.size).reshape(self._buffer.shape)

    def matches_next(self, chunk: Chunk) -> bool:
        """Return whether the file contains the next bytes of the array."""
        for head, token, rows in self._iter_placed_rows(chunk):
            stored_rows = np.empty_like(rows)
            self._accessor.read_rows(self._buffer[head], token, stored_rows)
            if not np.array_equal(stored_rows, rows):
                return False
        return True

    def iter_chunks(self) -> Iterator[Chunk]:
        """Yield the rows in the file, head after head, after `rewind`; each chunk is valid until the next."""
        buffer = np.empty(max(1, _READ_CHUNK_BYTES // self._row_bytes) * self._row_bytes, np.uint8)
        for head_buffer in self._buffer:
            for first_token in range(0, self._num_tokens, buffer.size // self._row_bytes):
                chunk = buffer[: (self._num_tokens - first_token) * self._row_bytes]
                self._accessor.read_rows(head_buffer, first_token, chunk)
                yield chunk
            self._release_pages()

    def close(self) -> None:
        """Close the file."""
        del self._buffer
        if self._mapping:
            self._mapping.close()

    def _release_pages(self) -> None:
        if self._mapping and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)  # shared pages: what was written stays in the file

    def _iter_placed_rows(self, chunk: Chunk) -> Iterator[tuple[int, int, Chunk]]:
        """Yield the complete rows so far as runs of one head: ``(head, first token, rows)``."""
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
    """Set the file's size and, if the system can, reserve the space: a full disk kills a process with a mapping."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, nbytes)
    else:
        os.ftruncate(handle, nbytes)


_TILE_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class _TileChunk:
    """A chunk of whole tiles of one head."""

    #: The head, and the offset of the chunk in the file.
    head: int
    offset: int
    #: First row, and number of live rows from there on.
    first_row: int
    num_live: int
    #: Its bytes in the file.
    packed_bytes: Bytes
    #: Its rows.
    accessor: HeadRowAccessor

    def read_unused(self) -> Bytes:
        """Return the chunk's bytes with those of live rows set to zero."""
        unused_bytes = self.packed_bytes.copy()
        if self.num_live:
            self.accessor.clear_rows(unused_bytes, 0, self.num_live)
        return unused_bytes


def _iter_tile_chunks(file: MappedFile, layout: PackLayout, part: Part, layer: LayerInfo) -> Iterator[_TileChunk]:
    head_bytes = get_head_bytes(layout, part, layer.capacity)
    if file.size != head_bytes * layout.kv_heads:
        raise SourceError(f"{file.path}: changed while it was read: has {file.size} bytes")
    tile_tokens = get_tile_tokens(layout, part, layer.capacity)
    num_tiles = -(-layer.capacity // tile_tokens)
    tile_bytes = head_bytes // num_tiles
    chunk_tiles = max(1, _TILE_CHUNK_BYTES // tile_bytes)
    for head in range(layout.kv_heads):
        for first_tile in range(0, num_tiles, chunk_tiles):
            num_chunk_tiles = min(chunk_tiles, num_tiles - first_tile)
            first_row, offset = first_tile * tile_tokens, head * head_bytes + first_tile * tile_bytes
            num_live = max(0, min(layer.tokens - first_row, num_chunk_tiles * tile_tokens))
            packed_bytes = file.view(offset, num_chunk_tiles * tile_bytes)
            accessor = HeadRowAccessor(layout, part, num_chunk_tiles * tile_tokens)
            yield _TileChunk(head, offset, first_row, num_live, packed_bytes, accessor)
            file.release_pages(offset, num_chunk_tiles * tile_bytes)


def account_for_files(files: PackedFiles, info: CacheInfo, *, left_out: str = "") -> PackedRecord:
    """Split every file into live rows and unused bytes, reassemble it in memory, and compare."""
    entries, difference = [], ""
    for (packed_layer, layer), part in product(zip(files.layers, info.layers, strict=True), PARTS):
        entry, first_difference = _account_for_file(
            packed_layer.get_path(part), info.get_layer_layout(layer), part, layer, include_unused=not left_out
        )
        entries.append(entry)
        difference = difference or first_difference
    entries += [_account_for_state(state, part) for state in files.states for part in PARTS]
    entries.sort(key=lambda entry: (entry.layer, PARTS.index(entry.part)))
    return PackedRecord(tuple(entries), f"{left_out}; {difference}" if difference and left_out else "")


def _account_for_state(state: PackedLayer, part: Part) -> PackedFileEntry:
    """Describe a file of state other than K and V, all of whose bytes are stored."""
    file, name = MappedFile(state.get_path(part)), name_state(state.layer, part)
    sha256 = file.compute_sha256()
    if file.size % 2:
        raise SourceError(f"{file.path}: has {file.size} bytes, an odd number: not state that an engine writes")
    return PackedFileEntry(
        layer=state.layer, part=part, nbytes=file.size, sha256=sha256, unused_array=name, is_state=True
    )


def _account_for_file(
    path: str, layout: PackLayout, part: Part, layer: LayerInfo, *, include_unused: bool
) -> tuple[PackedFileEntry, str]:
    """Describe a file of K or V, and the first nonzero byte of its unused part."""
    file, hasher, first_difference = MappedFile(path), hashlib.sha256(), ""
    for chunk in _iter_tile_chunks(file, layout, part, layer):
        hasher.update(chunk.packed_bytes.data)
        unused_bytes = chunk.read_unused()
        if not first_difference and unused_bytes.any():
            first_difference = _describe_byte(path, layout, part, layer, chunk, int(np.flatnonzero(unused_bytes)[0]))
        if include_unused:
            _check_roundtrip(path, chunk, unused_bytes, get_row_bytes(layout, part))
    unused_name = format_unused_name(layer.layer, part) if first_difference and include_unused else None
    entry = PackedFileEntry(
        layer=layer.layer, part=part, nbytes=file.size, sha256=hasher.hexdigest(), unused_array=unused_name
    )
    return entry, first_difference


def _check_roundtrip(path: str, chunk: _TileChunk, unused_bytes: Bytes, row_bytes: int) -> None:
    """Write live rows over the unused bytes, as restoring does, and compare with the file."""
    if chunk.num_live:
        live_rows = np.empty(chunk.num_live * row_bytes, np.uint8)
        chunk.accessor.read_rows(chunk.packed_bytes, 0, live_rows)
        chunk.accessor.write_rows(unused_bytes, 0, live_rows)
    if not np.array_equal(unused_bytes, chunk.packed_bytes):
        byte_position = chunk.offset + int(np.flatnonzero(unused_bytes != chunk.packed_bytes)[0])
        raise KvmnnError(
            f"{path}: its rows do not make the same file again, first at byte {byte_position:,} (please report this)"
        )


def find_difference(files: PackedFiles, info: CacheInfo, *, max_bytes: int | None = None) -> str:
    """Describe the first nonzero byte outside live rows; empty for none, and for more than `max_bytes`."""
    first_text, num_bytes = "", 0
    for (packed_layer, layer), part in product(zip(files.layers, info.layers, strict=True), PARTS):
        path, layout = packed_layer.get_path(part), info.get_layer_layout(layer)
        for chunk in _iter_tile_chunks(MappedFile(path), layout, part, layer):
            nonzero_offsets = np.flatnonzero(chunk.read_unused())
            num_bytes += nonzero_offsets.size
            if nonzero_offsets.size and not first_text:
                first_text = _describe_byte(path, layout, part, layer, chunk, int(nonzero_offsets[0]))
            if max_bytes is None and first_text:
                return first_text
            if max_bytes is not None and num_bytes > max_bytes:
                return ""
    return first_text


def _describe_byte(
    path: str, layout: PackLayout, part: Part, layer: LayerInfo, chunk: _TileChunk, chunk_offset: int
) -> str:
    """Describe a byte of a chunk that belongs to no live token: file, byte, head, row, dimension, element."""
    itemsize = layout.itemsize
    element = chunk_offset // itemsize
    row, dim = locate_element(layout, part, element, layer.capacity)
    element_value = chunk.packed_bytes[element * itemsize : (element + 1) * itemsize].view(
        dtypes.parse_dtype(layout.dtype).numpy_dtype
    )[0]
    value_text = f"the word {int(element_value):#06x}" if layout.dtype == "bf16" else f"{float(element_value):.6g}"
    location_text = f"head {chunk.head}, row {chunk.first_row + row}, " + (
        f"dim {dim}" if dim < layout.head_dim else f"padding after the {layout.head_dim} dims"
    )
    return (
        f"{os.path.basename(path)}, byte {chunk.offset + element * itemsize:,} ({location_text}) is {value_text}, and "
        f"{layer.tokens:,} live tokens leave 0 there"
    )


def make_unused_arrays(files: PackedFiles, info: CacheInfo, record: PackedRecord) -> list[LazyArray]:
    """Make an array of the unused bytes of each file that has some, live rows set to zero.

    Files of state are stored whole.
    """
    packed_layer_by_number = {layer.layer: layer for layer in files.all_layers}
    layer_info_by_number = {layer.layer: layer for layer in info.layers}
    arrays = []
    for entry in record.files:
        if entry.unused_array is None:
            continue
        path = packed_layer_by_number[entry.layer].get_path(entry.part)
        if entry.is_state:
            dtype = "fp32" if entry.nbytes % 4 == 0 else "fp16"
            reader = partial(_iter_whole_file_chunks, path, entry.nbytes)
        else:
            dtype = info.layout.dtype
            layer = layer_info_by_number[entry.layer]
            reader = partial(_iter_unused_chunks, path, info.get_layer_layout(layer), entry.part, layer)
        element_type = dtypes.parse_dtype(dtype)
        shape, array_dtype = (entry.nbytes // element_type.itemsize,), element_type.numpy_dtype.str
        arrays.append(
            LazyArray(name=entry.unused_array, dtype=dtype, shape=shape, array_dtype=array_dtype, reader=reader)
        )
    return arrays


def _iter_whole_file_chunks(path: str, nbytes: int, chunk_bytes: int) -> Iterator[Chunk]:
    file = MappedFile(path)
    if file.size != nbytes:
        raise SourceError(f"{path}: changed while it was read: has {file.size} bytes, had {nbytes}")
    yield from file.iter_chunks(0, nbytes, chunk_bytes)


def _iter_unused_chunks(
    path: str, layout: PackLayout, part: Part, layer: LayerInfo, chunk_bytes: int
) -> Iterator[Chunk]:
    file = MappedFile(path)
    chunks = (chunk.read_unused() for chunk in _iter_tile_chunks(file, layout, part, layer))
    yield from rechunk(chunks, chunk_bytes, file.size)
