"""The manifest: what a set of frames holds, so that the same arrays can be restored and proved.

Version 1; version 2 where arrays are stored raw, version 3 where some are dense streams: an older reader would take
those for frames. Readers refuse other versions and ignore keys they do not know, so that later releases may add keys
within a version but never change the meaning of one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from .. import dtypes
from ..arrays.named_array import ArrayInfo
from ..arrays.valid_names import shortened, wrong_name
from ..errors import KvmnnError, ManifestError, SourceError
from ..files.json_document import Node, parse, read_bounded
from ..text import count, ratio

SCHEMA: Final = "kvmnn-manifest"
SCHEMA_VERSION: Final = 1
RAW_SCHEMA_VERSION: Final = 2
"""Of a manifest that lists words stored raw."""
DENSE_SCHEMA_VERSION: Final = 3
"""Of a manifest that lists dense streams."""
FILE_NAME: Final = "manifest.json"
FRAME_SUFFIX: Final = ".frame"
SIDE_SUFFIX: Final = ".json"
"""What is appended to a frame file's name to give its manifest's."""

MAX_BYTES = 256 << 20
_MIN_FRAME_BYTES = 14
Stored = Literal["frame", "raw", "dense"]
Axes = Literal["htd", "thd"]
"""Heads before tokens, or tokens before heads, and then the words of a head."""
_SINCE: Final[dict[Stored, int]] = {
    "frame": SCHEMA_VERSION,
    "raw": RAW_SCHEMA_VERSION,
    "dense": DENSE_SCHEMA_VERSION,
}
"""Which version of the schema first had each."""
_AXES: Final[tuple[Axes, ...]] = ("htd", "thd")
_ARRAY_DTYPE = re.compile(r"[<>|][fiuV][124]")


@dataclass(frozen=True, kw_only=True)
class FrameEntry:
    """Where a frame, or what stands for one, lies and what it must be.

    Parameters
    ----------
    file
        Name relative to the manifest's directory.
    offset, bytes
        Its range in the file, in bytes.
    raw_bytes
        Bytes it decodes to.
    sha256
        Of the frame; None when there is no manifest.
    stored
        ``"raw"`` where the words themselves lie there, little-endian, because no frame of them was smaller;
        ``"dense"`` where it is a dense stream (docs/format-v2.md).
    axes
        Of a dense stream: how the last three axes of its array lie in memory; None for all others.
    """

    file: str
    offset: int
    bytes: int
    raw_bytes: int
    sha256: str | None
    stored: Stored = "frame"
    axes: Axes | None = None

    @property
    def is_raw(self) -> bool:
        """Whether the words themselves are stored, not a frame of them."""
        return self.stored == "raw"

    @property
    def is_dense(self) -> bool:
        """Whether it is a dense stream, not a frame."""
        return self.stored == "dense"

    @property
    def kind(self) -> str:
        """What lies there, for messages."""
        return {"frame": "the frame", "raw": "what is stored raw", "dense": "the dense stream"}[self.stored]

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; `stored` only where it is not a frame, as version 1 of the schema has no such key."""
        document = dict(vars(self))
        if self.stored == "frame":
            del document["stored"]
        if self.axes is None:
            del document["axes"]
        return document


@dataclass(frozen=True, kw_only=True)
class ArrayEntry(ArrayInfo):
    """An array and its frames, in order.

    Parameters
    ----------
    sha256
        Of the raw bytes: little-endian words in memory order. None when there is no manifest.
    frames
        Joined, they decode to the raw bytes.
    shared
        Whether its frames may be those of other arrays, which must say so as well.
    """

    sha256: str | None
    frames: tuple[FrameEntry, ...]
    shared: bool = False

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its frames."""
        return sum(frame.bytes for frame in self.frames)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What made the frames, and what they hold.

    Parameters
    ----------
    metadata
        Text that came with the arrays (``__metadata__`` of a ``.safetensors`` file).
    hi_predictors
        None where they are those of `predictors`.
    """

    kvmnn_version: str
    zstd_version: str
    zstd_byte_exact: bool
    effort: str
    codecs: tuple[str, ...]
    predictors: tuple[str, ...]
    hi_predictors: tuple[str, ...] | None
    arrays: tuple[ArrayEntry, ...]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def schema_version(self) -> int:
        """The lowest version of the schema that can say all this."""
        return max(_SINCE[frame.stored] for array in self.arrays for frame in array.frames)

    @property
    def raw_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(array.stored_bytes for array in self.arrays)


