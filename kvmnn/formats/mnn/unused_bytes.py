"""Every byte of packed files accounted for: rows of live tokens, and the rest, without which no file is the same again.

The rest is room behind the last token and padding inside tiles. In a prefix that was just computed all of it is zero;
where a session went on, or tokens were dropped, it has rows that nobody needs and that make the file what it is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ... import dtypes
from ...arrays.array import Chunk, LazyArray, rechunk
from ...bundle.manifest import PackedFileEntry, PackedRecord, format_unused_name, name_state
from ...dtypes import PARTS, Bytes, Part
from ...errors import KvmnnError, SourceError
from ...files.mapped_file import MappedFile
from ...packed.cache_info import CacheInfo, LayerInfo
from ...packed.layout import HeadRowAccessor, PackLayout, get_head_bytes, get_row_bytes, get_tile_tokens
from ...packed.params import locate_element
from .packed_files import PackedFiles, PackedLayer

_TILE_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class _TileChunk:
    """Some whole tiles of one head."""

    #: Which head, and where in the file the chunk lies.
    head: int
    offset: int
    #: The first row, and how many rows from there are of live tokens.
    first_row: int
    num_live: int
    #: Its bytes in the file.
    packed_bytes: Bytes
    #: Its rows.
    accessor: HeadRowAccessor

    def read_unused(self) -> Bytes:
        """Its bytes with those of live rows zero."""
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
            yield _TileChunk(
                head,
                offset,
                first_row,
                num_live,
                packed_bytes,
                HeadRowAccessor(layout, part, num_chunk_tiles * tile_tokens),
            )
            file.release_pages(offset, num_chunk_tiles * tile_bytes)


def account_for_files(files: PackedFiles, info: CacheInfo, *, left_out: str = "") -> PackedRecord:
    """Take every file apart into live rows and the rest, put it together again in memory, and compare."""
    entries, difference = [], ""
    for packed_layer, layer in zip(files.layers, info.layers, strict=True):
        for part in PARTS:
            entry, first_difference = _account_for_file(
                packed_layer.get_path(part), info.get_layer_layout(layer), part, layer, include_unused=not left_out
            )
            entries.append(entry)
            difference = difference or first_difference
    entries += [_account_for_state(state, part) for state in files.states for part in PARTS]
    entries.sort(key=lambda entry: (entry.layer, PARTS.index(entry.part)))
    return PackedRecord(tuple(entries), f"{left_out}; {difference}" if difference and left_out else "")


def _account_for_state(state: PackedLayer, part: Part) -> PackedFileEntry:
    """A file without K and V, of which every byte is kept."""
    file, hasher = MappedFile(state.get_path(part)), hashlib.sha256()
    for chunk in file.iter_chunks(0, file.size, _TILE_CHUNK_BYTES):
        hasher.update(chunk.data)
    if file.size % 2:
        raise SourceError(f"{file.path}: has {file.size} bytes, an odd number: not state that an engine writes")
    return PackedFileEntry(
        layer=state.layer,
        part=part,
        nbytes=file.size,
        sha256=hasher.hexdigest(),
        room=name_state(state.layer, part),
        is_state=True,
    )


def _account_for_file(
    path: str, layout: PackLayout, part: Part, layer: LayerInfo, *, include_unused: bool
) -> tuple[PackedFileEntry, str]:
    """One file, and where its rest is not zero first."""
    file, hasher, first_difference = MappedFile(path), hashlib.sha256(), ""
    for chunk in _iter_tile_chunks(file, layout, part, layer):
        hasher.update(chunk.packed_bytes.data)
        unused_bytes = chunk.read_unused()
        if not first_difference and unused_bytes.any():
            first_difference = _describe_byte(path, layout, part, layer, chunk, int(np.flatnonzero(unused_bytes)[0]))
        if include_unused:
            _check_roundtrip(path, chunk, unused_bytes, get_row_bytes(layout, part))
    unused_name = format_unused_name(layer.layer, part) if first_difference and include_unused else None
    entry = PackedFileEntry(layer=layer.layer, part=part, nbytes=file.size, sha256=hasher.hexdigest(), room=unused_name)
    return entry, first_difference


def _check_roundtrip(path: str, chunk: _TileChunk, unused_bytes: Bytes, row_bytes: int) -> None:
    """Write live rows over the rest, as restoring does, and compare with the file."""
    if chunk.num_live:
        live_rows = np.empty(chunk.num_live * row_bytes, np.uint8)
        chunk.accessor.read_rows(chunk.packed_bytes, 0, live_rows)
        chunk.accessor.write_rows(unused_bytes, 0, live_rows)
    if not np.array_equal(unused_bytes, chunk.packed_bytes):
        byte_position = chunk.offset + int(np.flatnonzero(unused_bytes != chunk.packed_bytes)[0])
        raise KvmnnError(
            f"{path}: its rows do not make the same file again, first at byte {byte_position:,} (please report this)"
        )


def find_difference(files: PackedFiles, info: CacheInfo) -> str:
    """Where files of nothing but live rows would first differ from those there are, in words; empty for nowhere."""
    for packed_layer, layer in zip(files.layers, info.layers, strict=True):
        for part in PARTS:
            path = packed_layer.get_path(part)
            for chunk in _iter_tile_chunks(MappedFile(path), info.get_layer_layout(layer), part, layer):
                nonzero_offsets = np.flatnonzero(chunk.read_unused())
                if nonzero_offsets.size:
                    return _describe_byte(
                        path, info.get_layer_layout(layer), part, layer, chunk, int(nonzero_offsets[0])
                    )
    return ""


def _describe_byte(
    path: str, layout: PackLayout, part: Part, layer: LayerInfo, chunk: _TileChunk, chunk_offset: int
) -> str:
    """A byte of a chunk that belongs to no live token: file, byte, head, row, dimension, and the word there."""
    itemsize = layout.itemsize
    element = chunk_offset // itemsize
    row, dim = locate_element(layout, part, element, layer.capacity)
    element_value = chunk.packed_bytes[element * itemsize : (element + 1) * itemsize].view(
        dtypes.parse_dtype(layout.dtype).numpy_dtype
    )[0]
    value_text = f"the word {int(element_value):#06x}" if layout.dtype == "bf16" else f"{float(element_value):.6g}"
    location_text = f"head {chunk.head}, row {chunk.first_row + row}, " + (
        f"dim {dim}" if dim < layout.head_dim else f"padding behind the {layout.head_dim} dims"
    )
    return (
        f"{os.path.basename(path)}, byte {chunk.offset + element * itemsize:,} ({location_text}) is {value_text}, and "
        f"{layer.tokens:,} "
        "live tokens leave 0 there"
    )


def make_unused_arrays(files: PackedFiles, info: CacheInfo, record: PackedRecord) -> list[LazyArray]:
    """For each file that has a rest, its bytes with those of live rows zero, as words; files of state whole."""
    packed_layer_by_number = {layer.layer: layer for layer in files.all_layers}
    layer_info_by_number = {layer.layer: layer for layer in info.layers}
    arrays = []
    for entry in record.files:
        if entry.room is None:
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
        shape = (entry.nbytes // element_type.itemsize,)
        arrays.append(
            LazyArray(
                name=entry.room, dtype=dtype, shape=shape, array_dtype=element_type.numpy_dtype.str, reader=reader
            )
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
