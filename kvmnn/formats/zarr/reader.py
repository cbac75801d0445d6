"""Read a Zarr store in a directory or at a URL: metadata at once, chunks on demand."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from ..._util.dataclass import dataclass
from ..._util.parallel import ordered_map
from ..._util.text import pluralize
from ...arrays.array import Chunk, LazyArray, rechunk
from ...arrays.naming import array_name_from_path
from ...arrays.source import Source
from ...dtypes import FP16, FP32, Bytes, Elements
from ...errors import KvmnnError, LimitError, SourceError
from ...files.file_names import has_zarr_suffix
from ...files.schema import JsonReader
from ...files.urls import is_url
from ...integrations.chunk_codec import decode_chunk
from ..base import PathFormat
from ..npy import make_name_sort_key
from ..options import ReadOptions
from ..tensor_selection import check_declared_dtype, format_names, resolve_dtype_name, select_tensors, validate_array
from . import metadata as attributes
from .metadata import (
    ATTRIBUTES_KEY,
    ArrayMetadata,
    ArrayRegion,
    ChunkIndex,
    count_chunks,
    count_elements,
    iter_overlapping_chunks,
    iter_slabs,
    parse_v2_metadata,
    parse_v3_metadata,
)
from .stores import DOCUMENT_NAME, MAX_ENTRIES, ZarrStore, bound_frame_bytes, open_zarr_store, read_document_at

V2_ARRAY_NAME, _V2_GROUP_NAME, _V2_ATTRIBUTES_NAME = ".zarray", ".zgroup", ".zattrs"
_MAX_DEPTH = 16
_DTYPE_BY_TYPE_STRING = {"<f2": "fp16", "<f4": "fp32"}
_MAX_FILL_BYTES, _MAX_MISSING_CHUNKS = 1 << 30, 1 << 14
"""Limits of arrays with missing chunks: bytes of the array, and missing chunks."""
_MAX_ZSTD_WINDOW_BYTES = 128 << 20
_MIN_JOB_BYTES = 64 << 10
"""Minimum bytes that a part counts in the limit of parts in flight: two-byte parts would be millions."""


def _has_store_document(path: str) -> bool:
    """Return whether a directory is a Zarr group or array; URLs are not examined, as only stores are read there."""
    return is_url(path) or any(
        os.path.isfile(os.path.join(path, name)) for name in (DOCUMENT_NAME, _V2_GROUP_NAME, V2_ARRAY_NAME)
    )


@dataclass(frozen=True, kw_only=True)
class ZarrArray:
    """An array of a store."""

    #: Recorded name, else the path in the store.
    name: str
    #: The store, and the folder of its chunks.
    store: ZarrStore
    folder: str
    #: Metadata document of the array.
    metadata: ArrayMetadata

    @property
    def sha256(self) -> str | None:
        """Return the SHA-256 of its words that was recorded when it was written."""
        return _get_recorded(self.metadata.attributes, "sha256")

    @property
    def recorded_dtype(self) -> str | None:
        """Of its words, as noted down."""
        return _get_recorded(self.metadata.attributes, "dtype")

    @property
    def memory_shapes(self) -> tuple[ChunkIndex, ChunkIndex]:
        """Return the shapes of array and chunks in memory order, the last axis fastest."""
        shape, chunk_shape = self.metadata.shape, self.metadata.chunk_shape
        return (shape, chunk_shape) if self.metadata.order == "C" else (shape[::-1], chunk_shape[::-1])

    def list_chunk_sizes(self) -> list[int]:
        """Return the sizes of the chunks that exist, by listing the folder instead of probing every index."""
        chunk_counts = count_chunks(*self.memory_shapes)
        depth = 1 + len(chunk_counts) if self.metadata.key_separator == "/" else 1
        sizes = []
        for name, size in self.store.iter_sizes(self.folder, depth):
            index = self.metadata.parse_chunk_key(name)
            if index is not None and all(i < count for i, count in zip(index, chunk_counts, strict=True)):
                sizes.append(size)
        return sizes

    def get_chunk_path(self, index: ChunkIndex) -> str:
        """Return the path of a chunk's file in the store; the index is in memory order."""
        name = self.metadata.format_chunk_key(index)
        return f"{self.folder}/{name}" if self.folder else name


