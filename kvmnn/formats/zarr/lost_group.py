"""Directories of Zarr arrays whose group has lost its document: no store, and no arrays that belong to nothing."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import KvmnnError
from ...files.names import has_zarr_suffix
from .places import DOCUMENT_NAME, read_document_at
from .reading import V2_ARRAY_NAME, is_zarr_store


def find_orphaned_arrays(path: str) -> str | None:
    """What to say of a directory that has arrays right below it and no document of its own; None for all others.

    Arrays whose own names end in ``.zarr`` are stores that lie side by side, unless the directory's name does, too.
    """
    if is_zarr_store(path):
        return None
    has_zarr_name = has_zarr_suffix(path.rstrip("/" + os.sep))
    try:
        with os.scandir(path) as entries:
            folder_names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return None
    array = next(
        (
            name
            for name in folder_names
            if (has_zarr_name or not has_zarr_suffix(name)) and _is_array_folder(Path(path, name))
        ),
        None,
    )
    if array is None:
        return None
    return (
        f"{path}: has arrays of a Zarr store ({array!r:.80}) and no {DOCUMENT_NAME} of their group, which says what "
        f"they "
        "are of (positions, token ids, axes): copy the whole store, or name one array"
    )


def _is_array_folder(folder: Path) -> bool:
    if (folder / V2_ARRAY_NAME).is_file():
        return True
    try:
        node = read_document_at(folder / DOCUMENT_NAME)
    except (KvmnnError, OSError):
        return False
    return node is not None and isinstance(node.value, dict) and node.value.get("node_type") == "array"
