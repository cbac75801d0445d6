"""The JSON documents of Zarr arrays, versions 3 and 2: what they say, as far as kvmnn reads it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ...arrays.named_array import Order, UnsupportedArrayError
from ...codecs.chunks import MAX_CHUNK_BYTES, NAME
from ...dtypes import parse_numpy_type
from ...errors import ArrayTypeError, LimitError, SourceError
from ...files.json_document import Node
from .grid import MAX_CHUNKS, Index, counts

Packing = Literal["frame", "bytes"]
KEY = "kvmnn"
"""Of attributes that kvmnn writes."""

_TYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64", "bool")}
_TYPES |= {f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
_BFLOAT16 = "bfloat16"
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SQUEEZERS = ("zstd", "gzip", "zlib")
_AXES = 32
_INDEX = re.compile(r"0|[1-9][0-9]{0,17}")


@dataclass(frozen=True, kw_only=True)
class ArrayDocument:
    """What a document says of an array.

    Parameters
    ----------
    shape, chunks
        In elements; axes as the array has them.
    array_dtype
        Of the words in a chunk once it is decoded; uint16 for bfloat16.
    is_bf16
        Whether the words are bfloat16.
    order
        Of the elements in a chunk.
    packing, squeezer
        A frame or the words themselves; what compressed that.
    fill
        The bytes of an element of a chunk that is not there.
    prefix, separator
        Of the names of chunks.
    attributes
        Those of the array.
    """

    shape: Index
    chunks: Index
    array_dtype: np.dtype[Any]
    is_bf16: bool = False
    order: Order = "C"
    packing: Packing = "bytes"
    squeezer: str | None = None
    fill: bytes = b""
    prefix: str = "c"
    separator: str = "/"
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chunk_bytes(self) -> int:
        """Of a chunk once it is decoded."""
        return math.prod(self.chunks) * self.array_dtype.itemsize

    @property
    def codec_name(self) -> str:
        """What the chunks are, for people."""
        return ", ".join([NAME if self.packing == "frame" else "bytes", *([self.squeezer] if self.squeezer else [])])

    def chunk_name(self, index: Index) -> str:
        """The name of a chunk's file below the array's directory; the index is of memory order."""
        index = index if self.order == "C" else index[::-1]
        words = [self.prefix] if self.prefix else []
        return self.separator.join([*words, *map(str, index)]) or "0"

    def chunk_index(self, name: str) -> Index | None:
        """The index, in memory order, of the chunk whose file has a name below the array's directory; None for none."""
        words = name.split(self.separator)
        if self.prefix and words.pop(0) != self.prefix:
            return None
        if not self.shape and words == ([] if self.prefix else ["0"]):
            return ()
        if len(words) != len(self.shape) or not all(map(_INDEX.fullmatch, words)):
            return None
        index = tuple(map(int, words))
        return index if self.order == "C" else index[::-1]

    def checked(self, where: str) -> ArrayDocument:
        """`LimitError` for chunks that are too large or too many."""
        if self.chunk_bytes > MAX_CHUNK_BYTES:
            raise LimitError(f"{where}: a chunk has {self.chunk_bytes:,} bytes: expected at most {MAX_CHUNK_BYTES:,}")
        if (chunks := math.prod(counts(self.shape, self.chunks))) > MAX_CHUNKS:
            raise LimitError(f"{where}: has {chunks:,} chunks: expected at most {MAX_CHUNKS:,}")
        return self


def array_document(node: Node) -> ArrayDocument:
    """What the ``zarr.json`` of an array says.

    Raises
    ------
    ManifestError
        Where it is malformed.
    UnsupportedArrayError
        For a type, or an empty array, that frames do not hold.
    SourceError
        For codecs, grids and extensions that are not read, by name.
    """
    shape, where = _shape(node.at("shape"), 0), node.where
    native, is_bf16 = _type(node.at("data_type"))
    grid = node.at("chunk_grid")
    if grid.at("name").text() != "regular":
        raise SourceError(f"{where}: chunk grid {grid.at('name').value!r:.80}: expected 'regular'")
    chunks = _shape(grid.at("configuration").at("chunk_shape"), 1)
    if len(chunks) != len(shape):
        raise grid.at("configuration").at("chunk_shape").wrong(f"{len(shape)} lengths, as the shape has")
    prefix, separator = _keys(node.at("chunk_key_encoding"))
    order, packing, squeezer, swapped = _codecs(node.at("codecs"), len(shape))
    if _of(node, "storage_transformers"):
        raise SourceError(f"{where}: has storage transformers, which are not read")
    return ArrayDocument(
        shape=shape,
        chunks=chunks,
        array_dtype=native.newbyteorder(">") if swapped else native,
        is_bf16=is_bf16,
        order=order,
        packing=packing,
        squeezer=squeezer,
        fill=_fill(node.at("fill_value"), native, is_bf16, swapped),
        prefix=prefix,
        separator=separator,
        attributes=_object(node, "attributes"),
    ).checked(where)