def read(path: str, options: ReadOptions, store: ZarrStore | None = None) -> Source:
    """Read the arrays of a store, or the only array of a directory; `store` replaces the store at the path.

    Raises
    ------
    SourceError, ManifestError, LimitError
        For malformed or unsupported documents, chunks that contradict them, and listed arrays that are missing.
    """
    store = store or open_zarr_store(path)
    path = store.label
    entries, group_attributes = list_zarr_arrays(path, store)
    _check_recorded_names(store, [name for name, _ in entries], group_attributes, options)
    array_makers = [
        (name, partial(_make_chunked_array, path, name, make_array, options)) for name, make_array in entries
    ]
    arrays, skipped = select_tensors(path, array_makers, options)
    source = Source(arrays, skipped_arrays=skipped, inputs=(path,))
    attributes.restore_attributes(
        source, group_attributes, store.get_path(DOCUMENT_NAME), is_subset=bool(options.tensors)
    )
    return source


def _check_recorded_names(
    store: ZarrStore, names: Sequence[str], group_attributes: Mapping[str, Any], options: ReadOptions
) -> None:
    """Raise `SourceError` if arrays that the group lists are missing, all of them or those in `options.tensors`."""
    recorded_names = attributes.list_array_names(group_attributes)
    present_names, tensors = set(names), set(options.tensors)
    missing_names = [name for name in recorded_names if name not in present_names and (not tensors or name in tensors)]
    if missing_names:
        raise SourceError(
            f"{store.get_path(DOCUMENT_NAME)}: {len(missing_names):,} of {pluralize(len(recorded_names), 'array')} "
            f"that attributes.kvmnn.arrays lists {'is' if len(missing_names) == 1 else 'are'} missing: "
            f"{format_names(missing_names)}" + ("" if tensors else "; --tensor NAME reads one that is there")
        )


def list_zarr_arrays(path: str, store: ZarrStore | None = None) -> tuple[list[tuple[str, Any]], Mapping[str, Any]]:
    """Return ``(name, maker of its `ZarrArray`)`` of every array in order, and the attributes of the group."""
    store = store or open_zarr_store(path)
    nodes = list(islice(_iter_nodes(store, ""), MAX_ENTRIES + 1))
    if not nodes and is_url(path):
        raise SourceError(
            f"{store.label}: is no Zarr store, and nothing else is read at a URL: it has no {DOCUMENT_NAME}"
        )
    if len(nodes) > MAX_ENTRIES:  # folders may be links to others, and few of them a great many
        raise LimitError(f"{path}: holds more than {MAX_ENTRIES:,} groups and arrays")
    group_attributes = next((values for folder, values, node in nodes if folder == "" and node is None), {})
    entries = []
    for folder, node_attributes, node in nodes:
        if node is not None:
            name = _get_recorded(node_attributes, "name")
            name = folder or array_name_from_path(store.label.rstrip("/" + os.sep)) if name is None else name
            entries.append((name, partial(_make_zarr_array, name, store, folder, node_attributes, node)))
    rank = {name: index for index, name in enumerate(attributes.list_array_names(group_attributes))}
    entries.sort(key=lambda entry: (rank.get(entry[0], len(rank)), make_name_sort_key(entry[0])))
    return entries, group_attributes


def _get_recorded(node_attributes: Mapping[str, Any], key: str) -> str | None:
    """Return what kvmnn noted down of an array; None where it did not, or that is no text."""
    own_attributes = node_attributes.get(ATTRIBUTES_KEY)
    value = own_attributes.get(key) if isinstance(own_attributes, dict) else None
    return value if isinstance(value, str) else None


def _make_zarr_array(
    name: str, store: ZarrStore, folder: str, node_attributes: Mapping[str, Any], node: JsonReader
) -> ZarrArray:
    is_v2 = node.label.endswith(V2_ARRAY_NAME)
    metadata = parse_v2_metadata(node, node_attributes) if is_v2 else parse_v3_metadata(node)
    return ZarrArray(name=name, store=store, folder=folder, metadata=metadata)


def _iter_nodes(
    store: ZarrStore, folder: str, depth: int = 0
) -> Iterator[tuple[str, dict[str, Any], JsonReader | None]]:
    """Yield groups and arrays: folder in the store, attributes, and the document of an array (None for a group)."""
    if depth > _MAX_DEPTH:
        raise LimitError(f"{store.get_path(folder)}: lies below more than {_MAX_DEPTH} groups")

    def read_document(name: str) -> JsonReader | None:
        return store.read_document(f"{folder}/{name}" if folder else name)

    node = read_document(DOCUMENT_NAME)
    if node is not None:
        node_attributes = node.value.get("attributes") if isinstance(node.value, dict) else None
        if node.get("zarr_format").value != 3:
            raise node.get("zarr_format").error("3")
        node_type = node.get("node_type").read_str()
        if node_type not in ("array", "group"):
            raise node.get("node_type").error("'array' or 'group'")
        is_array = node_type == "array"
    else:
        node = read_document(V2_ARRAY_NAME)
        is_array = node is not None
        attributes_node = read_document(_V2_ATTRIBUTES_NAME)
        node_attributes = attributes_node.value if attributes_node else None
        if not is_array and read_document(_V2_GROUP_NAME) is None:
            return
    yield folder, node_attributes if isinstance(node_attributes, dict) else {}, node if is_array else None
    if is_array:
        return
    for name in store.list_folders(folder):
        yield from _iter_nodes(store, f"{folder}/{name}" if folder else name, depth + 1)


