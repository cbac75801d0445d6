"""What a manifest notes down of packed files: their hashes, and which arrays hold their bytes besides live rows.

It is the text under the key ``kvmnn.packed_files`` of the manifest's metadata (docs/prefix-cache.md).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, Literal

from ..arrays.source import PACKED_FILES_KEY
from ..dtypes import PARTS, Part
from ..errors import ManifestError
from ..files.json_document import JsonReader, parse_document
from ..text import pluralize

PACKED_FILES_SCHEMA: Final = "kvmnn-packed-files"
PACKED_FILES_SCHEMA_VERSION: Final = 1
MAX_PACKED_FILES_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class PackedFileEntry:
    """A packed file.

    Parameters
    ----------
    layer, part
        What it is K or V of.
    nbytes, sha256
        Of the file.
    room
        Name of the array that has all bytes of the file, those of live rows zero; None where they are all zero.
    is_state
        Whether the file holds no K or V, but state of another kind, all of it in `room`.
    """

    layer: int
    part: Part
    nbytes: int
    sha256: str
    room: str | None
    is_state: bool = False


@dataclass(frozen=True)
class PackedRecord:
    """The packed files that frames were made from.

    Parameters
    ----------
    files
        K and V of each layer by turns.
    left_out
        What of the files is not in the frames, as a sentence; empty where they are all there.
    """

    files: tuple[PackedFileEntry, ...]
    left_out: str = ""

    @property
    def unused_names(self) -> frozenset[str]:
        """Names of the arrays that hold no tokens."""
        return frozenset(entry.room for entry in self.files if entry.room is not None)

    @property
    def states(self) -> frozenset[str]:
        """Names of the arrays with files that hold state of another kind than K and V."""
        return frozenset(entry.room for entry in self.files if entry.is_state and entry.room is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.nbytes for entry in self.files)

    def find_difference(self, other_record: PackedRecord) -> str | None:
        """Where other files differ from these, in words; None where they do not."""
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
    """How much is kept of packed files besides tokens, as a sentence."""
    return (
        f"{pluralize(num_files, 'packed file')} with rows or padding that belong to no live token: {unused_bytes:,} "
        f"bytes are "
        f"kept apart in {stored_bytes:,}, so that decode writes the same files"
    )


def describe_states(state_bytes: int, stored_bytes: int, files: int) -> str:
    """How much is kept of the files of layers without K and V, as a sentence."""
    return (
        f"{pluralize(files, 'file')} of layers without K and V: {state_bytes:,} bytes of state are kept apart in "
        f"{stored_bytes:,}, so that decode writes the same files"
    )


def name_state(layer: int, part: Part) -> str:
    """Name of the array with the state that a file holds in the place of K or V; no name of K or V."""
    return f"layer_{layer}.{part}state"


def format_unused_name(layer: int, part: Part) -> str:
    """Name of the array with what a packed file holds besides live rows; no name of K or V."""
    return f"layer_{layer}.{part}room"


def dump_packed_record(record: PackedRecord) -> str:
    """The record as JSON text."""
    files = [{**vars(entry), "bytes": entry.nbytes} for entry in record.files]
    for entry in files:
        del entry["nbytes"]
        if not entry["is_state"]:  # as before there were any
            del entry["is_state"]
    document = {
        "schema": PACKED_FILES_SCHEMA,
        "schema_version": PACKED_FILES_SCHEMA_VERSION,
        "files": files,
        "left_out": record.left_out,
    }
    return json.dumps(document)


def parse_packed_record(metadata: dict[str, str], where: str) -> PackedRecord | None:
    """The record in metadata; None where there is none.

    Raises
    ------
    ManifestError
        When it is malformed; `where` begins the message.
    """
    text = metadata.get(PACKED_FILES_KEY)
    if text is None:
        return None
    root = parse_document(text, f"{where}: metadata {PACKED_FILES_KEY!r}", MAX_PACKED_FILES_BYTES)
    root.check_schema(PACKED_FILES_SCHEMA, PACKED_FILES_SCHEMA_VERSION)
    files = tuple(_parse_file_entry(node) for node in root.get("files").read_list(min_len=1))
    if any(entry.is_state and entry.room is None for entry in files):
        raise ManifestError(f"{where}: metadata {PACKED_FILES_KEY!r}: a file of state has no array")
    unused_names = [entry.room for entry in files if entry.room is not None]
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
        room=None if room_node.value is None else room_node.read_str(),
        is_state=node.get("is_state").read_bool() if "is_state" in node.value else False,
    )
