"""Files of named arrays with checksums: profiles and statistics (docs/format-profile.md, "File")."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dense._stream import xxh64
from ..errors import KvmnnError, MissingFileError, SourceError
from ..files.schema import JsonReader, parse_document, read_bounded

Arrays = dict[str, npt.NDArray[Any]]

DTYPE_NAMES = (*("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"),)
MAX_FILE_BYTES = 1 << 30
MAX_HEADER_BYTES = 16 << 20
MAX_SECTIONS = 1 << 16
MAX_NAME_CHARACTERS = 120
MAX_AXES = 4
ALIGNMENT = 64

_LAYOUT = struct.Struct("<4sHHIIQ")


def write_sections(magic: bytes, version: int, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the bytes of a file: its header, then each array.

    Parameters
    ----------
    magic
        Four bytes.
    header
        JSON values; the key ``sections`` is added.
    arrays
        By name; written in the order of the mapping.

    Raises
    ------
    KvmnnError
        For names, types and sizes that the format does not have.
    """
    entries, blocks = [], []
    for name, values in arrays.items():
        array = np.asarray(values)
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        _check_section(f"section {name!r:.130}", name, array.dtype.name, array.shape)
        entries.append(
            {
                "name": name,
                "dtype": array.dtype.name,
                "shape": list(array.shape),
                "xxh64": f"{xxh64(little.tobytes()):016x}",
            }
        )
        blocks.append(little)  # whose bytes are copied one after another: statistics have more than 100 MB
    document = json.dumps({**header, "sections": entries}, separators=(",", ":"), allow_nan=False).encode()
    total = _align(_LAYOUT.size + len(document)) + sum(_align(block.nbytes) for block in blocks)
    if len(entries) > MAX_SECTIONS or len(document) > MAX_HEADER_BYTES or total > MAX_FILE_BYTES:
        raise KvmnnError(
            f"{len(entries):,} sections, a header of {len(document):,} bytes, {total:,} bytes in all: expected at most "
            f"{MAX_SECTIONS:,}, {MAX_HEADER_BYTES:,} and {MAX_FILE_BYTES:,}"
        )
    yield _pad(_LAYOUT.pack(magic, version, 0, len(document), 0, xxh64(document)) + document)
    for block in blocks:
        yield _pad(block.tobytes())


def read_file(path: Path) -> bytes:
    """Return the bytes of a file of sections, up to the limit of the format."""
    try:
        return read_bounded(path, MAX_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{path}: does not exist") from None


def read_sections(data: bytes, label: str, magic: bytes, version: int, kind: str) -> tuple[JsonReader, Arrays]:
    """Read a file of sections, all of it: its header, and read-only arrays that share its memory.

    `kind` is what such a file is called in the message about another one.

    Raises
    ------
    SourceError
        For another kind of file, another version, and any damage; the message begins with `label`.
    ManifestError
        For a header of other contents.
    """
    if len(data) < _LAYOUT.size or data[:4] != magic:
        raise SourceError(
            f"{label}: is no {kind}: expected {_LAYOUT.size} bytes or more from {magic.decode()!r}, found {data[:4]!r} "
            f"({len(data):,} bytes)"
        )
    _, found_version, flags, header_bytes, reserved, checksum = _LAYOUT.unpack_from(data)
    if found_version != version:
        raise SourceError(f"{label}: has version {found_version}: expected {version}")
    if flags or reserved:
        raise SourceError(f"{label}: has flags {flags} and {reserved}: expected 0 for both")
    end = _LAYOUT.size + header_bytes
    if header_bytes > MAX_HEADER_BYTES or _align(end) > len(data):
        raise SourceError(f"{label}: says a header of {header_bytes:,} bytes, and has {len(data):,} in all")
    document = data[_LAYOUT.size : end]
    if xxh64(document) != checksum:
        raise SourceError(f"{label}: is damaged: the checksum of its header does not hold")
    header = parse_document(document, label)
    arrays: Arrays = {}
    _check_padding(data, end, label)
    end = _align(end)
    for entry in header.get("sections").read_list(0, MAX_SECTIONS):
        name, dtype = entry.get("name").read_str(), entry.get("dtype").read_str()
        shape = tuple(axis.read_int(0) for axis in entry.get("shape").read_list(0, MAX_AXES))
        try:
            _check_section(f"{label}: section {name!r:.130}", name, dtype, shape)
        except KvmnnError as error:
            raise SourceError(str(error)) from None
        if name in arrays:
            raise SourceError(f"{label}: section {name!r} is there twice")
        numpy_dtype = np.dtype(dtype).newbyteorder("<")
        begin, end = end, end + math.prod(shape) * numpy_dtype.itemsize
        if _align(end) > len(data):
            raise SourceError(f"{label}: section {name!r} ends at byte {_align(end):,}, the file at {len(data):,}")
        if entry.get("xxh64").read_str() != f"{xxh64(memoryview(data)[begin:end]):016x}":
            raise SourceError(f"{label}: is damaged: the checksum of section {name!r} does not hold")
        _check_padding(data, end, label)
        arrays[name] = np.frombuffer(data, numpy_dtype, math.prod(shape), begin).reshape(shape)
        end = _align(end)
    if end != len(data):
        raise SourceError(f"{label}: has {len(data) - end:,} bytes after its last section")
    return header, arrays


def _check_section(label: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isascii() or not name.isprintable():
        raise KvmnnError(f"{label}: expected a name of 1 to {MAX_NAME_CHARACTERS} printable ASCII characters")
    if dtype not in DTYPE_NAMES:
        raise KvmnnError(f"{label}: has type {dtype!r:.40}: expected one of {', '.join(DTYPE_NAMES)}")
    if len(shape) > MAX_AXES or math.prod(shape) > MAX_FILE_BYTES or max(shape, default=0) > MAX_FILE_BYTES:
        raise KvmnnError(f"{label}: has shape {list(shape)}: expected at most {MAX_AXES} axes and 2^30 elements")


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pad(data: bytes) -> bytes:
    return data + bytes(_align(len(data)) - len(data))


def _check_padding(data: bytes, end: int, label: str) -> None:
    if any(data[end : _align(end)]):
        raise SourceError(f"{label}: has bytes other than 0 between its sections, at {end:,}")
