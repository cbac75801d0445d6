"""The manifest: a list of the arrays that a set of frames contains, so that they can be restored and verified.

Schema version 1; version 2 if arrays are stored raw, version 3 if some are dense streams, which an older reader would
take for frames. Readers refuse other versions and ignore unknown keys, so that later releases may add keys within a
version but never change the meaning of one. A manifest is accepted only if all its entries are consistent.

The metadata key ``kvmnn.packed_files`` (docs/prefix-cache.md) describes the packed files that frames were made from:
their hashes, and which arrays contain their bytes outside live rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from .. import dtypes
from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.patterns import declare_pattern
from .._util.text import compute_ratio, pluralize
from .._util.validation import format_fields
from ..arrays.array import ArrayInfo
from ..arrays.naming import find_name_error, shorten_name
from ..arrays.source import PACKED_FILES_KEY
from ..dtypes import PARTS, Part
from ..errors import KvmnnError, ManifestError, SourceError
from ..files.file_names import FRAME_SUFFIX as FRAME_SUFFIX
from ..files.file_names import SIDECAR_SUFFIX as SIDECAR_SUFFIX
from ..files.schema import JsonReader, Record, json_key, parse_document, read_bounded

PACKED_FILES_SCHEMA: Final = "kvmnn-packed-files"
PACKED_FILES_SCHEMA_VERSION: Final = 1
MAX_PACKED_FILES_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class PackedFileEntry:
    """A packed file."""

    #: Layer and part of the file.
    layer: int
    part: Part
    #: Size and hash of the file.
    nbytes: int
    sha256: str
    #: Name of the array with all bytes of the file, those of live rows zeroed; None if nothing else is nonzero.
    unused_array: str | None
    #: Whether the file contains state of another kind instead of K or V; `unused_array` contains all of it.
    is_state: bool = False


@dataclass(frozen=True)
class PackedRecord:
    """Record of the packed files that frames were made from."""

    #: Files of K and V alternating, layer by layer.
    files: tuple[PackedFileEntry, ...]
    #: Sentence about parts of the files that are not in the frames; empty if all are.
    left_out: str = ""

    @property
    def unused_names(self) -> frozenset[str]:
        """Return the names of the arrays that contain no tokens."""
        return frozenset(entry.unused_array for entry in self.files if entry.unused_array is not None)

    @property
    def states(self) -> frozenset[str]:
        """Return the names of the arrays that contain the state of layers without K and V."""
        return frozenset(
            entry.unused_array for entry in self.files if entry.is_state and entry.unused_array is not None
        )

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all files."""
        return sum(entry.nbytes for entry in self.files)

    def find_difference(self, other_record: PackedRecord) -> str | None:
        """Describe the first difference from other files, as text; None if there is none."""
        for entry, other_entry in zip(self.files, other_record.files, strict=False):
            if (entry.layer, entry.part, entry.nbytes, entry.sha256) != (
                other_entry.layer,
                other_entry.part,
                other_entry.nbytes,
                other_entry.sha256,
            ):
                return f"the file of layer {entry.layer}'s {entry.part}s is not the one that was encoded"
        return None if len(self.files) == len(other_record.files) else f"there are {len(other_record.files)} files"


def describe_unused_regions(unused_bytes: int, stored_bytes: int, num_files: int) -> str:
    """Describe in one sentence how many bytes store what packed files contain besides the live tokens.

    An array of unused regions is as long as its file, with zeros for the live tokens.
    """
    return (
        f"{pluralize(num_files, 'packed file')} with more than live tokens (evicted rows, padding): {stored_bytes:,} "
        f"more bytes store that, which the ratio does not count; decode writes all {unused_bytes:,} bytes of the files"
    )


def describe_states(state_bytes: int, stored_bytes: int, files: int) -> str:
    """Describe in one sentence how many bytes of the files of layers without K and V are stored."""
    return (
        f"state of layers without K and V: {state_bytes:,} bytes of {pluralize(files, 'file')} take {stored_bytes:,} "
        "more bytes, which the ratio does not count (decode writes the same files)"
    )


def name_state(layer: int, part: Part) -> str:
    """Return the name of the array with the state that a file has in place of K or V; it is never a name of K or V."""
    return f"layer_{layer}.{part}state"


