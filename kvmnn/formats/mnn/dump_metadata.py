"""The metadata files of a KV dump as one text, which travels with the arrays so that they can become the dump again.

It is a JSON object under `DUMP_KEY` in `Source.metadata` and so in the manifest of a bundle (docs/manifest.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from ...arrays.source import DUMP_KEY
from ...errors import ManifestError
from ...files.json_document import JsonReader, parse_document

DUMP_SCHEMA: Final = "kvmnn-dump"
DUMP_SCHEMA_VERSION: Final = 1
MAX_DUMP_METADATA_BYTES = 32 << 20
"""Of the text: the metadata of some 60,000 pairs of K and V."""

_NON_UTF8_ERRORS = "surrogateescape"
"""Metadata need not be UTF-8; what is not comes back as it was."""


def build_source_metadata(metadata_by_name: Mapping[str, bytes], label: str) -> tuple[dict[str, str], list[str]]:
    """`Source.metadata` and `Source.notes` for metadata files, whose bytes are given by their names in the dump."""
    document_text = dump_metadata_files(metadata_by_name)
    try:
        load_metadata_files(document_text, label)
    except ManifestError as error:
        return {}, [f"a bundle of this dump cannot become it again (decode --as dump): {error}"]
    return {DUMP_KEY: document_text}, []


def dump_metadata_files(metadata_by_name: Mapping[str, bytes]) -> str:
    """Metadata files as a JSON document, in ASCII."""
    decoded_by_name = {name: data.decode("utf-8", _NON_UTF8_ERRORS) for name, data in metadata_by_name.items()}
    return json.dumps({"schema": DUMP_SCHEMA, "schema_version": DUMP_SCHEMA_VERSION, "metadata_files": decoded_by_name})


def load_metadata_files(text: str, label: str) -> dict[str, bytes]:
    """The bytes of metadata files by their names, which are relative and do not lead upwards.

    Raises
    ------
    ManifestError
        When the document is malformed or larger than `MAX_DUMP_METADATA_BYTES`; `label` begins the message.
    """
    root = parse_document(text, label, MAX_DUMP_METADATA_BYTES)
    root.check_schema(DUMP_SCHEMA, DUMP_SCHEMA_VERSION)
    metadata_by_name: dict[str, bytes] = {}
    files = root.get("metadata_files")
    for name, content in files.read_str_map().items():
        JsonReader(name, label, files.path).read_file_name()
        try:
            metadata_by_name[name] = content.encode("utf-8", _NON_UTF8_ERRORS)
        except UnicodeEncodeError:
            raise files.get(name).error("the text of a file") from None
    return metadata_by_name
