"""A manifest read: believed only where everything in it agrees."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from .. import dtypes
from ..arrays.valid_names import shortened, wrong_name
from ..errors import KvmnnError, ManifestError, SourceError
from ..files.json_document import Node, parse, read_bounded
from .manifest import (
    DENSE_SCHEMA_VERSION,
    SCHEMA,
    SCHEMA_VERSION,
    SINCE,
    ArrayEntry,
    Axes,
    FrameEntry,
    Manifest,
    Stored,
)

MAX_BYTES = 256 << 20
_MIN_FRAME_BYTES = 14
_AXES: Final[tuple[Axes, ...]] = ("htd", "thd")
_ARRAY_DTYPE = re.compile(r"[<>|][fiuV][124]")


def load(path: Path) -> Manifest:
    """Read and check a manifest file.

    Raises
    ------
    ManifestError
        Naming the file and the JSON path of what is wrong.
    """
    if path.exists() and not path.is_file():  # a FIFO would be waited for
        raise ManifestError(f"{path}: is not a regular file, so it is no manifest")
    try:
        text = read_bounded(path, MAX_BYTES)
    except OSError as exc:
        raise ManifestError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except SourceError as exc:
        raise ManifestError(str(exc)) from exc
    return from_json(text, str(path))


def from_json(text: bytes, where: str = "manifest") -> Manifest:
    """The manifest in a JSON document; `where` begins the messages of errors, which are those of `load`."""
    root = parse(text, where, MAX_BYTES)
    if isinstance(root.value, dict) and "schema" not in root.value:
        raise ManifestError(f'{where}: schema: is missing: a manifest of kvmnn says "schema": "{SCHEMA}"')
    if root.at("schema").text() != SCHEMA:
        raise root.at("schema").wrong(f"{SCHEMA!r}")
    version = root.at("schema_version")
    if version.integer(1) not in SINCE.values():
        raise version.wrong(f"{SCHEMA_VERSION} to {DENSE_SCHEMA_VERSION}, the versions this kvmnn reads")
    arrays = tuple(_array(node, version.value) for node in root.at("arrays").items(least=1))
    _check_unique(root, arrays)
    _check_ranges(root, arrays)
    manifest = Manifest(
        kvmnn_version=root.at("kvmnn_version").text(),
        zstd_version=root.at("zstd").at("version").text(),
        zstd_byte_exact=root.at("zstd").at("byte_exact").boolean(),
        effort=None if root.at("effort").value is None else root.at("effort").text(),
        codecs=root.at("codecs").texts(),
        predictors=root.at("predictors").texts(),
        hi_predictors=None if root.at("hi_predictors").value is None else root.at("hi_predictors").texts(),
        arrays=arrays,
        metadata=root.at("metadata").text_map(),
    )
    if manifest.effort is None and any(not frame.is_dense for array in arrays for frame in array.frames):
        raise root.at("effort").wrong("a string, as there are frames")
    _check_sum(root, "raw_bytes", manifest.raw_bytes)
    _check_sum(root, "stored_bytes", manifest.stored_bytes)
    return manifest


def _check_unique(root: Node, arrays: Sequence[ArrayEntry]) -> None:
    seen: set[str] = set()
    for index, array in enumerate(arrays):
        if array.name in seen:
            raise ManifestError(f"{root.where}: arrays[{index}].name: {array.name!r} is already taken")
        seen.add(array.name)


def _check_ranges(root: Node, arrays: Sequence[ArrayEntry]) -> None:
    """No byte of a file belongs to two frames, lest a small file stand for many arrays, but frames that are shared."""
    ranges = sorted(
        (frame.file, frame.offset, frame.offset + frame.bytes, index, array.shared)
        for index, array in enumerate(arrays)
        for frame in array.frames
    )
    for (file, *range_, one, shared), (other_file, *other_range, other, other_shared) in pairwise(ranges):
        shares = shared and other_shared and one != other and range_ == other_range
        if file == other_file and other_range[0] < range_[1] and not shares:
            raise ManifestError(
                f"{root.where}: arrays[{other}]: bytes {other_range[0]} to {other_range[1]} of {file!r} belong to "
                f"arrays[{one}] as well, and are not declared as shared"
            )


def _check_sum(node: Node, key: str, expected: int) -> None:
    if node.at(key).integer(0) != expected:
        raise node.at(key).wrong(f"{expected}, the sum of its parts")


def _element(node: Node, dtype: str, array_dtype: str) -> str:
    """The type of codes, where an array holds some."""
    if "element" not in node.value:
        return ""
    element = node.at("element").text()
    if element not in dtypes.FLOAT8_NAMES or (dtype, array_dtype) != (dtypes.FP16.name, "|u1"):
        raise node.at("element").wrong(f"one of {', '.join(dtypes.FLOAT8_NAMES)}, of an array of fp16 and '|u1'")
    return element


def _array(node: Node, version: int) -> ArrayEntry:
    dtype = node.at("dtype").text()
    try:
        word_bytes = dtypes.by_name(dtype).itemsize
    except KvmnnError:
        raise node.at("dtype").wrong(f"one of {', '.join(dtypes.BY_NAME)}") from None
    array_dtype = node.at("array_dtype").text()
    if not _ARRAY_DTYPE.fullmatch(array_dtype) or array_dtype in ("|f2", "|f4", "<f1", ">f1", "|f1"):
        raise node.at("array_dtype").wrong("a numpy type of kind f, i, u or V")
    if int(array_dtype[2]) != word_bytes and array_dtype != "|u1":
        raise node.at("array_dtype").wrong(f"a type of {word_bytes} bytes, as {dtype} has, or '|u1'")
    order = node.at("order").text()
    if order not in ("C", "F"):
        raise node.at("order").wrong("'C' or 'F'")
    shape = tuple(axis.integer(1) for axis in node.at("shape").items(most=64))
    array = ArrayEntry(
        name=_name(node.at("name")),
        dtype=dtype,
        shape=shape,
        array_dtype=array_dtype,
        order="F" if order == "F" else "C",
        sha256=node.at("sha256").sha256(),
        frames=tuple(_frame(frame, word_bytes, version) for frame in node.at("frames").items(least=1)),
        element=_element(node, dtype, array_dtype),
        shared="shared" in node.value and node.at("shared").boolean(),
    )
    raw_bytes = math.prod(shape) * array.itemsize
    _check_sum(node, "stored_bytes", array.stored_bytes)
    _check_sum(node, "raw_bytes", sum(frame.raw_bytes for frame in array.frames))
    if node.at("raw_bytes").value != raw_bytes:
        raise node.at("raw_bytes").wrong(f"{raw_bytes}, as its shape and array_dtype say")
    return array


def _name(node: Node) -> str:
    name = node.text()
    if wrong := wrong_name(name):
        raise ManifestError(f"{node.where}: {node.path}: {shortened(name)} {wrong}")
    return name


def _frame(node: Node, word_bytes: int, version: int) -> FrameEntry:
    raw_bytes = node.at("raw_bytes").integer(word_bytes)
    if raw_bytes % word_bytes:
        raise node.at("raw_bytes").wrong(f"a multiple of {word_bytes}")
    stored = _stored(node, version)
    size = node.at("bytes").integer(0 if stored == "raw" else _MIN_FRAME_BYTES)
    if stored == "raw" and size != raw_bytes:
        raise node.at("bytes").wrong(f"{raw_bytes}, its raw_bytes, as the words are stored raw")
    return FrameEntry(
        file=node.at("file").file_name(),
        offset=node.at("offset").integer(0),
        bytes=size,
        raw_bytes=raw_bytes,
        sha256=node.at("sha256").sha256(),
        stored=stored,
        axes=_axes(node.at("axes")) if stored == "dense" else None,
        rope=node.at("rope").text() if stored == "dense" and "rope" in node.value else None,
    )


def _axes(node: Node) -> Axes:
    for axes in _AXES:
        if node.value == axes:
            return axes
    raise node.wrong(" or ".join(map(repr, _AXES)))


def _stored(node: Node, version: int) -> Stored:
    """What a range holds; refused where readers of an older version would take it for a frame."""
    if "stored" not in node.value:
        return "frame"
    said = node.at("stored")
    for stored, since in SINCE.items():
        if said.value == stored:
            if version < since:
                raise said.wrong(f"'frame': only version {since} of the schema has {stored!r}")
            return stored
    raise said.wrong(" or ".join(map(repr, SINCE)))
