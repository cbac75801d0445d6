"""The manifest: what a set of frames holds, so that the same arrays can be restored and proved.

Version 1; version 2 where arrays are stored raw, version 3 where some are dense streams: an older reader would take
those for frames. Readers refuse other versions and ignore keys they do not know, so that later releases may add keys
within a version but never change the meaning of one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from ..arrays.named_array import ArrayInfo
from ..files.names import FRAME_SUFFIX as FRAME_SUFFIX
from ..files.names import SIDECAR_SUFFIX as SIDECAR_SUFFIX
from ..text import compute_ratio, pluralize
from .packed_record import PackedRecord, describe_states, describe_unused_regions, parse_packed_record

SCHEMA: Final = "kvmnn-manifest"
SCHEMA_VERSION: Final = 1
RAW_SCHEMA_VERSION: Final = 2
"""Of a manifest that lists words stored raw."""
DENSE_SCHEMA_VERSION: Final = 3
"""Of a manifest that lists dense streams."""
MANIFEST_NAME: Final = "manifest.json"

StorageKind = Literal["frame", "raw", "dense"]
Axes = Literal["htd", "thd"]
"""Heads before tokens, or tokens before heads, and then the words of a head."""
SCHEMA_VERSION_BY_KIND: Final[dict[StorageKind, int]] = {
    "frame": SCHEMA_VERSION,
    "raw": RAW_SCHEMA_VERSION,
    "dense": DENSE_SCHEMA_VERSION,
}
"""Which version of the schema first had each."""


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
    rope
        Of a dense stream of K: how it was said to be rotated, as ``--rope`` takes it; None where nobody said.
    """

    file: str
    offset: int
    bytes: int
    raw_bytes: int
    sha256: str | None
    stored: StorageKind = "frame"
    axes: Axes | None = None
    rope: str | None = None

    @property
    def is_raw(self) -> bool:
        """Whether the words themselves are stored, not a frame of them."""
        return self.stored == "raw"

    @property
    def is_dense(self) -> bool:
        """Whether it is a dense stream, not a frame."""
        return self.stored == "dense"

    @property
    def description(self) -> str:
        """What lies there, for messages."""
        return {"frame": "the frame", "raw": "what is stored raw", "dense": "the dense stream"}[self.stored]

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; `stored` only where it is not a frame, as version 1 of the schema has no such key."""
        document = dict(vars(self))
        if self.stored == "frame":
            del document["stored"]
        for key in ("axes", "rope"):
            if document[key] is None:
                del document[key]
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
    effort, codecs, predictors
        Of frames, and what they are made with where dense streams become such again; None and none where there are
        dense streams alone, of which nothing of that was said.
    hi_predictors
        None where they are those of `predictors`.
    """

    kvmnn_version: str
    zstd_version: str
    zstd_byte_exact: bool
    effort: str | None
    codecs: tuple[str, ...]
    predictors: tuple[str, ...]
    hi_predictors: tuple[str, ...] | None
    arrays: tuple[ArrayEntry, ...]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def schema_version(self) -> int:
        """The lowest version of the schema that can say all this."""
        return max(SCHEMA_VERSION_BY_KIND[frame.stored] for array in self.arrays for frame in array.frames)

    @property
    def raw_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(array.stored_bytes for array in self.arrays)

    @property
    def packed_record(self) -> PackedRecord | None:
        """The packed files that the frames were made from; None where they were not."""
        return parse_packed_record(self.metadata, "manifest")

    @property
    def token_arrays(self) -> tuple[ArrayEntry, ...]:
        """The arrays without those that hold no tokens, but the other bytes of packed files."""
        record = self.packed_record
        return tuple(array for array in self.arrays if record is None or array.name not in record.unused_names)

    @property
    def unused_arrays(self) -> tuple[ArrayEntry, ...]:
        """The arrays that hold no tokens, but the other bytes of packed files."""
        record = self.packed_record
        return tuple(array for array in self.arrays if record is not None and array.name in record.unused_names)

    @property
    def rope(self) -> str | None:
        """How K of dense streams was said to be rotated, as ``--rope`` takes it; None where nobody said.

        Where layers differ, each way once, with semicolons between them.
        """
        rope_texts = dict.fromkeys(frame.rope for array in self.arrays for frame in array.frames if frame.rope)
        return "; ".join(rope_texts) or None


def describe_unused_arrays(manifest: Manifest) -> list[str]:
    """What is kept of packed files besides tokens, and what is not, as sentences."""
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


class SizeStats:
    """The sizes of a result that has a manifest."""

    manifest: Manifest

    @property
    def raw_bytes(self) -> int:
        """Bytes of all arrays, but of those with the room of packed files."""
        return sum(array.nbytes for array in self.manifest.token_arrays)

    @property
    def stored_bytes(self) -> int:
        """Bytes of their frames."""
        return sum(array.stored_bytes for array in self.manifest.token_arrays)

    @property
    def valid_bytes(self) -> int:
        """Bytes of all arrays without room behind the valid tokens."""
        return self.raw_bytes

    @property
    def ratio(self) -> float:
        """Valid over stored bytes: room behind the valid tokens takes next to nothing and does not count."""
        return compute_ratio(self.valid_bytes, self.stored_bytes)

    @property
    def ratio_text(self) -> str:
        """The ratio for people, and of what it is where that is not all bytes."""
        return format_ratio(self.raw_bytes, self.valid_bytes, self.stored_bytes)


def format_ratio(raw_bytes: int, valid_bytes: int, stored_bytes: int) -> str:
    """Return a ratio for people, and of what it is where that is not all bytes."""
    basis_text = f" of {valid_bytes:,} valid bytes" if valid_bytes != raw_bytes else ""
    return f"ratio {compute_ratio(valid_bytes, stored_bytes):.4f}{basis_text}"


def dump_manifest(manifest: Manifest) -> bytes:
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
        **({"element": array.element} if array.element and array.itemsize == 1 else {}),
        **({"shared": True} if array.shared else {}),
    }


class ChunkCounts(NamedTuple):
    """How many pieces of each kind arrays are stored in."""

    frames: int
    dense_streams: int
    raw_pieces: int


def count_chunks(arrays: Sequence[ArrayEntry]) -> ChunkCounts:
    """How many pieces of each kind there are."""
    entries = [frame for array in arrays for frame in array.frames]
    num_dense, num_raw = sum(frame.is_dense for frame in entries), sum(frame.is_raw for frame in entries)
    return ChunkCounts(len(entries) - num_dense - num_raw, num_dense, num_raw)


def describe_storage(arrays: Sequence[ArrayEntry]) -> str:
    """How arrays are stored, for people: ``"3 frames"``, ``"2 dense streams, 1 frame"``, ``"stored: raw"``."""
    num_frames, num_dense, num_raw = count_chunks(arrays)
    if not num_frames + num_dense:
        return "stored: raw"
    count_texts = [
        pluralize(number, noun) for number, noun in ((num_dense, "dense stream"), (num_frames, "frame")) if number
    ]
    return ", ".join([*count_texts, f"{pluralize(num_raw, 'piece')} stored: raw"] if num_raw else count_texts)