def old_array_document(node: Node, attributes: Mapping[str, Any]) -> ArrayDocument:
    """What the ``.zarray`` of an array of version 2 says; errors as `array_document`."""
    shape, where = _shape(node.at("shape"), 0), node.where
    chunks = _shape(node.at("chunks"), 1)
    if len(chunks) != len(shape):
        raise node.at("chunks").wrong(f"{len(shape)} lengths, as the shape has")
    try:
        native = parse_numpy_type(node.at("dtype").value)
    except ArrayTypeError as exc:
        raise UnsupportedArrayError(f"{where}: {exc}") from None
    if _of(node, "filters"):
        raise SourceError(f"{where}: has filters, which are not read")
    order = node.at("order").text()
    if order not in ("C", "F"):
        raise node.at("order").wrong("'C' or 'F'")
    packing, squeezer, turned = _compressor(node.at("compressor"))
    return ArrayDocument(
        shape=shape,
        chunks=chunks,
        array_dtype=native.newbyteorder("<") if packing == "frame" and not turned else native,
        order="F" if order == "F" else "C",
        packing=packing,
        squeezer=squeezer,
        fill=_fill(node.at("fill_value"), native, False, False),
        prefix="",
        separator=_separator(_of(node, "dimension_separator") or ".", where),
        attributes=attributes,
    ).checked(where)


def _of(node: Node, key: str) -> Any:
    return node.value.get(key) if isinstance(node.value, dict) else None


def _object(node: Node, key: str) -> dict[str, Any]:
    found = _of(node, key)
    return found if isinstance(found, dict) else {}


def _shape(node: Node, least: int) -> Index:
    shape = tuple(entry.integer(least) for entry in node.items(most=_AXES))
    if 0 in shape:
        raise UnsupportedArrayError(f"{node.where}: is empty (shape {list(shape)}), there is nothing to encode")
    return shape


def _type(node: Node) -> tuple[np.dtype[Any], bool]:
    if node.value == _BFLOAT16:
        return np.dtype("<u2"), True
    if not isinstance(node.value, str) or node.value not in _TYPES:
        said = json.dumps(node.value)[:80]
        raise UnsupportedArrayError(f"{node.where}: data type {said} is none that frames hold")
    return _TYPES[node.value].newbyteorder("<"), False


def _keys(node: Node) -> tuple[str, str]:
    name = node.at("name").text()
    said = _object(node, "configuration").get("separator")
    if name == "default":
        return "c", _separator(said or "/", node.where)
    if name == "v2":
        return "", _separator(said or ".", node.where)
    raise SourceError(f"{node.where}: chunk keys {name!r:.80}: expected 'default' or 'v2'")


def _separator(said: Any, where: str) -> str:
    if said not in ("/", "."):
        raise SourceError(f"{where}: the separator of chunk keys is {said!r:.80}: expected '/' or '.'")
    return str(said)


def _codecs(node: Node, axes: int) -> tuple[Order, Packing, str | None, bool]:
    """Order, packing, compressor, and whether the words are big-endian."""
    entries = [(entry.at("name").text(), entry) for entry in node.items(least=1)]
    order: Order = "C"
    if entries[0][0] == "transpose":
        said = _object(entries[0][1], "configuration").get("order")
        if said != list(range(axes))[::-1]:
            raise entries[0][1].wrong("the order of all axes turned round")
        order, entries = "F", entries[1:]
    names = [name for name, _ in entries]
    if names[:1] not in ([NAME], ["bytes"]) or len(names) > 2 or (names[1:] and names[1] not in _SQUEEZERS[:2]):
        wrong = next((name for name in names if name not in (NAME, "bytes", *_SQUEEZERS[:2])), names)
        raise SourceError(
            f"{node.where}: codec {wrong!r:.80}: kvmnn reads {NAME}, and bytes, with zstd, gzip or nothing behind it"
        )
    squeezer = names[1] if len(names) > 1 else None
    if names[0] == NAME:
        return order, "frame", squeezer, False
    endian = _object(entries[0][1], "configuration").get("endian", "little")
    if endian not in ("little", "big"):
        raise entries[0][1].wrong("endian 'little' or 'big'")
    return order, "bytes", squeezer, endian == "big"


def _compressor(node: Node) -> tuple[Packing, str | None, bool]:
    """Packing, compressor, and whether the words of a frame are turned round."""
    if node.value is None:
        return "bytes", None, False
    name = node.at("id").text()
    if name == NAME:
        return "frame", None, _of(node, "endian") == "big"
    if name not in _SQUEEZERS:
        raise SourceError(f"{node.where}: compressor {name!r:.80}: kvmnn reads {NAME}, zstd, gzip, zlib or none")
    return "bytes", name, False


def _fill(node: Node, native: np.dtype[Any], is_bf16: bool, swapped: bool) -> bytes:
    value = node.value
    try:
        if isinstance(value, str) and value.startswith("0x"):
            words = int(value, 16).to_bytes(native.itemsize, "little")
            return words[::-1] if swapped else words
        number = _SPECIAL[value] if isinstance(value, str) else 0 if value is None else value
        if not isinstance(number, int | float):
            raise TypeError
        if is_bf16:
            made = (np.array([number], "<f4").view("<u4") >> np.uint32(16)).astype("<u2")
        else:
            with np.errstate(over="ignore"):
                made = np.array([number]).astype(native)
        return (made.byteswap() if swapped else made).tobytes()
    except (KeyError, TypeError, ValueError, OverflowError):
        raise node.wrong("a number, 'NaN', 'Infinity', '-Infinity' or '0x...'") from None