def format_unused_name(layer: int, part: Part) -> str:
    """Return the name of the array with the bytes of a packed file outside live rows; it is never a name of K or V."""
    return f"layer_{layer}.{part}room"


def dump_packed_record(record: PackedRecord) -> str:
    """Return the record as JSON text."""
    files = [
        {
            "layer": entry.layer,
            "part": entry.part,
            "sha256": entry.sha256,
            "room": entry.unused_array,
            **({"is_state": True} if entry.is_state else {}),
            "bytes": entry.nbytes,
        }
        for entry in record.files
    ]
    document = {
        "schema": PACKED_FILES_SCHEMA,
        "schema_version": PACKED_FILES_SCHEMA_VERSION,
        "files": files,
        "left_out": record.left_out,
    }
    return json.dumps(document)


def parse_packed_record(metadata: dict[str, str], where: str) -> PackedRecord | None:
    """Parse the record in metadata; None if there is none."""
    text = metadata.get(PACKED_FILES_KEY)
    if text is None:
        return None
    root = parse_document(text, f"{where}: metadata {PACKED_FILES_KEY!r}", MAX_PACKED_FILES_BYTES)
    root.check_schema(PACKED_FILES_SCHEMA, PACKED_FILES_SCHEMA_VERSION)
    files = tuple(_parse_file_entry(node) for node in root.get("files").read_list(min_len=1))
    if any(entry.is_state and entry.unused_array is None for entry in files):
        raise ManifestError(f"{where}: metadata {PACKED_FILES_KEY!r}: a file of state has no array")
    unused_names = [entry.unused_array for entry in files if entry.unused_array is not None]
    if len(unused_names) != len(set(unused_names)):
        raise ManifestError(f"{where}: metadata {PACKED_FILES_KEY!r}: two files have the same room")
    return PackedRecord(files, root.get("left_out").read_str())


def _parse_file_entry(node: JsonReader) -> PackedFileEntry:
    part: Literal["key", "value"] | None = next(
        (candidate for candidate in PARTS if candidate == node.get("part").read_str()), None
    )
    if part is None:
        raise node.get("part").error(f"one of {', '.join(PARTS)}")
    room_node = node.get("room")
    return PackedFileEntry(
        layer=node.get("layer").read_int(0),
        part=part,
        nbytes=node.get("bytes").read_int(1),
        sha256=node.get("sha256").read_sha256(),
        unused_array=None if room_node.value is None else room_node.read_str(),
        is_state=node.get("is_state").read_bool() if "is_state" in node.value else False,
    )


SCHEMA: Final = "kvmnn-manifest"
SCHEMA_VERSION: Final = 1
RAW_SCHEMA_VERSION: Final = 2
"""Schema version of a manifest that lists words stored raw."""
DENSE_SCHEMA_VERSION: Final = 3
"""Schema version of a manifest that lists dense streams."""
MANIFEST_NAME: Final = "manifest.json"

StorageKind = Literal["frame", "raw", "dense"]
Axes = Literal["htd", "thd"]
"""Axes ``[head, token, dim]`` or ``[token, head, dim]``."""
SCHEMA_VERSION_BY_KIND: Final[dict[StorageKind, int]] = {
    "frame": SCHEMA_VERSION,
    "raw": RAW_SCHEMA_VERSION,
    "dense": DENSE_SCHEMA_VERSION,
}
"""First version of the schema that has each storage kind."""


@dataclass(frozen=True, kw_only=True)
class FrameEntry(Record):
    """Location, size and hash of a stored piece: a frame, a dense stream or raw words."""

    #: Name relative to the manifest's directory.
    file: str
    #: Start of the piece in the file, in bytes.
    offset: int
    bytes: int
    #: Bytes it decodes to.
    raw_bytes: int
    #: SHA-256 of the piece as stored; None if there is no manifest.
    sha256: str | None
    #: ``"raw"`` for little-endian words, stored because no frame of them was smaller; ``"dense"`` for a dense stream
    #: (docs/format-v2.md).
    stored: StorageKind = field(default="frame", metadata={"omit": True})
    #: Order of the last three axes of the array of a dense stream in memory; None for frames and raw words.
    axes: Axes | None = field(default=None, metadata={"omit": True})
    #: RoPE parameters that were specified for a dense stream of K, in the form of ``--rope``; None if unspecified.
    rope: str | None = field(default=None, metadata={"omit": True})

    @property
    def is_raw(self) -> bool:
        """Return whether the piece is stored as raw words and not as a frame."""
        return self.stored == "raw"

    @property
    def is_dense(self) -> bool:
        """Return whether the piece is a dense stream and not a frame."""
        return self.stored == "dense"

    @property
    def description(self) -> str:
        """Return the kind of the piece, for messages."""
        return {"frame": "the frame", "raw": "what is stored raw", "dense": "the dense stream"}[self.stored]


