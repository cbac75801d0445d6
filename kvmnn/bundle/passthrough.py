"""Files that a bundle stores whole: the manifest's record of how a file is reassembled from arrays and other bytes.

The record is text under the key ``kvmnn.file`` of the manifest's metadata (docs/other-engines.md). Sidecars, the files
next to the arrays of a folder, are recorded as JSON under `SIDECAR_KEY` of the metadata of manifests and array files
(docs/manifest.md).
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import field
from itertools import accumulate, takewhile
from typing import Any, Final

from .._util.dataclass import dataclass
from ..arrays.source import FILE_KEY, SIDECAR_KEY
from ..errors import ManifestError
from ..files import file_names
from ..files.schema import JsonReader, parse_document
from . import manifest
from .manifest import Manifest

PASSTHROUGH_SCHEMA: Final = "kvmnn-file"
PASSTHROUGH_SCHEMA_VERSION: Final = 1
MAX_PASSTHROUGH_BYTES = 256 << 20
"""Limit of the document's size, and of all literal bytes."""
_MAX_BEST_COMPRESSION_BYTES = 1 << 20


@dataclass(frozen=True)
class FilePart:
    """Consecutive bytes of the file: literal, or rows of arrays."""

    #: Number of bytes.
    nbytes: int
    #: Literal bytes; empty if arrays supply them.
    raw: bytes = b""
    #: Names of arrays and the bytes of their rows, which alternate; a single array supplies all its bytes.
    arrays: tuple[tuple[str, int], ...] = ()

    @property
    def num_rows(self) -> int:
        """Return the number of rows of each array."""
        return self.nbytes // sum(nbytes for _, nbytes in self.arrays)


@dataclass(frozen=True, kw_only=True)
class PassthroughFile:
    """A file that is stored whole."""

    #: Name of the format that reads it.
    format: str
    #: Original file name, without folders.
    name: str
    #: Size of the file.
    nbytes: int
    sha256: str
    #: Parts of the file, in order.
    parts: tuple[FilePart, ...]
    #: Number of KV heads of each layer, if the user specified it because the file does not.
    kv_heads: tuple[int, ...] | None = None
    #: Bytes of its arrays that are unused capacity after the valid tokens.
    unused_bytes: int = 0
    #: Number in the model of each of its layers, if the user specified it because the file does not.
    layer_numbers: tuple[int, ...] | None = None
    #: Unused capacity in bytes by array name; files from before the first release lack it.
    unused_bytes_by_array: Mapping[str, int] = field(default_factory=dict)
    _part_ends: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_part_ends", tuple(accumulate(part.nbytes for part in self.parts)))

    def find_part(self, offset: int) -> tuple[FilePart, int]:
        """Return the part that contains the byte at `offset`, and the offset at which the part begins."""
        index = bisect_right(self._part_ends, offset)
        return self.parts[index], self._part_ends[index] - self.parts[index].nbytes

    def find_difference(self, other_file: PassthroughFile) -> str | None:
        """Describe the first difference from another file of the same arrays; None if there is none."""
        for part, other_part, end in zip(self.parts, other_file.parts, self._part_ends, strict=False):
            if part != other_part:
                equal_bytes = takewhile(lambda pair: pair[0] == pair[1], zip(part.raw, other_part.raw, strict=False))
                return (
                    f"the file differs from byte {end - part.nbytes + sum(1 for _ in equal_bytes):,} on, outside of "
                    f"its arrays"
                )
        if self.nbytes != other_file.nbytes:
            return f"the file has {other_file.nbytes:,} bytes, not {self.nbytes:,}"
        return (
            None
            if self.sha256 == other_file.sha256
            else f"the file has the sha256 {other_file.sha256}, not {self.sha256}"
        )


def describe_passthrough(bundle_manifest: Manifest, where: str) -> list[str]:
    """Return lines about what qualifies the ratio of a bundle with a whole file; empty without one."""
    passthrough = parse_passthrough(bundle_manifest.metadata, where)
    if passthrough is None:
        return []
    bundle_bytes = count_bundle_bytes(bundle_manifest)
    size_text = f"frames and manifest have {bundle_bytes:,} bytes, the file has {passthrough.nbytes:,}, which is less"
    return describe_unused_bytes(passthrough, bundle_manifest) + (
        [size_text] if bundle_bytes > passthrough.nbytes else []
    )


def describe_unused_bytes(passthrough: PassthroughFile, bundle_manifest: Manifest) -> list[str]:
    """Return a line about the unused capacity in the arrays; empty if there is none."""
    sentence = (
        f"{passthrough.unused_bytes:,} of the {bundle_manifest.raw_bytes:,} bytes are room after the valid tokens"
    )
    return [sentence] if passthrough.unused_bytes else []


def count_valid_bytes(bundle_manifest: Manifest) -> int:
    """Return the raw bytes of all arrays without unused capacity after the valid tokens."""
    passthrough = parse_passthrough(bundle_manifest.metadata, "frames")
    num_token_bytes = sum(array.nbytes for array in bundle_manifest.token_arrays)
    return max(num_token_bytes - (passthrough.unused_bytes if passthrough else 0), 0)


