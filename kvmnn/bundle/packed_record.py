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
from ..files.json_document import Node, parse
from ..text import count

SCHEMA: Final = "kvmnn-packed-files"
SCHEMA_VERSION: Final = 1
MAX_BYTES = 64 << 20


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
    def rooms(self) -> frozenset[str]:
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

    def difference(self, other: PackedRecord) -> str | None:
        """Where other files differ from these, in words; None where they do not."""
        for one, its in zip(self.files, other.files, strict=False):
            if (one.layer, one.part, one.nbytes, one.sha256) != (its.layer, its.part, its.nbytes, its.sha256):
                return f"the file of layer {one.layer}'s {one.part}s is not the one that was encoded"
        return None if len(self.files) == len(other.files) else f"there are {len(other.files)} files"


def describe_room(room_bytes: int, stored_bytes: int, files: int) -> str:
    """How much is kept of packed files besides tokens, as a sentence."""
    return (
        f"{count(files, 'packed file')} with rows or padding that belong to no live token: {room_bytes:,} bytes are "
        f"kept apart in {stored_bytes:,}, so that decode writes the same files"
    )


def describe_states(state_bytes: int, stored_bytes: int, files: int) -> str:
    """How much is kept of the files of layers without K and V, as a sentence."""
    return (
        f"{count(files, 'file')} of layers without K and V: {state_bytes:,} bytes of state are kept apart in "
        f"{stored_bytes:,}, so that decode writes the same files"
    )


def name_state(layer: int, part: Part) -> str:
    """Name of the array with the state that a file holds in the place of K or V; no name of K or V."""
    return f"layer_{layer}.{part}state"


def name_room(layer: int, part: Part) -> str:
    """Name of the array with what a packed file holds besides live rows; no name of K or V."""
    return f"layer_{layer}.{part}room"


def to_json(record: PackedRecord) -> str:
    """The record as JSON text."""
    files = [{**vars(entry), "bytes": entry.nbytes} for entry in record.files]
    for entry in files:
        del entry["nbytes"]
        if not entry["is_state"]:  # as before there were any
            del entry["is_state"]
    document = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "files": files, "left_out": record.left_out}
    return json.dumps(document)


def packed_record(metadata: dict[str, str], where: str) -> PackedRecord | None:
    """The record in metadata; None where there is none.

    Raises
    ------
    ManifestError
        When it is malformed; `where` begins the message.
    """
    text = metadata.get(PACKED_FILES_KEY)
    if text is None:
        return None
    root = parse(text, f"{where}: metadata {PACKED_FILES_KEY!r}", MAX_BYTES)
    root.check_schema(SCHEMA, SCHEMA_VERSION)
    files = tuple(_entry(node) for node in root.at("files").items(least=1))
    if any(entry.is_state and entry.room is None for entry in files):
        raise ManifestError(f"{where}: metadata {PACKED_FILES_KEY!r}: a file of state has no array")
    rooms = [entry.room for entry in files if entry.room is not None]
    if len(rooms) != len(set(rooms)):
        raise ManifestError(f"{where}: metadata {PACKED_FILES_KEY!r}: two files have the same room")
    return PackedRecord(files, root.at("left_out").text())


def _entry(node: Node) -> PackedFileEntry:
    part: Literal["key", "value"] | None = next((each for each in PARTS if each == node.at("part").text()), None)
    if part is None:
        raise node.at("part").wrong(f"one of {', '.join(PARTS)}")
    room = node.at("room")
    return PackedFileEntry(
        layer=node.at("layer").integer(0),
        part=part,
        nbytes=node.at("bytes").integer(1),
        sha256=node.at("sha256").sha256(),
        room=None if room.value is None else room.text(),
        is_state=node.at("is_state").boolean() if "is_state" in node.value else False,
    )
