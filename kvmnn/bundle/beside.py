"""What is noted down of files that lie beside the arrays of a folder and say what these do not.

It is a JSON document under `SIDECAR_KEY` of the metadata of manifests and files of arrays (docs/manifest.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from ..arrays.source import SIDECAR_KEY
from ..files import names
from ..files.json_document import parse_document
from .kept_file import build_raw_document, parse_raw_bytes

SIDECAR_SCHEMA: Final = "kvmnn-beside"
SIDECAR_SCHEMA_VERSION: Final = 1
SIDECAR_NAMES: Final = names.SIDECAR_FILES
POSITIONS_NAME, TOKEN_IDS_NAME = SIDECAR_NAMES
"""No other file is taken along, and none is written."""
MAX_SIDECAR_BYTES = 16 << 20
"""Of a file: as much as is read of one."""


def dump_sidecars(files: Mapping[str, bytes]) -> str:
    """The document on one line; `files` by their names."""
    document = {name: build_raw_document(data) for name, data in files.items()}
    return json.dumps(
        {"schema": SIDECAR_SCHEMA, "schema_version": SIDECAR_SCHEMA_VERSION, "files": document}, separators=(",", ":")
    )


def parse_sidecars(metadata: Mapping[str, str], where: str) -> dict[str, bytes]:
    """Names of files and their bytes; none where the metadata says none.

    Raises
    ------
    ManifestError
        When the document is malformed, holds more than `MAX_SIDECAR_BYTES` of one, or names others; `where` begins the
        message.
    """
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
    """The metadata without one of these files."""
    files = parse_sidecars(metadata, "metadata")
    files.pop(name, None)
    remaining_metadata = {key: text for key, text in metadata.items() if key != SIDECAR_KEY}
    return {**remaining_metadata, SIDECAR_KEY: dump_sidecars(files)} if files else remaining_metadata


def find_sidecar_difference(
    metadata: Mapping[str, str], where: str, other_metadata: Mapping[str, str], other_where: str
) -> str | None:
    """Where the files beside some arrays differ from those beside others, in words; None where they do not."""
    own_files, other_files = parse_sidecars(metadata, where), parse_sidecars(other_metadata, other_where)
    name = next((name for name in SIDECAR_NAMES if own_files.get(name) != other_files.get(name)), None)
    if name is None:
        return None
    lacking = [location for location, files in ((where, own_files), (other_where, other_files)) if name not in files]
    return f"{name} is missing in {lacking[0]}" if lacking else f"{name} differs"