def _make_chunked_array(path: str, name: str, make_array: Any, options: ReadOptions) -> LazyArray:
    zarr_array: ZarrArray = make_array()
    metadata, label = zarr_array.metadata, f"{path}: array {name!r}"
    recorded_dtype = zarr_array.recorded_dtype if zarr_array.sha256 else None
    if zarr_array.sha256:
        check_declared_dtype(recorded_dtype, options, label)
    else:
        type_string = metadata.array_dtype.newbyteorder("<").str
        check_declared_dtype("bf16" if metadata.is_bf16 else _DTYPE_BY_TYPE_STRING.get(type_string), options, label)
    dtype = resolve_dtype_name(metadata.array_dtype, options, label)
    if options.dtype is None and recorded_dtype not in (None, dtype):
        raise SourceError(
            f"{label}: its data_type is {dtype}, kvmnn noted down {recorded_dtype} (its attribute kvmnn.dtype)"
        )
    array = LazyArray(
        name=name,
        dtype=dtype,
        shape=metadata.shape,
        array_dtype=metadata.array_dtype.str,
        order=metadata.order if len(metadata.shape) > 1 else "C",
        reader=partial(_iter_array_chunks, zarr_array, label, options.threads),
    )
    return validate_array(array, label, options)


def _iter_array_chunks(array: ZarrArray, label: str, threads: int | None, chunk_bytes: int) -> Iterator[Chunk]:
    """Yield all words in memory order; after the last of them the hash is compared."""
    metadata = array.metadata
    total_bytes = int(np.prod(metadata.shape, dtype=object)) * metadata.array_dtype.itemsize
    digest = hashlib.sha256() if array.sha256 else None
    for chunk in rechunk(_iter_decoded_slabs(array, label, threads), chunk_bytes, total_bytes):
        if digest:
            digest.update(chunk.data)
        yield chunk
        del chunk
    if digest and digest.hexdigest() != array.sha256:
        raise SourceError(
            f"{label}: its words do not match the sha256 that kvmnn noted down (its attribute kvmnn.sha256): it is "
            "damaged, or was written to since"
        )


def _iter_decoded_slabs(array: ZarrArray, label: str, threads: int | None) -> Iterator[Bytes]:
    shape, chunk_shape = array.memory_shapes
    itemsize = array.metadata.array_dtype.itemsize
    chunk_reader = _ChunkReader(array, label)
    regions = iter_slabs(shape, chunk_shape, itemsize)
    for _, slab_bytes in ordered_map(
        chunk_reader.read_slab, regions, lambda region: max(count_elements(region) * itemsize, _MIN_JOB_BYTES), threads
    ):
        yield slab_bytes
        del slab_bytes


