"""Files in the folder of a store that kvmnn has not made: they are named, and left alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..files.temporary import TEMPORARY_NAME_PATTERN
from .space import KEY_BYTES
from .unit_files import is_unit_name

_KEY_PATTERN = f"[0-9a-f]{{{2 * KEY_BYTES}}}"
_OWN_NAME_PATTERNS = {
    "": r"store\.json|rebuild\.lock|index(-\d{1,9})?\.sqlite(-wal|-shm|-journal|\.new(-journal)?)?",
    "spaces": rf"{_KEY_PATTERN}\.json",
    "texts": rf"{_KEY_PATTERN}\.(pin|session)",
    "tables": f"{_KEY_PATTERN}-{_KEY_PATTERN}",
    "staging": "(?!)",
}
"""By folders, the names in them."""
_UNITS_FOLDER = "units"
_UNIT_FOLDER_REGEX = re.compile(r"units/[0-9a-f]{3,}")


def iter_foreign_files(folder: Path) -> Iterator[str]:
    """Their names below the folder."""
    for walked_folder, folders, files in os.walk(folder):
        relative_folder = Path(walked_folder).relative_to(folder)
        folders[:] = [name for name in folders if not TEMPORARY_NAME_PATTERN.fullmatch(name)]
        for name in [name for name in folders if not _may_have_files(relative_folder / name)]:
            folders.remove(name)
            yield f"{relative_folder / name}/"
        for name in files:
            path = relative_folder / name
            if not (TEMPORARY_NAME_PATTERN.fullmatch(name) or _is_own_file(path)):
                yield str(path)


def _may_have_files(path: Path) -> bool:
    """Return whether kvmnn makes this folder."""
    return (
        str(path) in _OWN_NAME_PATTERNS
        or path == Path(_UNITS_FOLDER)
        or _UNIT_FOLDER_REGEX.fullmatch(str(path)) is not None
    )


def _is_own_file(path: Path) -> bool:
    pattern = _OWN_NAME_PATTERNS.get("" if path.parent == Path() else str(path.parent))
    return re.fullmatch(pattern, path.name) is not None if pattern else is_unit_name(path)
