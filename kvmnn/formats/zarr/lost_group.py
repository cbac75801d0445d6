"""Directories of Zarr arrays whose group has lost its document: no store, and no arrays that belong to nothing."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import KvmnnError
from ...files.names import is_named_zarr
from .places import DOCUMENT, document_at
from .reading import OLD_ARRAY, is_store


def lost_group(path: str) -> str | None:
    """What to say of a directory that has arrays right below it and no document of its own; None for all others.

    Arrays whose own names end in ``.zarr`` are stores that lie side by side, unless the directory's name does, too.
    """
    if is_store(path):
        return None
    ends = is_named_zarr(path.rstrip("/" + os.sep))
    try:
        with os.scandir(path) as entries:
            below = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return None
    array = next((name for name in below if (ends or not is_named_zarr(name)) and _is_array(Path(path, name))), None)
    if array is None:
        return None
    return (
        f"{path}: has arrays of a Zarr store ({array!r:.80}) and no {DOCUMENT} of their group, which says what they "
        "are of (positions, token ids, axes): copy the whole store, or name one array"
    )


def _is_array(folder: Path) -> bool:
    if (folder / OLD_ARRAY).is_file():
        return True
    try:
        node = document_at(folder / DOCUMENT)
    except (KvmnnError, OSError):
        return False
    return node is not None and isinstance(node.value, dict) and node.value.get("node_type") == "array"
