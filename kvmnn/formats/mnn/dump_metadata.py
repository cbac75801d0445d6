"""The metadata files of a KV dump as one text, which travels with the arrays so that they can become the dump again.

It is a JSON object under `DUMP_KEY` in `Source.metadata` and so in the manifest of a bundle (docs/manifest.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from ...arrays.source import DUMP_KEY
from ...errors import ManifestError
from ...files.json_document import Node, parse

SCHEMA: Final = "kvmnn-dump"
SCHEMA_VERSION: Final = 1
MAX_BYTES = 32 << 20
"""Of the text: the metadata of some 60,000 pairs of K and V."""

_BYTES = "surrogateescape"
"""Metadata need not be UTF-8; what is not comes back as it was."""


def of(texts: Mapping[str, bytes], where: str) -> tuple[dict[str, str], list[str]]:
    """`Source.metadata` and `Source.notes` for metadata files, whose bytes are given by their names in the dump."""
    text = to_json(texts)
    try:
        from_json(text, where)
    except ManifestError as error:
        return {}, [f"a bundle of this dump cannot become it again (decode --as dump): {error}"]
    return {DUMP_KEY: text}, []


def to_json(texts: Mapping[str, bytes]) -> str:
    """Metadata files as a JSON document, in ASCII."""
    found = {name: text.decode("utf-8", _BYTES) for name, text in texts.items()}
    return json.dumps({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "metadata_files": found})


def from_json(text: str, where: str) -> dict[str, bytes]:
    """The bytes of metadata files by their names, which are relative and do not lead upwards.

    Raises
    ------
    ManifestError
        When the document is malformed or larger than `MAX_BYTES`; `where` begins the message.
    """
    root = parse(text, where, MAX_BYTES)
    root.check_schema(SCHEMA, SCHEMA_VERSION)
    found: dict[str, bytes] = {}
    files = root.at("metadata_files")
    for name, content in files.text_map().items():
        Node(name, where, files.path).file_name()
        try:
            found[name] = content.encode("utf-8", _BYTES)
        except UnicodeEncodeError:
            raise files.at(name).wrong("the text of a file") from None
    return found