def count_valid_bytes_by_array(bundle_manifest: Manifest) -> dict[str, int]:
    """Return the raw bytes of each array without unused capacity after the valid tokens."""
    passthrough = parse_passthrough(bundle_manifest.metadata, "frames")
    unused_bytes_by_array = passthrough.unused_bytes_by_array if passthrough else {}
    unused_fraction = (
        0.0
        if unused_bytes_by_array or passthrough is None or not bundle_manifest.raw_bytes
        else min(passthrough.unused_bytes / bundle_manifest.raw_bytes, 1)
    )
    return {
        array.name: max(
            array.nbytes
            - (
                unused_bytes_by_array.get(array.name, 0)
                if unused_bytes_by_array
                else int(unused_fraction * array.nbytes)
            ),
            0,
        )
        for array in bundle_manifest.arrays
    }


def count_bundle_bytes(bundle_manifest: Manifest) -> int:
    """Return the number of bytes of the frames and the manifest of a bundle together."""
    return bundle_manifest.stored_bytes + len(manifest.dump_manifest(bundle_manifest))


def dump_passthrough(passthrough: PassthroughFile) -> str:
    """Return the record as one line of JSON."""
    document: dict[str, Any] = {
        "schema": PASSTHROUGH_SCHEMA,
        "schema_version": PASSTHROUGH_SCHEMA_VERSION,
        "format": passthrough.format,
        "name": passthrough.name,
        "bytes": passthrough.nbytes,
        "sha256": passthrough.sha256,
        "kv_heads": None if passthrough.kv_heads is None else list(passthrough.kv_heads),
        **({"room_bytes": passthrough.unused_bytes} if passthrough.unused_bytes else {}),
        **({"array_room": dict(passthrough.unused_bytes_by_array)} if passthrough.unused_bytes_by_array else {}),
        **({"layer_numbers": list(passthrough.layer_numbers)} if passthrough.layer_numbers is not None else {}),
        "parts": [_part_document(part) for part in passthrough.parts],
    }
    return json.dumps(document, separators=(",", ":"))


def _part_document(part: FilePart) -> dict[str, Any]:
    if part.arrays:
        return {"bytes": part.nbytes, "arrays": [list(array_entry) for array_entry in part.arrays]}
    return build_raw_document(part.raw)


def build_raw_document(data: bytes) -> dict[str, Any]:
    """Return bytes as a JSON object, which `parse_raw_bytes` reads."""
    compressed = zlib.compress(data, 9 if len(data) <= _MAX_BEST_COMPRESSION_BYTES else 6)
    if len(compressed) < len(data):
        return {"bytes": len(data), "zlib": base64.b64encode(compressed).decode()}
    return {"bytes": len(data), "base64": base64.b64encode(data).decode()}


def parse_passthrough(metadata: dict[str, str], where: str) -> PassthroughFile | None:
    """Parse the record of a whole file in a manifest's metadata; None if there is none."""
    text = metadata.get(FILE_KEY)
    return None if text is None else _parse_passthrough_json(text, f"{where}: metadata {FILE_KEY!r}")


def _parse_passthrough_json(text: str, where: str) -> PassthroughFile:
    root = parse_document(text, where, MAX_PASSTHROUGH_BYTES)
    root.check_schema(PASSTHROUGH_SCHEMA, PASSTHROUGH_SCHEMA_VERSION)
    nodes = root.get("parts").read_list(min_len=1)
    if sum(node.get("bytes").read_int(1) for node in nodes if "arrays" not in node.value) > MAX_PASSTHROUGH_BYTES:
        raise root.get("parts").error(f"at most {MAX_PASSTHROUGH_BYTES} bytes that are no array's")
    heads = root.get("kv_heads")
    passthrough = PassthroughFile(
        format=root.get("format").read_str(),
        name=root.get("name").read_str(),
        nbytes=root.get("bytes").read_int(1),
        sha256=root.get("sha256").read_sha256(),
        parts=tuple(_parse_part(node) for node in nodes),
        kv_heads=None if heads.value is None else tuple(item.read_int(1) for item in heads.read_list()),
        unused_bytes=root.get("room_bytes").read_int(0) if "room_bytes" in root.value else 0,
        layer_numbers=_parse_layer_numbers(root),
        unused_bytes_by_array=_parse_unused_bytes_by_array(root),
    )
    if sum(part.nbytes for part in passthrough.parts) != passthrough.nbytes:
        raise root.get("bytes").error("the sum of the parts")
    return passthrough


def _parse_unused_bytes_by_array(root: JsonReader) -> dict[str, int]:
    if "array_room" not in root.value:
        return {}
    node = root.get("array_room")
    if not isinstance(node.value, dict):
        raise node.error("bytes by the names of arrays")
    return {name: node.get(name).read_int(0) for name in node.value}


def _parse_layer_numbers(root: JsonReader) -> tuple[int, ...] | None:
    if "layer_numbers" not in root.value:
        return None
    node = root.get("layer_numbers")
    numbers = tuple(item.read_int(0) for item in node.read_list())
    if len(set(numbers)) < len(numbers):
        raise node.error("numbers of layers, each once")
    return numbers


