"""The metadata of a weight file: bytes between header and blocks, which loaders skip and the format says nothing about.

kvmnn writes a JSON object of texts there, and takes whatever others wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...errors import KvmnnError, ManifestError
from ...files.json_document import parse_document

_ALIGNMENT_BYTES = 4
"""Blanks fill the JSON up to a multiple of this, so that the words of fp32 weights lie where they would without it."""

_MAX_JSON_BYTES = 1 << 20
"""Bytes of the largest metadata that is looked at as JSON."""


def pack_metadata(entries: Mapping[str, str] | bytes) -> bytes:
    """The bytes that hold `entries`, in their order; none for none. Bytes stay what they are.

    Raises
    ------
    KvmnnError
        For what is no text, or text that UTF-8 cannot hold.
    """
    if isinstance(entries, bytes):
        return entries
    if not entries:
        return b""
    for value in (*entries, *entries.values()):
        if not isinstance(value, str):
            raise KvmnnError(f"metadata {value!a} is no text")
    try:
        text = json.dumps(dict(entries), ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise KvmnnError(f"metadata {error.object!a:.80} is no UTF-8 text") from error
    return text + b" " * (-len(text) % _ALIGNMENT_BYTES)


def unpack_metadata(metadata: bytes) -> dict[str, str] | None:
    """The entries, where the bytes are a JSON object of texts; None where they are anything else."""
    if not metadata.startswith(b"{"):
        return None
    try:
        return parse_document(metadata, "metadata", _MAX_JSON_BYTES).read_str_map()
    except (ManifestError, RecursionError):
        return None


def describe_metadata_differences(actual: bytes, expected: bytes) -> list[str]:
    """How metadata differs from what it should be: by key where both are JSON objects; none if it does not.

    The order of the keys is no difference.
    """
    if actual == expected:
        return []
    actual_entries, expected_entries = unpack_metadata(actual or b"{}"), unpack_metadata(expected or b"{}")
    if actual_entries is None or expected_entries is None:
        return [f"metadata is {format_metadata(actual)}: expected {format_metadata(expected)}"]
    if actual_entries == expected_entries and pack_metadata(actual_entries) == actual:
        return []  # the order in which entries were said is no difference
    keys = [
        key
        for key in {**expected_entries, **actual_entries}
        if key not in actual_entries or key not in expected_entries or actual_entries[key] != expected_entries[key]
    ]
    return [
        f"metadata {key!a} is {_format_entry(actual_entries, key)}: expected {_format_entry(expected_entries, key)}"
        for key in keys
    ] or ["metadata holds the same entries in other bytes: expected those of kvmnn convert"]


def format_metadata(metadata: bytes) -> str:
    """The bytes for people: how many, and the first of them."""
    if not metadata:
        return "not there"
    return f"{len(metadata)} bytes, {metadata[:32]!r}{'...' if len(metadata) > 32 else ''}"


def _format_entry(entries: dict[str, str], key: str) -> str:
    return ascii(entries[key]) if key in entries else "not there"