class _ChunkReader:
    """Reader that decodes chunks of an array on demand; several threads may use it."""

    def __init__(self, array: ZarrArray, label: str) -> None:
        self._array, self._label = array, label
        _, self._chunk_shape = array.memory_shapes
        self._missing_chunks = 0

    def read_slab(self, region: ArrayRegion, threads: int | None) -> Bytes:
        """Return the bytes of a region."""
        overlaps = list(iter_overlapping_chunks(region, self._chunk_shape)) if region else [((), (), ())]
        shape = tuple(end - begin for begin, end in region)
        if len(overlaps) == 1:
            index, _, chunk_slices = overlaps[0]
            return np.ascontiguousarray(self._read_chunk(index)[chunk_slices]).reshape(-1).view(np.uint8)
        slab = np.empty(shape, self._array.metadata.array_dtype)
        for index, region_slices, chunk_slices in overlaps:
            slab[region_slices] = self._read_chunk(index)[chunk_slices]
        return slab.reshape(-1).view(np.uint8)

    def _read_chunk(self, index: ChunkIndex) -> Elements:
        metadata, name = self._array.metadata, self._array.get_chunk_path(index)
        path = self._array.store.get_path(name)
        try:
            data = self._array.store.read_chunk(name, bound_frame_bytes(metadata.chunk_bytes))
            if data is None:
                return self._make_fill_chunk(path)
            elements = self._decode_chunk_bytes(data, path)
        except KvmnnError as error:
            if str(error).startswith(path):
                raise
            raise type(error)(f"{path}: {error}") from None
        return elements.view(metadata.array_dtype).reshape(self._chunk_shape)

    def _make_fill_chunk(self, path: str) -> Elements:
        metadata = self._array.metadata
        self._missing_chunks += 1
        fill_bytes = self._missing_chunks * metadata.chunk_bytes
        if fill_bytes > _MAX_FILL_BYTES or self._missing_chunks > _MAX_MISSING_CHUNKS:
            raise LimitError(
                f"{path}: is not there, and {self._missing_chunks:,} chunks of its array, {fill_bytes:,} bytes, are "
                f"not: expected at most {_MAX_MISSING_CHUNKS:,} chunks and {_MAX_FILL_BYTES:,} bytes of fill values"
            )
        return np.broadcast_to(np.frombuffer(metadata.fill_bytes, metadata.array_dtype)[0], self._chunk_shape)

    def _decode_chunk_bytes(self, data: Any, path: str) -> Bytes:
        metadata = self._array.metadata
        nbytes = metadata.chunk_bytes
        if metadata.bytes_codec:
            data = _decompress_chunk(metadata.bytes_codec, data, nbytes)
        if metadata.array_codec == "bytes":
            if len(data) != nbytes:
                raise SourceError(f"{path}: holds {len(data)} bytes: the chunk has {nbytes}")
            return np.frombuffer(data, np.uint8)
        element_type = {2: FP16, 4: FP32}.get(metadata.array_dtype.itemsize)
        if element_type is None:
            raise SourceError(f"{path}: no frame holds {metadata.array_dtype}")
        elements: Bytes = decode_chunk(data, element_type, nbytes).view(np.uint8)
        if metadata.array_dtype.byteorder == ">":
            return elements.view(f"u{element_type.itemsize}").byteswap().view(np.uint8)
        return elements


def _decompress_chunk(bytes_codec: str, data: Bytes, nbytes: int) -> bytes:
    """Decompress a chunk to at most a little more than a frame of `nbytes` bytes can have."""
    max_bytes = bound_frame_bytes(nbytes)
    try:
        if bytes_codec == "zstd":
            reader = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES).stream_reader(data.tobytes())
            output: bytes = reader.read(max_bytes + 1)
        else:
            inflater = zlib.decompressobj(31 if bytes_codec == "gzip" else zlib.MAX_WBITS)
            output = inflater.decompress(data.data, max_bytes + 1)
            if not inflater.eof and len(output) <= max_bytes:
                raise SourceError(f"not a whole {bytes_codec} stream")
    except (zstandard.ZstdError, zlib.error) as error:
        raise SourceError(f"not a {bytes_codec} stream: {error}") from None
    if len(output) > max_bytes:
        raise SourceError(f"the {bytes_codec} stream holds more than {max_bytes:,} bytes: the chunk has {nbytes:,}")
    return output


def find_orphaned_arrays(path: str) -> str | None:
    """Return an error text for a directory with arrays directly below it and no document of its own; None for all
    others.

    Arrays whose own names end in ``.zarr`` are separate stores, unless the directory's name does, too.
    """
    if _has_store_document(path):
        return None
    has_zarr_name = has_zarr_suffix(path.rstrip("/" + os.sep))
    try:
        with os.scandir(path) as entries:
            folder_names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return None
    for name in folder_names:
        if (has_zarr_name or not has_zarr_suffix(name)) and _is_array_folder(Path(path, name)):
            return (
                f"{path}: has arrays of a Zarr store ({name!r:.80}) and no {DOCUMENT_NAME} of their group, which says "
                "what they are of (positions, token ids, axes): copy the whole store, or name one array"
            )
    return None


def _is_array_folder(folder: Path) -> bool:
    if (folder / V2_ARRAY_NAME).is_file():
        return True
    try:
        node = read_document_at(folder / DOCUMENT_NAME)
    except (KvmnnError, OSError):
        return False
    return node is not None and isinstance(node.value, dict) and node.value.get("node_type") == "array"


def _refuse_orphaned_arrays(path: str, options: ReadOptions) -> Source:
    raise SourceError(find_orphaned_arrays(path) or path)


ZARR = PathFormat(
    name="zarr", kinds=("folder", "url"), check=lambda head: _has_store_document(head.path), read_path=read
)
ORPHANED_ARRAYS = PathFormat(
    name="zarr arrays",
    check=lambda head: find_orphaned_arrays(head.path) is not None,
    read_path=_refuse_orphaned_arrays,
)