@dataclass(frozen=True, kw_only=True)
class ArrayEntry(ArrayInfo, Record):
    """An array and its frames, in order."""

    json_keys = "name shape dtype array_dtype order raw_bytes=nbytes stored_bytes sha256 frames element=_element shared"

    #: SHA-256 of the raw bytes (little-endian words in memory order); None if there is no manifest.
    sha256: str | None
    #: Pieces that decode, concatenated, to the raw bytes.
    frames: tuple[FrameEntry, ...]
    #: Whether its frames may also belong to other arrays that have `shared` set.
    shared: bool = field(default=False, metadata={"omit": True})

    @property
    def stored_bytes(self) -> int:
        """Return the number of bytes of all frames of the array."""
        return sum(frame.bytes for frame in self.frames)

    @property
    @json_key("element", omit=True)
    def _element(self) -> str | None:
        return self.element if self.element and self.itemsize == 1 else None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The arrays that a set of frames contains, and what produced the frames."""

    __repr__ = format_fields

    kvmnn_version: str
    zstd_version: str
    zstd_byte_exact: bool
    #: Options of frames, used again where dense streams are encoded back to frames; None and empty if there are only
    #: dense streams and no options were specified.
    effort: str | None
    codecs: tuple[str, ...]
    predictors: tuple[str, ...]
    #: Predictors of the high bytes; None if equal to `predictors`.
    hi_predictors: tuple[str, ...] | None
    arrays: tuple[ArrayEntry, ...]
    #: Text that came with the arrays (``__metadata__`` of a ``.safetensors`` file).
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def schema_version(self) -> int:
        """Return the lowest version of the schema that can express this manifest."""
        return max(SCHEMA_VERSION_BY_KIND[frame.stored] for array in self.arrays for frame in array.frames)

    @property
    def raw_bytes(self) -> int:
        """Return the raw bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def stored_bytes(self) -> int:
        """Return the number of bytes of all frames."""
        return sum(array.stored_bytes for array in self.arrays)

    @property
    def packed_record(self) -> PackedRecord | None:
        """Return the packed files that the frames were made from; None if they were made from other inputs."""
        return parse_packed_record(self.metadata, "manifest")

    @property
    def token_arrays(self) -> tuple[ArrayEntry, ...]:
        """Return the arrays of tokens, without those that contain only the unused regions of packed files."""
        record = self.packed_record
        return tuple(array for array in self.arrays if record is None or array.name not in record.unused_names)

    @property
    def unused_arrays(self) -> tuple[ArrayEntry, ...]:
        """Return the arrays that contain no tokens, only the unused regions of packed files."""
        record = self.packed_record
        return tuple(array for array in self.arrays if record is not None and array.name in record.unused_names)

    @property
    def rope(self) -> str | None:
        """Return the RoPE parameters of K of dense streams in the form of ``--rope``; None if unspecified.

        Parameters that differ between layers are separated by semicolons.
        """
        rope_texts = dict.fromkeys(frame.rope for array in self.arrays for frame in array.frames if frame.rope)
        return "; ".join(rope_texts) or None


def describe_unused_arrays(manifest: Manifest) -> list[str]:
    """Return sentences about the bytes of packed files outside live tokens: which are stored and which are not."""
    unused_arrays, record = manifest.unused_arrays, manifest.packed_record
    notes = []
    states = record.states if record else frozenset()
    state_and_room_arrays = (
        [array for array in unused_arrays if array.name in states],
        [array for array in unused_arrays if array.name not in states],
    )
    for arrays, describe in zip(state_and_room_arrays, (describe_states, describe_unused_regions), strict=True):
        if arrays:
            sizes = sum(array.nbytes for array in arrays), sum(array.stored_bytes for array in arrays)
            notes.append(describe(*sizes, len(arrays)))
    if record is not None and record.left_out:
        notes.append(f"not all of the packed files is kept: {record.left_out}")
    return notes


