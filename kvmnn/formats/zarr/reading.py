"""Zarr stores in a directory, or at a URL, as a source: documents are read at once, chunks when they are asked for."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import zstandard

from ...arrays.named_array import NamedArray, Piece, rechunked
from ...arrays.source import Source
from ...arrays.valid_names import name_of_file
from ...codecs.chunks import decode_chunk
from ...dtypes import FP16, FP32, Bytes, Words
from ...errors import KvmnnError, LimitError, SourceError
from ...files.json_document import Node
from ...files.urls import is_url
from ...threads.pipeline import ordered
from ..npy_folder import order_of
from ..options import ReadOptions
from ..reading import check_own_type, checked, dtype_name, select
from . import attributes
from .documents import KEY, ArrayDocument, array_document, old_array_document
from .grid import Index, Region, counts, regions, size_of, touched
from .places import DOCUMENT, MOST_ENTRIES, Place, most_bytes, place_at

OLD_ARRAY, _OLD_GROUP, _OLD_ATTRIBUTES = ".zarray", ".zgroup", ".zattrs"
_MOST_DEPTH = 16
_OWN_TYPES = {"<f2": "fp16", "<f4": "fp32"}
_MOST_FILLED, _MOST_MISSING = 1 << 30, 1 << 14
"""Bytes of an array whose chunks are not there, and how many these may be."""
_MAX_WINDOW = 128 << 20
_LEAST_JOB = 64 << 10
"""Bytes that a part counts as at least while it is waited for: parts of two bytes each would be millions."""


def is_store(path: str) -> bool:
    """Whether a directory is a Zarr group or array; nothing else is read at a URL, so that is not looked at."""
    return is_url(path) or any(os.path.isfile(os.path.join(path, name)) for name in (DOCUMENT, _OLD_GROUP, OLD_ARRAY))


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """An array of a store.

    Parameters
    ----------
    name
        What it is called: as noted down, else its place in the store.
    place, folder
        Where its store lies, and in it its chunks.
    document
        What it is.
    """

    name: str
    place: Place
    folder: str
    document: ArrayDocument

    @property
    def sha256(self) -> str | None:
        """Of its words, as noted down when they were written."""
        return self.noted("sha256")

    def noted(self, key: str) -> str | None:
        """What kvmnn noted down of it; None where it did not, or that is no text."""
        said = self.document.attributes.get(KEY)
        found = said.get(key) if isinstance(said, dict) else None
        return found if isinstance(found, str) else None

    @property
    def memory_shape(self) -> tuple[Index, Index]:
        """Shape and chunks in memory order, the last axis fastest."""
        shape, chunks = self.document.shape, self.document.chunks
        return (shape, chunks) if self.document.order == "C" else (shape[::-1], chunks[::-1])

    def sizes(self) -> list[int]:
        """Of the chunks that are there: what lies in the folder is looked at, not every place where one might."""
        most = counts(*self.memory_shape)
        depth = 1 + len(most) if self.document.separator == "/" else 1
        found = [(self.document.chunk_index(name), size) for name, size in self.place.sizes(self.folder, depth)]
        return [
            size
            for index, size in found
            if index is not None and all(number < count for number, count in zip(index, most, strict=True))
        ]

    def chunk_name(self, index: Index) -> str:
        """Of the file of a chunk in the store; the index is of memory order."""
        name = self.document.chunk_name(index)
        return f"{self.folder}/{name}" if self.folder else name


def read(path: str, options: ReadOptions, place: Place | None = None) -> Source:
    """The arrays of a store, or the one array that a directory is. place: where it lies, if not at the path.

    Raises
    ------
    SourceError, ManifestError, LimitError
        For documents that are malformed or say what kvmnn does not read, and chunks that are not what they say.
    """
    place = place or place_at(path)
    path = place.label
    entries, group = stored(path, place)
    made = [(name, partial(_array, path, name, make, options)) for name, make in entries]
    arrays, skipped = select(path, made, options)
    source = Source(arrays, skipped=skipped, inputs=(path,))
    attributes.apply(source, group, place.of(DOCUMENT), part=bool(options.tensors))
    return source


def stored(path: str, place: Place | None = None) -> tuple[list[tuple[str, Any]], Mapping[str, Any]]:
    """``(name, maker of its StoredArray)`` of every array in order, and the attributes of the group."""
    place = place or place_at(path)
    found = list(islice(_walk(place, ""), MOST_ENTRIES + 1))
    if not found and is_url(path):
        raise SourceError(f"{place.label}: is no Zarr store, and nothing else is read at a URL: it has no {DOCUMENT}")
    if len(found) > MOST_ENTRIES:  # folders may be links to others, and few of them a great many
        raise LimitError(f"{path}: holds more than {MOST_ENTRIES:,} groups and arrays")
    group = next((said for folder, said, node in found if folder == "" and node is None), {})
    entries = [
        (_name(place, folder, said), partial(_stored, place, folder, said, node))
        for folder, said, node in found
        if node is not None
    ]
    rank = {name: index for index, name in enumerate(attributes.names_in(group))}
    entries.sort(key=lambda entry: (rank.get(entry[0], len(rank)), order_of(entry[0])))
    return entries, group


def _name(place: Place, folder: str, said: Mapping[str, Any]) -> str:
    own = said.get(KEY)
    name = own.get("name") if isinstance(own, dict) else None
    return name if isinstance(name, str) else folder or name_of_file(place.label.rstrip("/" + os.sep))


def _stored(place: Place, folder: str, said: Mapping[str, Any], node: Node) -> StoredArray:
    is_old = node.where.endswith(OLD_ARRAY)
    document = old_array_document(node, said) if is_old else array_document(node)
    return StoredArray(name=_name(place, folder, said), place=place, folder=folder, document=document)


def _walk(place: Place, folder: str, depth: int = 0) -> Iterator[tuple[str, dict[str, Any], Node | None]]:
    """Groups and arrays: folder in the store, attributes, and the document of an array (None for a group)."""
    if depth > _MOST_DEPTH:
        raise LimitError(f"{place.of(folder)}: lies below more than {_MOST_DEPTH} groups")

    def document(name: str) -> Node | None:
        return place.document(f"{folder}/{name}" if folder else name)

    node = document(DOCUMENT)
    if node is not None:
        said = node.value.get("attributes") if isinstance(node.value, dict) else None
        if node.at("zarr_format").value != 3:
            raise node.at("zarr_format").wrong("3")
        kind = node.at("node_type").text()
        if kind not in ("array", "group"):
            raise node.at("node_type").wrong("'array' or 'group'")
        is_array = kind == "array"
    else:
        node = document(OLD_ARRAY)
        is_array = node is not None
        old = document(_OLD_ATTRIBUTES)
        said = old.value if old else None
        if not is_array and document(_OLD_GROUP) is None:
            return
    yield folder, said if isinstance(said, dict) else {}, node if is_array else None
    if is_array:
        return
    for name in place.folders(folder):
        yield from _walk(place, f"{folder}/{name}" if folder else name, depth + 1)


def _array(path: str, name: str, make: Any, options: ReadOptions) -> NamedArray:
    found: StoredArray = make()
    document, where = found.document, f"{path}: array {name!r}"
    own = "bf16" if document.is_bf16 else _OWN_TYPES.get(document.array_dtype.newbyteorder("<").str)
    check_own_type(found.noted("dtype") if found.sha256 else own, options, where)
    dtype = dtype_name(document.array_dtype, options, where)
    if found.sha256 and options.dtype is None and found.noted("dtype") not in (None, dtype):
        raise SourceError(
            f"{where}: its data_type is {dtype}, kvmnn noted down {found.noted('dtype')} (its attribute kvmnn.dtype)"
        )
    array = NamedArray(
        name=name,
        dtype=dtype,
        shape=document.shape,
        array_dtype=document.array_dtype.str,
        order=document.order if len(document.shape) > 1 else "C",
        reader=partial(_runs, found, where, options.threads),
    )
    return checked(array, where, options)


def _runs(array: StoredArray, where: str, threads: int | None, step: int) -> Iterator[Piece]:
    """All words in memory order; behind the last of them the hash is compared."""
    document = array.document
    total = int(np.prod(document.shape, dtype=object)) * document.array_dtype.itemsize
    digest = hashlib.sha256() if array.sha256 else None
    for piece in rechunked(_slabs(array, where, threads), step, total):
        if digest:
            digest.update(piece.data)
        yield piece
        del piece
    if digest and digest.hexdigest() != array.sha256:
        raise SourceError(
            f"{where}: its words do not match the sha256 that kvmnn noted down (its attribute kvmnn.sha256): it is "
            "damaged, or was written to since"
        )


def _slabs(array: StoredArray, where: str, threads: int | None) -> Iterator[Bytes]:
    shape, chunks = array.memory_shape
    itemsize = array.document.array_dtype.itemsize
    reader = _Chunks(array, where)
    parts = regions(shape, chunks, itemsize)
    for _, made in ordered(reader.slab, parts, lambda part: max(size_of(part) * itemsize, _LEAST_JOB), threads):
        yield made
        del made


class _Chunks:
    """The chunks of an array, decoded as they are asked for; threads may ask side by side."""

    def __init__(self, array: StoredArray, where: str) -> None:
        self._array, self._where = array, where
        _, self._chunks = array.memory_shape
        self._missing_chunks = 0

    def slab(self, part: Region, threads: int | None) -> Bytes:
        """The bytes of a part."""
        places = list(touched(part, self._chunks)) if part else [((), (), ())]
        shape = tuple(end - begin for begin, end in part)
        if len(places) == 1:
            index, _, theirs = places[0]
            return np.ascontiguousarray(self._chunk(index)[theirs]).reshape(-1).view(np.uint8)
        made = np.empty(shape, self._array.document.array_dtype)
        for index, ours, theirs in places:
            made[ours] = self._chunk(index)[theirs]
        return made.reshape(-1).view(np.uint8)

    def _chunk(self, index: Index) -> Words:
        document, name = self._array.document, self._array.chunk_name(index)
        path = self._array.place.of(name)
        try:
            data = self._array.place.chunk(name, most_bytes(document.chunk_bytes))
            if data is None:
                return self._missing(path)
            words = self._decoded(data, path)
        except KvmnnError as error:
            if str(error).startswith(path):
                raise
            raise type(error)(f"{path}: {error}") from None
        return words.view(document.array_dtype).reshape(self._chunks)

    def _missing(self, path: str) -> Words:
        document = self._array.document
        self._missing_chunks += 1
        filled = self._missing_chunks * document.chunk_bytes
        if filled > _MOST_FILLED or self._missing_chunks > _MOST_MISSING:
            raise LimitError(
                f"{path}: is not there, and {self._missing_chunks:,} chunks of its array, {filled:,} bytes, are not: "
                f"expected at most {_MOST_MISSING:,} chunks and {_MOST_FILLED:,} bytes of fill values"
            )
        return np.broadcast_to(np.frombuffer(document.fill, document.array_dtype)[0], self._chunks)

    def _decoded(self, data: Any, path: str) -> Bytes:
        document = self._array.document
        nbytes = document.chunk_bytes
        if document.squeezer:
            data = _unsqueezed(document.squeezer, data, nbytes)
        if document.packing == "bytes":
            if len(data) != nbytes:
                raise SourceError(f"{path}: holds {len(data)} bytes: the chunk has {nbytes}")
            return np.frombuffer(data, np.uint8)
        kind = {2: FP16, 4: FP32}.get(document.array_dtype.itemsize)
        if kind is None:
            raise SourceError(f"{path}: no frame holds {document.array_dtype}")
        words: Bytes = decode_chunk(data, kind, nbytes).view(np.uint8)
        if document.array_dtype.byteorder == ">":
            return words.view(f"u{kind.itemsize}").byteswap().view(np.uint8)
        return words


def _unsqueezed(squeezer: str, data: Bytes, nbytes: int) -> bytes:
    """At most a little more than a frame of `nbytes` bytes can have."""
    most = most_bytes(nbytes)
    try:
        if squeezer == "zstd":
            reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(data.tobytes())
            found: bytes = reader.read(most + 1)
        else:
            inflater = zlib.decompressobj(31 if squeezer == "gzip" else zlib.MAX_WBITS)
            found = inflater.decompress(data.data, most + 1)
            if not inflater.eof and len(found) <= most:
                raise SourceError(f"not a whole {squeezer} stream")
    except (zstandard.ZstdError, zlib.error) as error:
        raise SourceError(f"not a {squeezer} stream: {error}") from None
    if len(found) > most:
        raise SourceError(f"the {squeezer} stream holds more than {most:,} bytes: the chunk has {nbytes:,}")
    return found
