"""What is noted down of files that lie beside the arrays of a folder and say what these do not.

It is a JSON document under `BESIDE_KEY` of the metadata of manifests and files of arrays (docs/manifest.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from ..arrays.source import BESIDE_KEY
from ..files import names
from ..files.json_document import parse
from .kept_file import literal, literal_document

SCHEMA: Final = "kvmnn-beside"
SCHEMA_VERSION: Final = 1
NAMES: Final = names.BESIDE
POSITIONS, TOKEN_IDS = NAMES
"""No other file is taken along, and none is written."""
MAX_BYTES = 16 << 20
"""Of a file: as much as is read of one."""


def to_json(files: Mapping[str, bytes]) -> str:
    """The document on one line; `files` by their names."""
    document = {name: literal_document(data) for name, data in files.items()}
    return json.dumps({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "files": document}, separators=(",", ":"))


def files_beside(metadata: Mapping[str, str], where: str) -> dict[str, bytes]:
    """Names of files and their bytes; none where the metadata says none.

    Raises
    ------
    ManifestError
        When the document is malformed, holds more than `MAX_BYTES` of one, or names others; `where` begins the message.
    """
    text = metadata.get(BESIDE_KEY)
    if text is None:
        return {}
    root = parse(text, f"{where}: metadata {BESIDE_KEY!r}", 2 * len(NAMES) * MAX_BYTES)
    root.check_schema(SCHEMA, SCHEMA_VERSION)
    files = root.at("files")
    if not isinstance(files.value, dict) or not files.value.keys() <= set(NAMES):
        raise files.wrong(f"files called {' or '.join(NAMES)}")
    return {name: literal(files.at(name), MAX_BYTES) for name in NAMES if name in files.value}


def without_beside(metadata: Mapping[str, str], name: str) -> dict[str, str]:
    """The metadata without one of these files."""
    files = files_beside(metadata, "metadata")
    files.pop(name, None)
    others = {key: text for key, text in metadata.items() if key != BESIDE_KEY}
    return {**others, BESIDE_KEY: to_json(files)} if files else others


def difference_beside(metadata: Mapping[str, str], where: str, others: Mapping[str, str], whose: str) -> str | None:
    """Where the files beside some arrays differ from those beside others, in words; None where they do not."""
    mine, theirs = files_beside(metadata, where), files_beside(others, whose)
    name = next((name for name in NAMES if mine.get(name) != theirs.get(name)), None)
    if name is None:
        return None
    missing = [place for place, files in ((where, mine), (whose, theirs)) if name not in files]
    return f"{name} is missing in {missing[0]}" if missing else f"{name} differs"