class SizeStats(Record):
    """The sizes of a result that has a manifest."""

    manifest: Manifest

    @property
    def raw_bytes(self) -> int:
        """Return the number of bytes of all arrays, except those with the unused regions of packed files."""
        return sum(array.nbytes for array in self.manifest.token_arrays)

    @property
    def stored_bytes(self) -> int:
        """Return the number of bytes of their frames."""
        return sum(array.stored_bytes for array in self.manifest.token_arrays)

    @property
    def valid_bytes(self) -> int:
        """Return the number of bytes of all arrays without unused capacity after the valid tokens."""
        return self.raw_bytes

    @property
    def ratio(self) -> float:
        """Return valid bytes divided by stored bytes; unused capacity after the valid tokens is excluded."""
        return compute_ratio(self.valid_bytes, self.stored_bytes)

    @property
    def ratio_text(self) -> str:
        """Return the ratio as text, with its reference bytes if these are not all bytes."""
        return format_ratio(self.raw_bytes, self.valid_bytes, self.stored_bytes)


def format_ratio(raw_bytes: int, valid_bytes: int, stored_bytes: int) -> str:
    """Return a ratio as text, with its reference bytes if these are not all bytes."""
    basis_text = f" of {valid_bytes:,} valid bytes" if valid_bytes != raw_bytes else ""
    return f"ratio {compute_ratio(valid_bytes, stored_bytes):.4f}{basis_text}"


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as a JSON document."""
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
        "arrays": [array.to_dict() for array in manifest.arrays],
    }
    return (json.dumps(document, indent=1) + "\n").encode()


class ChunkCounts(NamedTuple):
    """Numbers of frames, dense streams and raw pieces that arrays are stored in."""

    frames: int
    dense_streams: int
    raw_pieces: int


def count_chunks(arrays: Sequence[ArrayEntry]) -> ChunkCounts:
    """Count the frames, dense streams and raw pieces of the arrays."""
    entries = [frame for array in arrays for frame in array.frames]
    num_dense, num_raw = sum(frame.is_dense for frame in entries), sum(frame.is_raw for frame in entries)
    return ChunkCounts(len(entries) - num_dense - num_raw, num_dense, num_raw)


def describe_storage(arrays: Sequence[ArrayEntry]) -> str:
    """Describe how arrays are stored: ``"3 frames"``, ``"2 dense streams, 1 frame"``, ``"stored: raw"``."""
    num_frames, num_dense, num_raw = count_chunks(arrays)
    if not num_frames + num_dense:
        return "stored: raw"
    count_texts = [
        pluralize(number, noun) for number, noun in ((num_dense, "dense stream"), (num_frames, "frame")) if number
    ]
    return ", ".join([*count_texts, f"{pluralize(num_raw, 'piece')} stored: raw"] if num_raw else count_texts)


MAX_MANIFEST_BYTES = 256 << 20
_MIN_FRAME_BYTES = 14
_AXIS_ORDERS: Final[tuple[Axes, ...]] = ("htd", "thd")
_ARRAY_DTYPE_REGEX = declare_pattern(r"[<>|][fiuV][124]")


def load_manifest(path: Path) -> Manifest:
    """Read and check a manifest file."""
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
    """Parse a manifest from JSON; `where` is the prefix of error messages, which are those of `load_manifest`."""
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
    """Refuse overlapping frames unless they are declared as shared: a small file could stand for many arrays."""
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
    """Read the type of codes of an array that contains codes."""
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
    """Return the storage kind of a byte range; refuse kinds that readers of an older version would take for a frame."""
    if "stored" not in node.value:
        return "frame"
    kind_node = node.get("stored")
    for kind, first_version in SCHEMA_VERSION_BY_KIND.items():
        if kind_node.value == kind:
            if version < first_version:
                raise kind_node.error(f"'frame': only version {first_version} of the schema has {kind!r}")
            return kind
    raise kind_node.error(" or ".join(map(repr, SCHEMA_VERSION_BY_KIND)))
