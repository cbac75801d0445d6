"""A manifest read: believed only where everything in it agrees."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from .. import dtypes
from ..arrays.valid_names import find_name_error, shorten_name
from ..errors import KvmnnError, ManifestError, SourceError
from ..files.json_document import JsonReader, parse_document, read_bounded
from .manifest import (
    DENSE_SCHEMA_VERSION,
    SCHEMA,
    SCHEMA_VERSION,
    SCHEMA_VERSION_BY_KIND,
    ArrayEntry,
    Axes,
    FrameEntry,
    Manifest,
    StorageKind,
)

MAX_MANIFEST_BYTES = 256 << 20
_MIN_FRAME_BYTES = 14
_AXIS_ORDERS: Final[tuple[Axes, ...]] = ("htd", "thd")
_ARRAY_DTYPE_REGEX = re.compile(r"[<>|][fiuV][124]")


def load_manifest(path: Path) -> Manifest:
    """Read and check a manifest file.

    Raises
    ------
    ManifestError
        Naming the file and the JSON path of what is wrong.
    """
    if path.exists() and not path.is_file():  # a FIFO would be waited for
        raise ManifestError(f"{path}: is not a regular file, so it is no manifest")
    try:
        text = read_bounded(path, MAX_MANIFEST_BYTES)
    except OSError as exc:
        raise ManifestError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except SourceError as exc:
        raise ManifestError(str(exc)) from exc
    return parse_manifest(text, str(path))


def parse_manifest(text: bytes, where: str = "manifest") -> Manifest:
    """The manifest in a JSON document; `where` begins the messages of errors, which are those of `load_manifest`."""
    root = parse_document(text, where, MAX_MANIFEST_BYTES)
    if isinstance(root.value, dict) and "schema" not in root.value:
        raise ManifestError(f'{where}: schema: is missing: a manifest of kvmnn says "schema": "{SCHEMA}"')
    if root.get("schema").read_str() != SCHEMA:
        raise root.get("schema").error(f"{SCHEMA!r}")
    version = root.get("schema_version")
    if version.read_int(1) not in SCHEMA_VERSION_BY_KIND.values():
        raise version.error(f"{SCHEMA_VERSION} to {DENSE_SCHEMA_VERSION}, the versions this kvmnn reads")
    arrays = tuple(_parse_array(node, version.value) for node in root.get("arrays").read_list(min_len=1))
    _check_unique_names(root, arrays)
    _check_disjoint_ranges(root, arrays)
    manifest = Manifest(
        kvmnn_version=root.get("kvmnn_version").read_str(),
        zstd_version=root.get("zstd").get("version").read_str(),
        zstd_byte_exact=root.get("zstd").get("byte_exact").read_bool(),
        effort=None if root.get("effort").value is None else root.get("effort").read_str(),
        codecs=root.get("codecs").read_str_list(),
        predictors=root.get("predictors").read_str_list(),
        hi_predictors=None if root.get("hi_predictors").value is None else root.get("hi_predictors").read_str_list(),
        arrays=arrays,
        metadata=root.get("metadata").read_str_map(),
    )
    if manifest.effort is None and any(not frame.is_dense for array in arrays for frame in array.frames):
        raise root.get("effort").error("a string, as there are frames")
    _check_sum(root, "raw_bytes", manifest.raw_bytes)
    _check_sum(root, "stored_bytes", manifest.stored_bytes)
    return manifest


def _check_unique_names(root: JsonReader, arrays: Sequence[ArrayEntry]) -> None:
    used_names: set[str] = set()
    for index, array in enumerate(arrays):
        if array.name in used_names:
            raise ManifestError(f"{root.label}: arrays[{index}].name: {array.name!r} is already taken")
        used_names.add(array.name)


def _check_disjoint_ranges(root: JsonReader, arrays: Sequence[ArrayEntry]) -> None:
    """No byte of a file belongs to two frames, lest a small file stand for many arrays, but frames that are shared."""
    ranges = sorted(
        (frame.file, frame.offset, frame.offset + frame.bytes, index, array.shared)
        for index, array in enumerate(arrays)
        for frame in array.frames
    )
    for (file, *byte_range, first_index, is_shared), (next_file, *next_range, next_index, is_next_shared) in pairwise(
        ranges
    ):
        is_declared = is_shared and is_next_shared and first_index != next_index and byte_range == next_range
        if file == next_file and next_range[0] < byte_range[1] and not is_declared:
            raise ManifestError(
                f"{root.label}: arrays[{next_index}]: bytes {next_range[0]} to {next_range[1]} of {file!r} belong to "
                f"arrays[{first_index}] as well, and are not declared as shared"
            )


def _check_sum(node: JsonReader, key: str, expected_sum: int) -> None:
    if node.get(key).read_int(0) != expected_sum:
        raise node.get(key).error(f"{expected_sum}, the sum of its parts")


def _element(node: JsonReader, dtype: str, array_dtype: str) -> str:
    """The type of codes, where an array holds some."""
    if "element" not in node.value:
        return ""
    element = node.get("element").read_str()
    if element not in dtypes.FLOAT8_NAMES or (dtype, array_dtype) != (dtypes.FP16.name, "|u1"):
        raise node.get("element").error(f"one of {', '.join(dtypes.FLOAT8_NAMES)}, of an array of fp16 and '|u1'")
    return element


def _parse_array(node: JsonReader, version: int) -> ArrayEntry:
    dtype = node.get("dtype").read_str()
    try:
        element_bytes = dtypes.parse_dtype(dtype).itemsize
    except KvmnnError:
        raise node.get("dtype").error(f"one of {', '.join(dtypes.DTYPES)}") from None
    array_dtype = node.get("array_dtype").read_str()
    if not _ARRAY_DTYPE_REGEX.fullmatch(array_dtype) or array_dtype in ("|f2", "|f4", "<f1", ">f1", "|f1"):
        raise node.get("array_dtype").error("a numpy type of kind f, i, u or V")
    if int(array_dtype[2]) != element_bytes and array_dtype != "|u1":
        raise node.get("array_dtype").error(f"a type of {element_bytes} bytes, as {dtype} has, or '|u1'")
    order = node.get("order").read_str()
    if order not in ("C", "F"):
        raise node.get("order").error("'C' or 'F'")
    shape = tuple(axis.read_int(1) for axis in node.get("shape").read_list(max_len=64))
    array = ArrayEntry(
        name=_parse_name(node.get("name")),
        dtype=dtype,
        shape=shape,
        array_dtype=array_dtype,
        order="F" if order == "F" else "C",
        sha256=node.get("sha256").read_sha256(),
        frames=tuple(_parse_frame(frame, element_bytes, version) for frame in node.get("frames").read_list(min_len=1)),
        element=_element(node, dtype, array_dtype),
        shared="shared" in node.value and node.get("shared").read_bool(),
    )
    raw_bytes = math.prod(shape) * array.itemsize
    _check_sum(node, "stored_bytes", array.stored_bytes)
    _check_sum(node, "raw_bytes", sum(frame.raw_bytes for frame in array.frames))
    if node.get("raw_bytes").value != raw_bytes:
        raise node.get("raw_bytes").error(f"{raw_bytes}, as its shape and array_dtype say")
    return array


def _parse_name(node: JsonReader) -> str:
    name = node.read_str()
    if name_error := find_name_error(name):
        raise ManifestError(f"{node.label}: {node.path}: {shorten_name(name)} {name_error}")
    return name


def _parse_frame(node: JsonReader, element_bytes: int, version: int) -> FrameEntry:
    raw_bytes = node.get("raw_bytes").read_int(element_bytes)
    if raw_bytes % element_bytes:
        raise node.get("raw_bytes").error(f"a multiple of {element_bytes}")
    kind = _parse_storage_kind(node, version)
    num_bytes = node.get("bytes").read_int(0 if kind == "raw" else _MIN_FRAME_BYTES)
    if kind == "raw" and num_bytes != raw_bytes:
        raise node.get("bytes").error(f"{raw_bytes}, its raw_bytes, as the words are stored raw")
    return FrameEntry(
        file=node.get("file").read_file_name(),
        offset=node.get("offset").read_int(0),
        bytes=num_bytes,
        raw_bytes=raw_bytes,
        sha256=node.get("sha256").read_sha256(),
        stored=kind,
        axes=_parse_axes(node.get("axes")) if kind == "dense" else None,
        rope=node.get("rope").read_str() if kind == "dense" and "rope" in node.value else None,
    )


def _parse_axes(node: JsonReader) -> Axes:
    for axes in _AXIS_ORDERS:
        if node.value == axes:
            return axes
    raise node.error(" or ".join(map(repr, _AXIS_ORDERS)))


def _parse_storage_kind(node: JsonReader, version: int) -> StorageKind:
    """What a range holds; refused where readers of an older version would take it for a frame."""
    if "stored" not in node.value:
        return "frame"
    kind_node = node.get("stored")
    for kind, first_version in SCHEMA_VERSION_BY_KIND.items():
        if kind_node.value == kind:
            if version < first_version:
                raise kind_node.error(f"'frame': only version {first_version} of the schema has {kind!r}")
            return kind
    raise kind_node.error(" or ".join(map(repr, SCHEMA_VERSION_BY_KIND)))