def _parse_part(node: JsonReader) -> FilePart:
    nbytes = node.get("bytes").read_int(1)
    if "arrays" in node.value:
        arrays = tuple(_parse_interleaved_array(item) for item in node.get("arrays").read_list(min_len=1, max_len=8))
        if nbytes % sum(num_array_bytes for _, num_array_bytes in arrays):
            raise node.get("bytes").error("a multiple of what the arrays give by turns")
        return FilePart(nbytes, arrays=arrays)
    return FilePart(nbytes, parse_raw_bytes(node, MAX_PASSTHROUGH_BYTES))


def parse_raw_bytes(node: JsonReader, max_bytes: int) -> bytes:
    """Return the bytes in a JSON object of `build_raw_document`; `ManifestError` if malformed or above the limit."""
    nbytes = node.get("bytes").read_int(0)
    if nbytes > max_bytes:
        raise node.get("bytes").error(f"at most {max_bytes}")
    data = _decompress_zlib(node.get("zlib"), nbytes) if "zlib" in node.value else _decode_base64(node.get("base64"))
    if len(data) != nbytes:
        raise node.get("bytes").error(f"{len(data)}, as its bytes are")
    return data


def _parse_interleaved_array(node: JsonReader) -> tuple[str, int]:
    name, nbytes = node.read_list(min_len=2, max_len=2)
    return name.read_str(), nbytes.read_int(1)


def _decode_base64(node: JsonReader) -> bytes:
    try:
        return base64.b64decode(node.read_str(), validate=True)
    except (binascii.Error, ValueError):
        raise node.error("base64") from None


def _decompress_zlib(node: JsonReader, nbytes: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(_decode_base64(node), nbytes + 1)
    except zlib.error:
        raise node.error("bytes that zlib made") from None


def check_covers_arrays(passthrough: PassthroughFile, arrays: dict[str, int], where: str) -> None:
    """Raise `ManifestError` unless the parts contain every array exactly once, with all its bytes."""
    remaining = dict(arrays)
    for part in passthrough.parts:
        for name, row_bytes in part.arrays:
            if remaining.pop(name, None) != row_bytes * part.num_rows:
                raise ManifestError(f"{where}: metadata {FILE_KEY!r}: does not fit the array {name!r:.200}")
    if remaining:
        raise ManifestError(f"{where}: metadata {FILE_KEY!r}: has no place for the array {min(remaining)!r:.200}")


SIDECAR_SCHEMA: Final = "kvmnn-beside"
SIDECAR_SCHEMA_VERSION: Final = 1
SIDECAR_NAMES: Final = file_names.SIDECAR_FILES
POSITIONS_NAME, TOKEN_IDS_NAME = SIDECAR_NAMES
"""Names of the only sidecars that are read and written."""
MAX_SIDECAR_BYTES = 16 << 20
"""Maximum size of a sidecar."""


def dump_sidecars(files: Mapping[str, bytes]) -> str:
    """Return sidecars, bytes by file name, as one line of JSON."""
    document = {name: build_raw_document(data) for name, data in files.items()}
    return json.dumps(
        {"schema": SIDECAR_SCHEMA, "schema_version": SIDECAR_SCHEMA_VERSION, "files": document}, separators=(",", ":")
    )


def parse_sidecars(metadata: Mapping[str, str], where: str) -> dict[str, bytes]:
    """Parse the sidecars in metadata, bytes by file name; empty if there are none."""
    text = metadata.get(SIDECAR_KEY)
    if text is None:
        return {}
    root = parse_document(text, f"{where}: metadata {SIDECAR_KEY!r}", 2 * len(SIDECAR_NAMES) * MAX_SIDECAR_BYTES)
    root.check_schema(SIDECAR_SCHEMA, SIDECAR_SCHEMA_VERSION)
    files = root.get("files")
    if not isinstance(files.value, dict) or not files.value.keys() <= set(SIDECAR_NAMES):
        raise files.error(f"files called {' or '.join(SIDECAR_NAMES)}")
    return {name: parse_raw_bytes(files.get(name), MAX_SIDECAR_BYTES) for name in SIDECAR_NAMES if name in files.value}


def remove_sidecar(metadata: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the metadata without one of the sidecars."""
    files = parse_sidecars(metadata, "metadata")
    files.pop(name, None)
    remaining_metadata = {key: text for key, text in metadata.items() if key != SIDECAR_KEY}
    return {**remaining_metadata, SIDECAR_KEY: dump_sidecars(files)} if files else remaining_metadata


def find_sidecar_difference(
    metadata: Mapping[str, str], where: str, other_metadata: Mapping[str, str], other_where: str
) -> str | None:
    """Describe the first difference between the sidecars in two sets of metadata; None if there is none."""
    own_files, other_files = parse_sidecars(metadata, where), parse_sidecars(other_metadata, other_where)
    name = next((name for name in SIDECAR_NAMES if own_files.get(name) != other_files.get(name)), None)
    if name is None:
        return None
    lacking = [location for location, files in ((where, own_files), (other_where, other_files)) if name not in files]
    return f"{name} is missing in {lacking[0]}" if lacking else f"{name} differs"