class Sizes:
    """The sizes of a result that has a manifest."""

    manifest: Manifest

    @property
    def raw_bytes(self) -> int:
        """Bytes of all arrays."""
        return self.manifest.raw_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of all frames."""
        return self.manifest.stored_bytes

    @property
    def ratio(self) -> float:
        """Raw over stored bytes."""
        return ratio(self.raw_bytes, self.stored_bytes)


def to_json(manifest: Manifest) -> bytes:
    """The manifest as a JSON document."""
    document = {
        "schema": SCHEMA,
        "schema_version": manifest.schema_version,
        "kvmnn_version": manifest.kvmnn_version,
        "zstd": {"version": manifest.zstd_version, "byte_exact": manifest.zstd_byte_exact},
        "effort": manifest.effort,
        "codecs": list(manifest.codecs),
        "predictors": list(manifest.predictors),
        "hi_predictors": None if manifest.hi_predictors is None else list(manifest.hi_predictors),
        "raw_bytes": manifest.raw_bytes,
        "stored_bytes": manifest.stored_bytes,
        "metadata": manifest.metadata,
        "arrays": [array_to_dict(array) for array in manifest.arrays],
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def array_to_dict(array: ArrayEntry) -> dict[str, Any]:
    """An array's part of the manifest."""
    return {
        "name": array.name,
        "shape": list(array.shape),
        "dtype": array.dtype,
        "array_dtype": array.array_dtype,
        "order": array.order,
        "raw_bytes": array.nbytes,
        "stored_bytes": array.stored_bytes,
        "sha256": array.sha256,
        "frames": [frame.to_dict() for frame in array.frames],
        **({"shared": True} if array.shared else {}),
    }


class PieceCounts(NamedTuple):
    """How many pieces of each kind arrays are stored in."""

    frames: int
    dense_streams: int
    raw_pieces: int


def count_pieces(arrays: Sequence[ArrayEntry]) -> PieceCounts:
    """How many pieces of each kind there are."""
    entries = [frame for array in arrays for frame in array.frames]
    dense, raw = sum(frame.is_dense for frame in entries), sum(frame.is_raw for frame in entries)
    return PieceCounts(len(entries) - dense - raw, dense, raw)


def frames_of(arrays: Sequence[ArrayEntry]) -> str:
    """How arrays are stored, for people: ``"3 frames"``, ``"2 dense streams, 1 frame"``, ``"stored: raw"``."""
    frames, dense, raw = count_pieces(arrays)
    if not frames + dense:
        return "stored: raw"
    found = [count(number, what) for number, what in ((dense, "dense stream"), (frames, "frame")) if number]
    return ", ".join([*found, f"{count(raw, 'piece')} stored: raw"] if raw else found)


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
    if root.at("schema").text() != SCHEMA:
        raise root.at("schema").wrong(f"{SCHEMA!r}")
    version = root.at("schema_version")
    if version.integer(1) not in _SINCE.values():
        raise version.wrong(f"{SCHEMA_VERSION} to {DENSE_SCHEMA_VERSION}, the versions this kvmnn reads")
    arrays = tuple(_array(node, version.value) for node in root.at("arrays").items(least=1))
    _check_unique(root, arrays)
    _check_ranges(root, arrays)
    manifest = Manifest(
        kvmnn_version=root.at("kvmnn_version").text(),
        zstd_version=root.at("zstd").at("version").text(),
        zstd_byte_exact=root.at("zstd").at("byte_exact").boolean(),
        effort=root.at("effort").text(),
        codecs=root.at("codecs").texts(),
        predictors=root.at("predictors").texts(),
        hi_predictors=None if root.at("hi_predictors").value is None else root.at("hi_predictors").texts(),
        arrays=arrays,
        metadata=root.at("metadata").text_map(),
    )
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
    for stored, since in _SINCE.items():
        if said.value == stored:
            if version < since:
                raise said.wrong(f"'frame': only version {since} of the schema has {stored!r}")
            return stored
    raise said.wrong(" or ".join(map(repr, _SINCE)))
