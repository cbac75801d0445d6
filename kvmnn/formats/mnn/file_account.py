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
from ...arrays.named_array import NamedArray, Piece, rechunked
from ...bundle.packed_record import PackedFileEntry, PackedRecord, name_room, name_state
from ...dtypes import PARTS, Bytes, Part
from ...errors import KvmnnError, SourceError
from ...files.mapped import MappedFile
from ...packed.cache_info import CacheInfo, LayerInfo
from ...packed.layout import PackLayout
from ...packed.places import locate_element
from ...packed.rows import HeadRows, head_bytes, row_bytes, tile_tokens
from .packed_files import PackedFiles, PackedLayer

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class _Chunk:
    """Some whole tiles of one head.

    Parameters
    ----------
    head, offset
        Which head, and where in the file the chunk lies.
    first, live
        The first row, and how many rows from there are of live tokens.
    packed
        Its bytes in the file.
    access
        Its rows.
    """

    head: int
    offset: int
    first: int
    live: int
    packed: Bytes
    access: HeadRows

    def read_rest(self) -> Bytes:
        """Its bytes with those of live rows zero."""
        rest = self.packed.copy()
        if self.live:
            self.access.clear(rest, 0, self.live)
        return rest


def _iter_chunks(file: MappedFile, layout: PackLayout, part: Part, layer: LayerInfo) -> Iterator[_Chunk]:
    size = head_bytes(layout, part, layer.capacity)
    if file.size != size * layout.kv_heads:
        raise SourceError(f"{file.path}: changed while it was read: has {file.size} bytes")
    tile = tile_tokens(layout, part, layer.capacity)
    tiles = -(-layer.capacity // tile)
    tile_bytes = size // tiles
    step = max(1, _CHUNK_BYTES // tile_bytes)
    for head in range(layout.kv_heads):
        for number in range(0, tiles, step):
            count = min(step, tiles - number)
            first, offset = number * tile, head * size + number * tile_bytes
            live = max(0, min(layer.tokens - first, count * tile))
            packed = file.view(offset, count * tile_bytes)
            yield _Chunk(head, offset, first, live, packed, HeadRows(layout, part, count * tile))
            file.drop(offset, count * tile_bytes)


def account_files(files: PackedFiles, info: CacheInfo, *, left_out: str = "") -> PackedRecord:
    """Take every file apart into live rows and the rest, put it together again in memory, and compare.

    Parameters
    ----------
    files, info
        Float files, and what they hold.
    left_out
        Why the rest is not to be kept; empty keeps it.

    Returns
    -------
    PackedRecord
        Size and SHA-256 of each file, and which have a rest that is not zero. Where that is left out and is not zero,
        `PackedRecord.left_out` tells where it begins.

    Raises
    ------
    KvmnnError
        When a file that was put together is not the file that was read, which would be a defect of kvmnn.
    """
    entries, difference = [], ""
    for found, layer in zip(files.layers, info.layers, strict=True):
        for part in PARTS:
            entry, first = _account(found.path(part), info.layout_of(layer), part, layer, keep=not left_out)
            entries.append(entry)
            difference = difference or first
    entries += [_account_state(state, part) for state in files.states for part in PARTS]
    entries.sort(key=lambda entry: (entry.layer, PARTS.index(entry.part)))
    return PackedRecord(tuple(entries), f"{left_out}; {difference}" if difference and left_out else "")


def _account_state(state: PackedLayer, part: Part) -> PackedFileEntry:
    """A file without K and V, of which every byte is kept."""
    file, digest = MappedFile(state.path(part)), hashlib.sha256()
    for run in file.runs(0, file.size, _CHUNK_BYTES):
        digest.update(run.data)
    if file.size % 2:
        raise SourceError(f"{file.path}: has {file.size} bytes, an odd number: not state that an engine writes")
    return PackedFileEntry(
        layer=state.layer,
        part=part,
        nbytes=file.size,
        sha256=digest.hexdigest(),
        room=name_state(state.layer, part),
        is_state=True,
    )


def _account(path: str, layout: PackLayout, part: Part, layer: LayerInfo, *, keep: bool) -> tuple[PackedFileEntry, str]:
    """One file, and where its rest is not zero first."""
    file, digest, first = MappedFile(path), hashlib.sha256(), ""
    for chunk in _iter_chunks(file, layout, part, layer):
        digest.update(chunk.packed.data)
        rest = chunk.read_rest()
        if not first and rest.any():
            first = _describe_byte(path, layout, part, layer, chunk, int(np.flatnonzero(rest)[0]))
        if keep:
            _check_rebuilt(path, chunk, rest, row_bytes(layout, part))
    room = name_room(layer.layer, part) if first and keep else None
    entry = PackedFileEntry(layer=layer.layer, part=part, nbytes=file.size, sha256=digest.hexdigest(), room=room)
    return entry, first


def _check_rebuilt(path: str, chunk: _Chunk, rest: Bytes, row: int) -> None:
    """Write live rows over the rest, as restoring does, and compare with the file."""
    if chunk.live:
        rows = np.empty(chunk.live * row, np.uint8)
        chunk.access.read(chunk.packed, 0, rows)
        chunk.access.write(rest, 0, rows)
    if not np.array_equal(rest, chunk.packed):
        place = chunk.offset + int(np.flatnonzero(rest != chunk.packed)[0])
        raise KvmnnError(
            f"{path}: its rows do not make the same file again, first at byte {place:,} (please report this)"
        )


def find_difference(files: PackedFiles, info: CacheInfo) -> str:
    """Where files of nothing but live rows would first differ from those there are, in words; empty for nowhere."""
    for found, layer in zip(files.layers, info.layers, strict=True):
        for part in PARTS:
            path = found.path(part)
            for chunk in _iter_chunks(MappedFile(path), info.layout_of(layer), part, layer):
                places = np.flatnonzero(chunk.read_rest())
                if places.size:
                    return _describe_byte(path, info.layout_of(layer), part, layer, chunk, int(places[0]))
    return ""


def _describe_byte(path: str, layout: PackLayout, part: Part, layer: LayerInfo, chunk: _Chunk, place: int) -> str:
    """A byte of a chunk that belongs to no live token: file, byte, head, row, dimension, and the word there."""
    size = layout.itemsize
    element = place // size
    row, dim = locate_element(layout, part, element, layer.capacity)
    word = chunk.packed[element * size : (element + 1) * size].view(dtypes.by_name(layout.dtype).numpy)[0]
    value = f"the word {int(word):#06x}" if layout.dtype == "bf16" else f"{float(word):.6g}"
    where = f"head {chunk.head}, row {chunk.first + row}, " + (
        f"dim {dim}" if dim < layout.head_dim else f"padding behind the {layout.head_dim} dims"
    )
    return (
        f"{os.path.basename(path)}, byte {chunk.offset + element * size:,} ({where}) is {value}, and {layer.tokens:,} "
        "live tokens leave 0 there"
    )


def room_arrays(files: PackedFiles, info: CacheInfo, record: PackedRecord) -> list[NamedArray]:
    """For each file that has a rest, its bytes with those of live rows zero, as words; files of state whole."""
    found = {layer.layer: layer for layer in files.all_layers}
    infos = {layer.layer: layer for layer in info.layers}
    arrays = []
    for entry in record.files:
        if entry.room is None:
            continue
        path = found[entry.layer].path(entry.part)
        if entry.is_state:
            dtype = "fp32" if entry.nbytes % 4 == 0 else "fp16"
            reader = partial(_whole_runs, path, entry.nbytes)
        else:
            dtype = info.layout.dtype
            layer = infos[entry.layer]
            reader = partial(_rest_runs, path, info.layout_of(layer), entry.part, layer)
        word = dtypes.by_name(dtype)
        shape = (entry.nbytes // word.itemsize,)
        arrays.append(NamedArray(name=entry.room, dtype=dtype, shape=shape, array_dtype=word.numpy.str, reader=reader))
    return arrays


def _whole_runs(path: str, nbytes: int, step: int) -> Iterator[Piece]:
    file = MappedFile(path)
    if file.size != nbytes:
        raise SourceError(f"{path}: changed while it was read: has {file.size} bytes, had {nbytes}")
    yield from file.runs(0, nbytes, step)


def _rest_runs(path: str, layout: PackLayout, part: Part, layer: LayerInfo, step: int) -> Iterator[Piece]:
    file = MappedFile(path)
    chunks = (chunk.read_rest() for chunk in _iter_chunks(file, layout, part, layer))
    yield from rechunked(chunks, step, file.size)
