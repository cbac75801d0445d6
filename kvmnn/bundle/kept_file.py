"""What a manifest notes down of a file that is kept whole: how it is put together again from arrays and other bytes.

It is the text under the key ``kvmnn.file`` of the manifest's metadata (docs/other-engines.md).
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any, Final

from ..arrays.source import FILE_KEY
from ..errors import ManifestError
from ..files.json_document import Node, parse
from . import manifest
from .manifest import Manifest

SCHEMA: Final = "kvmnn-file"
SCHEMA_VERSION: Final = 1
MAX_BYTES = 256 << 20
"""Of the document, and of all literal bytes."""
_MOST_CLOSELY = 1 << 20


@dataclass(frozen=True)
class Part:
    """A run of bytes of the file.

    Parameters
    ----------
    nbytes
        How many.
    literal
        The bytes, where they are no array's.
    arrays
        Names of arrays and how many bytes each gives by turns; one array gives all its bytes.
    """

    nbytes: int
    literal: bytes = b""
    arrays: tuple[tuple[str, int], ...] = ()

    @property
    def rows(self) -> int:
        """How often each array has its turn."""
        return self.nbytes // sum(nbytes for _, nbytes in self.arrays)


@dataclass(frozen=True, kw_only=True)
class KeptFile:
    """A file that is kept whole.

    Parameters
    ----------
    format
        What knows how to read it.
    name
        That it had, without folders.
    nbytes, sha256
        Of the file.
    parts
        All of it, in order.
    kv_heads
        Of each layer, where the file does not say them and somebody did.
    room_bytes
        Bytes of its arrays that are room behind the valid tokens, which frames hardly count.
    array_room
        The same of each array that has room, by its name; files of before the first release do not state it.
    layer_numbers
        The layer of the model that each of its layers is, where the file does not say it and somebody did.
    """

    format: str
    name: str
    nbytes: int
    sha256: str
    parts: tuple[Part, ...]
    kv_heads: tuple[int, ...] | None = None
    room_bytes: int = 0
    layer_numbers: tuple[int, ...] | None = None
    array_room: Mapping[str, int] = field(default_factory=dict)
    _ends: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", tuple(accumulate(part.nbytes for part in self.parts)))

    def part_at(self, offset: int) -> tuple[Part, int]:
        """The part that the byte at `offset` belongs to, and where that part begins."""
        number = bisect_right(self._ends, offset)
        return self.parts[number], self._ends[number] - self.parts[number].nbytes

    def difference(self, other: KeptFile) -> str | None:
        """Where another file of the same arrays differs from this one, in words; None where it does not."""
        for part, theirs, end in zip(self.parts, other.parts, self._ends, strict=False):
            if part != theirs:
                same = takewhile(lambda pair: pair[0] == pair[1], zip(part.literal, theirs.literal, strict=False))
                return (
                    f"the file differs from byte {end - part.nbytes + sum(1 for _ in same):,} on, outside of its arrays"
                )
        if self.nbytes != other.nbytes:
            return f"the file has {other.nbytes:,} bytes, not {self.nbytes:,}"
        return None if self.sha256 == other.sha256 else f"the file has the sha256 {other.sha256}, not {self.sha256}"


def notes_of(made: Manifest, where: str) -> list[str]:
    """What changes the meaning of the ratio of a bundle, in lines: nothing where no file is kept whole.

    Raises
    ------
    ManifestError
        As `kept_file`.
    """
    kept = kept_file(made.metadata, where)
    if kept is None:
        return []
    whole = whole_bytes(made)
    more = f"frames and manifest have {whole:,} bytes, the file has {kept.nbytes:,}, which is less"
    return describe_kept_room(kept, made) + ([more] if whole > kept.nbytes else [])


def describe_kept_room(kept: KeptFile, made: Manifest) -> list[str]:
    """How much of the arrays is room, where any is."""
    said = f"{kept.room_bytes:,} of the {made.raw_bytes:,} bytes are room behind the valid tokens"
    return [said] if kept.room_bytes else []


def valid_bytes(made: Manifest) -> int:
    """Return the raw bytes of all arrays without room behind the valid tokens."""
    kept = kept_file(made.metadata, "frames")
    contents = sum(array.nbytes for array in made.contents)
    return max(contents - (kept.room_bytes if kept else 0), 0)


def valid_bytes_by_array(made: Manifest) -> dict[str, int]:
    """Return the raw bytes of each array without room behind the valid tokens."""
    kept = kept_file(made.metadata, "frames")
    room = kept.array_room if kept else {}
    share = 0.0 if room or kept is None or not made.raw_bytes else min(kept.room_bytes / made.raw_bytes, 1)
    return {
        array.name: max(array.nbytes - (room.get(array.name, 0) if room else int(share * array.nbytes)), 0)
        for array in made.arrays
    }


def whole_bytes(made: Manifest) -> int:
    """Bytes of the frames and the manifest of a bundle together."""
    return made.stored_bytes + len(manifest.to_json(made))


def to_json(kept: KeptFile) -> str:
    """The document on one line."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "format": kept.format,
        "name": kept.name,
        "bytes": kept.nbytes,
        "sha256": kept.sha256,
        "kv_heads": None if kept.kv_heads is None else list(kept.kv_heads),
        **({"room_bytes": kept.room_bytes} if kept.room_bytes else {}),
        **({"array_room": dict(kept.array_room)} if kept.array_room else {}),
        **({"layer_numbers": list(kept.layer_numbers)} if kept.layer_numbers is not None else {}),
        "parts": [_part_document(part) for part in kept.parts],
    }
    return json.dumps(document, separators=(",", ":"))


