"""Metadata of Zarr arrays, versions 3 and 2: chunks, and kvmnn's attributes (names, hashes, metadata of the input).

All shapes of chunks and regions are those of memory order, the last axis fastest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import product
from typing import Any, Literal

import numpy as np

from ..._util.dataclass import dataclass
from ..._util.patterns import declare_pattern
from ...arrays import engine_metadata
from ...arrays.array import ArrayInfo, Order, UnsupportedArrayError
from ...arrays.engine_cache import select_engine_layers
from ...arrays.naming import parse_conventional_name
from ...arrays.source import DUMP_KEY, ENGINE_KEY, FILE_KEY, Source, parse_cache_info
from ...dtypes import parse_numpy_type
from ...errors import ArrayTypeError, LimitError, SourceError
from ...files.schema import JsonReader
from ...integrations.chunk_codec import CODEC_NAME, MAX_CHUNK_BYTES
from ..tensor_selection import build_subset_metadata

ArrayRegion = tuple[tuple[int, int], ...]
"""Start and end along each axis."""
ChunkIndex = tuple[int, ...]

MAX_CHUNKS = 1 << 24
MAX_SLAB_BYTES = 128 << 20
"""Maximum size of a part of an array that is assembled from non-contiguous chunks."""


def choose_chunk_shape(shape: ChunkIndex, itemsize: int, max_bytes: int) -> ChunkIndex:
    """Choose the shape of chunks that are contiguous in memory, at most `max_bytes` bytes each (0: no limit).

    A chunk has one element along the first axes, part of the next axis, and all of the others. Chunks along that axis
    are as equal as possible.
    """
    if max_bytes == 0:
        return shape
    inner_bytes = itemsize * math.prod(shape)
    for axis, length in enumerate(shape):
        inner_bytes //= length
        if inner_bytes * length <= max_bytes:
            return (1,) * axis + shape[axis:]
        if inner_bytes <= max_bytes:
            num_parts = -(-length // (max_bytes // inner_bytes))
            return (1,) * axis + (-(-length // num_parts),) + shape[axis + 1 :]
    return (1,) * len(shape)


def count_chunks(shape: ChunkIndex, chunk_shape: ChunkIndex) -> ChunkIndex:
    """Count the chunks along each axis."""
    return tuple(-(-length // size) for length, size in zip(shape, chunk_shape, strict=True))


def iter_slabs(shape: ChunkIndex, chunk_shape: ChunkIndex, itemsize: int) -> Iterator[ArrayRegion]:
    """Yield parts of the array that are contiguous in memory.

    Each has at most `MAX_SLAB_BYTES`, or is one row of a chunk.
    """
    axis = find_split_axis(chunk_shape)
    if chunk_shape[axis + 1 :] == shape[axis + 1 :]:  # every chunk is such a part
        rows_per_slab = chunk_shape[axis] if chunk_shape else 1
    else:
        axis = next(a for a in range(len(shape)) if itemsize * math.prod(shape[a + 1 :]) <= MAX_SLAB_BYTES)
        rows_per_slab = min(chunk_shape[axis], max(1, MAX_SLAB_BYTES // (itemsize * math.prod(shape[axis + 1 :]))))
    trailing_ranges = tuple((0, length) for length in shape[axis + 1 :])
    if not shape:
        yield ()
        return
    for leading_index in product(*(range(length) for length in shape[:axis])):
        for start in range(0, shape[axis], rows_per_slab):
            yield (
                *((i, i + 1) for i in leading_index),
                (start, min(start + rows_per_slab, shape[axis])),
                *trailing_ranges,
            )


def find_split_axis(chunk_shape: ChunkIndex) -> int:
    """Find the first axis along which chunks have more than one element."""
    return next((axis for axis, size in enumerate(chunk_shape) if size > 1), max(len(chunk_shape) - 1, 0))


def iter_overlapping_chunks(
    region: ArrayRegion, chunk_shape: ChunkIndex
) -> Iterator[tuple[ChunkIndex, tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the chunks that overlap a region: index, part of the region, part of the chunk."""
    first_index = [begin // size for (begin, _), size in zip(region, chunk_shape, strict=True)]
    last_index = [(end - 1) // size for (_, end), size in zip(region, chunk_shape, strict=True)]
    for index in product(*(range(a, b + 1) for a, b in zip(first_index, last_index, strict=True))):
        region_slices, chunk_slices = [], []
        for i, size, (begin, end) in zip(index, chunk_shape, region, strict=True):
            low, high = max(begin, i * size), min(end, (i + 1) * size)
            region_slices.append(slice(low - begin, high - begin))
            chunk_slices.append(slice(low - i * size, high - i * size))
        yield index, tuple(region_slices), tuple(chunk_slices)


def count_elements(region: ArrayRegion) -> int:
    """Count the elements in a region."""
    return math.prod(end - begin for begin, end in region)


ArrayCodec = Literal["frame", "bytes"]
ATTRIBUTES_KEY = "kvmnn"
"""Key of kvmnn's attributes."""

_NUMPY_DTYPE_BY_NAME = {name: np.dtype(name) for name in ("float16", "float32", "float64", "bool")}
_NUMPY_DTYPE_BY_NAME |= {
    f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_BFLOAT16_NAME = "bfloat16"
_SPECIAL_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_BYTES_CODECS = ("zstd", "gzip", "zlib")
_MAX_AXES = 32
_INDEX_REGEX = declare_pattern(r"0|[1-9][0-9]{0,17}")


@dataclass(frozen=True, kw_only=True)
class ArrayMetadata:
    """The metadata document of an array."""

    #: Shapes of array and chunks in elements, in the array's axis order.
    shape: ChunkIndex
    chunk_shape: ChunkIndex
    #: Type of the elements in a decoded chunk; uint16 for bfloat16.
    array_dtype: np.dtype[Any]
    #: Whether the words are bfloat16.
    is_bf16: bool = False
    #: Byte order of the elements in a chunk.
    order: Order = "C"
    #: Array codec (a frame or raw words), and the compressor after it.
    array_codec: ArrayCodec = "bytes"
    bytes_codec: str | None = None
    #: Bytes of an element of a missing chunk.
    fill_bytes: bytes = b""
    #: Prefix and separator of chunk names.
    key_prefix: str = "c"
    key_separator: str = "/"
    #: Attributes of the array.
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chunk_bytes(self) -> int:
        """Return the size of a decoded chunk in bytes."""
        return math.prod(self.chunk_shape) * self.array_dtype.itemsize

    @property
    def codec_name(self) -> str:
        """Return a name of the chunk encoding for reports."""
        return ", ".join(
            [CODEC_NAME if self.array_codec == "frame" else "bytes", *([self.bytes_codec] if self.bytes_codec else [])]
        )

    def format_chunk_key(self, index: ChunkIndex) -> str:
        """Return the file name of a chunk below the array's directory; the index is in memory order."""
        index = index if self.order == "C" else index[::-1]
        key_parts = [self.key_prefix] if self.key_prefix else []
        return self.key_separator.join([*key_parts, *map(str, index)]) or "0"

    def parse_chunk_key(self, key: str) -> ChunkIndex | None:
        """Return the index, in memory order, of the chunk with this file name; None for other names."""
        key_parts = key.split(self.key_separator)
        if self.key_prefix and key_parts.pop(0) != self.key_prefix:
            return None
        if not self.shape and key_parts == ([] if self.key_prefix else ["0"]):
            return ()
        if len(key_parts) != len(self.shape) or not all(map(_INDEX_REGEX.fullmatch, key_parts)):
            return None
        index = tuple(map(int, key_parts))
        return index if self.order == "C" else index[::-1]

    def validate(self, label: str) -> ArrayMetadata:
        """Raise `LimitError` for chunks that are too large or too many."""
        if self.chunk_bytes > MAX_CHUNK_BYTES:
            raise LimitError(f"{label}: a chunk has {self.chunk_bytes:,} bytes: expected at most {MAX_CHUNK_BYTES:,}")
        if (num_chunks := math.prod(count_chunks(self.shape, self.chunk_shape))) > MAX_CHUNKS:
            raise LimitError(f"{label}: has {num_chunks:,} chunks: expected at most {MAX_CHUNKS:,}")
        return self


def parse_v3_metadata(node: JsonReader) -> ArrayMetadata:
    """Parse the ``zarr.json`` of an array."""
    shape, label = _parse_shape(node.get("shape"), 0), node.label
    native_dtype, is_bf16 = _parse_data_type(node.get("data_type"))
    grid = node.get("chunk_grid")
    if grid.get("name").read_str() != "regular":
        raise SourceError(f"{label}: chunk grid {grid.get('name').value!r:.80}: expected 'regular'")
    chunk_shape = _parse_shape(grid.get("configuration").get("chunk_shape"), 1)
    if len(chunk_shape) != len(shape):
        raise grid.get("configuration").get("chunk_shape").error(f"{len(shape)} lengths, as the shape has")
    key_prefix, key_separator = _parse_chunk_key_encoding(node.get("chunk_key_encoding"))
    order, array_codec, bytes_codec, is_big_endian = _parse_codecs(node.get("codecs"), len(shape))
    if _get_value(node, "storage_transformers"):
        raise SourceError(f"{label}: has storage transformers, which are not read")
    return ArrayMetadata(
        shape=shape,
        chunk_shape=chunk_shape,
        array_dtype=native_dtype.newbyteorder(">") if is_big_endian else native_dtype,
        is_bf16=is_bf16,
        order=order,
        array_codec=array_codec,
        bytes_codec=bytes_codec,
        fill_bytes=_parse_fill_value(node.get("fill_value"), native_dtype, is_bf16, is_big_endian),
        key_prefix=key_prefix,
        key_separator=key_separator,
        attributes=_get_object(node, "attributes"),
    ).validate(label)


def parse_v2_metadata(node: JsonReader, attributes: Mapping[str, Any]) -> ArrayMetadata:
    """Parse the ``.zarray`` of an array of version 2; raises the errors of `parse_v3_metadata`."""
    shape, label = _parse_shape(node.get("shape"), 0), node.label
    chunk_shape = _parse_shape(node.get("chunks"), 1)
    if len(chunk_shape) != len(shape):
        raise node.get("chunks").error(f"{len(shape)} lengths, as the shape has")
    try:
        native_dtype = parse_numpy_type(node.get("dtype").value)
    except ArrayTypeError as exc:
        raise UnsupportedArrayError(f"{label}: {exc}") from None
    if _get_value(node, "filters"):
        raise SourceError(f"{label}: has filters, which are not read")
    order = node.get("order").read_str()
    if order not in ("C", "F"):
        raise node.get("order").error("'C' or 'F'")
    array_codec, bytes_codec, is_big_endian = _parse_compressor(node.get("compressor"))
    return ArrayMetadata(
        shape=shape,
        chunk_shape=chunk_shape,
        array_dtype=native_dtype.newbyteorder("<") if array_codec == "frame" and not is_big_endian else native_dtype,
        order="F" if order == "F" else "C",
        array_codec=array_codec,
        bytes_codec=bytes_codec,
        fill_bytes=_parse_fill_value(node.get("fill_value"), native_dtype, False, False),
        key_prefix="",
        key_separator=_parse_separator(_get_value(node, "dimension_separator") or ".", label),
        attributes=attributes,
    ).validate(label)


def _get_value(node: JsonReader, key: str) -> Any:
    return node.value.get(key) if isinstance(node.value, dict) else None


def _get_object(node: JsonReader, key: str) -> dict[str, Any]:
    value = _get_value(node, key)
    return value if isinstance(value, dict) else {}


def _parse_shape(node: JsonReader, min_length: int) -> ChunkIndex:
    shape = tuple(entry.read_int(min_length) for entry in node.read_list(max_len=_MAX_AXES))
    if 0 in shape:
        raise UnsupportedArrayError(f"{node.label}: is empty (shape {list(shape)}), there is nothing to encode")
    return shape


def _parse_data_type(node: JsonReader) -> tuple[np.dtype[Any], bool]:
    if node.value == _BFLOAT16_NAME:
        return np.dtype("<u2"), True
    if not isinstance(node.value, str) or node.value not in _NUMPY_DTYPE_BY_NAME:
        type_text = json.dumps(node.value)[:80]
        raise UnsupportedArrayError(f"{node.label}: data type {type_text} is none that frames hold")
    return _NUMPY_DTYPE_BY_NAME[node.value].newbyteorder("<"), False


def _parse_chunk_key_encoding(node: JsonReader) -> tuple[str, str]:
    name = node.get("name").read_str()
    separator = _get_object(node, "configuration").get("separator")
    if name == "default":
        return "c", _parse_separator(separator or "/", node.label)
    if name == "v2":
        return "", _parse_separator(separator or ".", node.label)
    raise SourceError(f"{node.label}: chunk keys {name!r:.80}: expected 'default' or 'v2'")


def _parse_separator(value: Any, label: str) -> str:
    if value not in ("/", "."):
        raise SourceError(f"{label}: the separator of chunk keys is {value!r:.80}: expected '/' or '.'")
    return str(value)


def _parse_codecs(node: JsonReader, num_axes: int) -> tuple[Order, ArrayCodec, str | None, bool]:
    """Return order, array codec, compressor, and whether the words are big-endian."""
    entries = [(entry.get("name").read_str(), entry) for entry in node.read_list(min_len=1)]
    order: Order = "C"
    if entries[0][0] == "transpose":
        axis_order = _get_object(entries[0][1], "configuration").get("order")
        if axis_order != list(range(num_axes))[::-1]:
            raise entries[0][1].error("the order of all axes turned round")
        order, entries = "F", entries[1:]
    names, bytes_codecs = [name for name, _ in entries], _BYTES_CODECS[:2]
    has_known_codecs = names[:1] in ([CODEC_NAME], ["bytes"]) and {*names[1:]} <= {*bytes_codecs}
    if not has_known_codecs or len(names) > 2:
        unknown_codec = next((name for name in names if name not in (CODEC_NAME, "bytes", *bytes_codecs)), names)
        raise SourceError(
            f"{node.label}: codec {unknown_codec!r:.80}: kvmnn reads {CODEC_NAME}, and bytes, with zstd, gzip or "
            f"nothing after it"
        )
    bytes_codec = names[1] if len(names) > 1 else None
    if names[0] == CODEC_NAME:
        return order, "frame", bytes_codec, False
    endian = _get_object(entries[0][1], "configuration").get("endian", "little")
    if endian not in ("little", "big"):
        raise entries[0][1].error("endian 'little' or 'big'")
    return order, "bytes", bytes_codec, endian == "big"


def _parse_compressor(node: JsonReader) -> tuple[ArrayCodec, str | None, bool]:
    """Return the array codec, the bytes codec, and whether frames contain byte-swapped elements."""
    if node.value is None:
        return "bytes", None, False
    name = node.get("id").read_str()
    if name == CODEC_NAME:
        return "frame", None, _get_value(node, "endian") == "big"
    if name not in _BYTES_CODECS:
        raise SourceError(f"{node.label}: compressor {name!r:.80}: kvmnn reads {CODEC_NAME}, zstd, gzip, zlib or none")
    return "bytes", name, False


def _parse_fill_value(node: JsonReader, native_dtype: np.dtype[Any], is_bf16: bool, is_big_endian: bool) -> bytes:
    value = node.value
    try:
        if isinstance(value, str) and value.startswith("0x"):
            fill_bytes = int(value, 16).to_bytes(native_dtype.itemsize, "little")
            return fill_bytes[::-1] if is_big_endian else fill_bytes
        number = _SPECIAL_FLOATS[value] if isinstance(value, str) else 0 if value is None else value
        if not isinstance(number, int | float):
            raise TypeError
        if is_bf16:
            fill_array = (np.array([number], "<f4").view("<u4") >> np.uint32(16)).astype("<u2")
        else:
            with np.errstate(over="ignore"):
                fill_array = np.array([number]).astype(native_dtype)
        return (fill_array.byteswap() if is_big_endian else fill_array).tobytes()
    except (KeyError, TypeError, ValueError, OverflowError):
        raise node.error("a number, 'NaN', 'Infinity', '-Infinity' or '0x...'") from None


ATTRIBUTES_VERSION = 1
_EXCLUDED_METADATA_KEYS = (DUMP_KEY, FILE_KEY, ENGINE_KEY)
_DIMENSION_NAME_BY_AXIS = {"2": "key_value", "l": "layer", "b": "batch", "h": "kv_head", "t": "token", "d": "head_dim"}


def build_group_attributes(source: Source) -> dict[str, Any]:
    """Build the attributes of the group."""
    cache = source.engine_cache
    document: dict[str, Any] = {
        "version": ATTRIBUTES_VERSION,
        "arrays": list(source),
        "axes": source.axes,
        "token_major": source.token_major,
        "lossy": source.lossy,
        "metadata": {
            key: text
            for key, text in engine_metadata.add_completeness_metadata(source).items()
            if key not in _EXCLUDED_METADATA_KEYS
        },
    }
    if cache is not None:
        document["cache"] = engine_metadata.build_engine_document(cache)
    return {ATTRIBUTES_KEY: document}


def build_array_attributes(array: ArrayInfo, sha256: str) -> dict[str, Any]:
    """Build the attributes of an array."""
    document: dict[str, Any] = {"name": array.name, "dtype": array.dtype, "sha256": sha256}
    parsed_name = parse_conventional_name(array.name)
    if parsed_name is not None:
        document |= {"layer": parsed_name.layer, "part": parsed_name.part}
    return {ATTRIBUTES_KEY: document}


def choose_dimension_names(source: Source) -> list[list[str]]:
    """Choose names for the axes of every array; an axis whose length varies gets the array's name as a suffix.

    xarray takes all arrays of a store as one data set, where a name has one length.
    """
    names = [
        [_DIMENSION_NAME_BY_AXIS.get(letter, letter) for letter in _list_axis_names(source, array)]
        for array in source.arrays
    ]
    lengths: dict[str, set[int]] = {}
    for array, axes in zip(source.arrays, names, strict=True):
        for name, length in zip(axes, array.shape, strict=True):
            lengths.setdefault(name, set()).add(length)
    return [
        [name if len(lengths[name]) == 1 else f"{name}_{n}" for name, n in zip(axes, array.shape, strict=True)]
        for array, axes in zip(source.arrays, names, strict=True)
    ]


def _list_axis_names(source: Source, array: ArrayInfo) -> Sequence[str]:
    """List a letter for each axis, or placeholders if the axes are unknown."""
    num_axes = len(array.shape)
    if source.axes is not None and len(source.axes) == num_axes:
        return source.axes
    parsed_name = parse_conventional_name(array.name)
    if parsed_name is not None and num_axes == 3:
        return "thd" if source.token_major else parsed_name.order
    if parsed_name is not None and num_axes == 4 and parsed_name.order == "htd":
        return "bthd" if source.token_major else "bhtd"
    return [f"axis_{index}" for index in range(num_axes)]


def restore_attributes(source: Source, attributes: Mapping[str, Any], label: str, *, is_subset: bool = False) -> None:
    """Restore the properties of a source that `build_group_attributes` recorded; ignore foreign attributes."""
    node = JsonReader(attributes, label, "attributes")
    if ATTRIBUTES_KEY not in attributes:
        return
    own_node = node.get(ATTRIBUTES_KEY)
    own_node.get("version").check_version(ATTRIBUTES_VERSION)
    metadata = own_node.get("metadata").read_str_map()
    source.metadata = build_subset_metadata(metadata, parse_cache_info(metadata, label)) if is_subset else metadata
    source.token_major = own_node.get("token_major").read_bool()
    source.lossy = own_node.get("lossy").read_bool()
    engine_metadata.restore_completeness(source, label)
    axes = own_node.get("axes")
    source.axes = None if axes.value is None else axes.read_str()
    if "cache" in own_node.value:
        cache = engine_metadata.parse_engine_cache(own_node.get("cache"))
        source.engine_cache = select_engine_layers(cache, list_array_names(attributes), source) if is_subset else cache


def list_array_names(attributes: Mapping[str, Any]) -> list[str]:
    """List the recorded names of the arrays in their order."""
    document = attributes.get(ATTRIBUTES_KEY)
    names = document.get("arrays") if isinstance(document, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
