"""The metadata of a weight file: bytes between header and blocks, which loaders skip and the format says nothing about.

kvmnn writes a JSON object of texts there, and takes whatever others wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...errors import KvmnnError, ManifestError
from ...files.json_document import parse

_ALIGNMENT = 4
"""Blanks fill the JSON up to a multiple of this, so that the words of fp32 weights lie where they would without it."""

_LARGEST = 1 << 20
"""Bytes of the largest metadata that is looked at as JSON."""


def pack(entries: Mapping[str, str] | bytes) -> bytes:
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
    return text + b" " * (-len(text) % _ALIGNMENT)


def unpack(metadata: bytes) -> dict[str, str] | None:
    """The entries, where the bytes are a JSON object of texts; None where they are anything else."""
    if not metadata.startswith(b"{"):
        return None
    try:
        return parse(metadata, "metadata", _LARGEST).text_map()
    except (ManifestError, RecursionError):
        return None


def differences(found: bytes, expected: bytes) -> list[str]:
    """How metadata differs from what it should be: by key where both are JSON objects; none if it does not.

    The order of the keys is no difference.
    """
    if found == expected:
        return []
    here, there = unpack(found or b"{}"), unpack(expected or b"{}")
    if here is None or there is None:
        return [f"metadata is {shown(found)}: expected {shown(expected)}"]
    if here == there and pack(here) == found:
        return []  # the order in which entries were said is no difference
    keys = [key for key in {**there, **here} if key not in here or key not in there or here[key] != there[key]]
    return [f"metadata {key!a} is {_entry(here, key)}: expected {_entry(there, key)}" for key in keys] or [
        "metadata holds the same entries in other bytes: expected those of kvmnn convert"
    ]


def shown(metadata: bytes) -> str:
    """The bytes for people: how many, and the first of them."""
    if not metadata:
        return "not there"
    return f"{len(metadata)} bytes, {metadata[:32]!r}{'...' if len(metadata) > 32 else ''}"


def _entry(entries: dict[str, str], key: str) -> str:
    return ascii(entries[key]) if key in entries else "not there"