def _part_document(part: Part) -> dict[str, Any]:
    if part.arrays:
        return {"bytes": part.nbytes, "arrays": [list(each) for each in part.arrays]}
    return literal_document(part.literal)


def literal_document(data: bytes) -> dict[str, Any]:
    """Bytes in a JSON document; `literal` reads them."""
    small = zlib.compress(data, 9 if len(data) <= _MOST_CLOSELY else 6)
    if len(small) < len(data):
        return {"bytes": len(data), "zlib": base64.b64encode(small).decode()}
    return {"bytes": len(data), "base64": base64.b64encode(data).decode()}


def kept_file(metadata: dict[str, str], where: str) -> KeptFile | None:
    """The file that a manifest's metadata describes; None where it describes none.

    Raises
    ------
    ManifestError
        When the description is malformed; `where` begins the message.
    """
    text = metadata.get(FILE_KEY)
    return None if text is None else _from_json(text, f"{where}: metadata {FILE_KEY!r}")


def _from_json(text: str, where: str) -> KeptFile:
    root = parse(text, where, MAX_BYTES)
    root.check_schema(SCHEMA, SCHEMA_VERSION)
    nodes = root.at("parts").items(least=1)
    if sum(node.at("bytes").integer(1) for node in nodes if "arrays" not in node.value) > MAX_BYTES:
        raise root.at("parts").wrong(f"at most {MAX_BYTES} bytes that are no array's")
    heads = root.at("kv_heads")
    kept = KeptFile(
        format=root.at("format").text(),
        name=root.at("name").text(),
        nbytes=root.at("bytes").integer(1),
        sha256=root.at("sha256").sha256(),
        parts=tuple(_part(node) for node in nodes),
        kv_heads=None if heads.value is None else tuple(each.integer(1) for each in heads.items()),
        room_bytes=root.at("room_bytes").integer(0) if "room_bytes" in root.value else 0,
        layer_numbers=_layer_numbers(root),
        array_room=_array_room(root),
    )
    if sum(part.nbytes for part in kept.parts) != kept.nbytes:
        raise root.at("bytes").wrong("the sum of the parts")
    return kept


def _array_room(root: Node) -> dict[str, int]:
    if "array_room" not in root.value:
        return {}
    node = root.at("array_room")
    if not isinstance(node.value, dict):
        raise node.wrong("bytes by the names of arrays")
    return {name: node.at(name).integer(0) for name in node.value}


def _layer_numbers(root: Node) -> tuple[int, ...] | None:
    if "layer_numbers" not in root.value:
        return None
    node = root.at("layer_numbers")
    numbers = tuple(each.integer(0) for each in node.items())
    if len(set(numbers)) < len(numbers):
        raise node.wrong("numbers of layers, each once")
    return numbers


def _part(node: Node) -> Part:
    nbytes = node.at("bytes").integer(1)
    if "arrays" in node.value:
        arrays = tuple(_turn(each) for each in node.at("arrays").items(least=1, most=8))
        if nbytes % sum(turn for _, turn in arrays):
            raise node.at("bytes").wrong("a multiple of what the arrays give by turns")
        return Part(nbytes, arrays=arrays)
    return Part(nbytes, literal(node, MAX_BYTES))


def literal(node: Node, max_bytes: int) -> bytes:
    """Bytes that `literal_document` put into a JSON document; `ManifestError` for others, and for more."""
    nbytes = node.at("bytes").integer(0)
    if nbytes > max_bytes:
        raise node.at("bytes").wrong(f"at most {max_bytes}")
    data = _zlib(node.at("zlib"), nbytes) if "zlib" in node.value else _base64(node.at("base64"))
    if len(data) != nbytes:
        raise node.at("bytes").wrong(f"{len(data)}, as its bytes are")
    return data


def _turn(node: Node) -> tuple[str, int]:
    name, nbytes = node.items(least=2, most=2)
    return name.text(), nbytes.integer(1)


def _base64(node: Node) -> bytes:
    try:
        return base64.b64decode(node.text(), validate=True)
    except (binascii.Error, ValueError):
        raise node.wrong("base64") from None


def _zlib(node: Node, nbytes: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(_base64(node), nbytes + 1)
    except zlib.error:
        raise node.wrong("bytes that zlib made") from None


def check_fits(kept: KeptFile, arrays: dict[str, int], where: str) -> None:
    """`ManifestError` unless the parts take every array once, with the bytes that it has."""
    left = dict(arrays)
    for part in kept.parts:
        for name, turn in part.arrays:
            if left.pop(name, None) != turn * part.rows:
                raise ManifestError(f"{where}: metadata {FILE_KEY!r}: does not fit the array {name!r:.200}")
    if left:
        raise ManifestError(f"{where}: metadata {FILE_KEY!r}: has no place for the array {min(left)!r:.200}")
