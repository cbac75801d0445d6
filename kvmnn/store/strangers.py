"""Files in the folder of a store that kvmnn has not made: they are named, and left alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..files.temporary import NAME
from .space import KEY_BYTES
from .unit_files import is_unit_name

_KEY = f"[0-9a-f]{{{2 * KEY_BYTES}}}"
_OURS = {
    "": r"store\.json|rebuild\.lock|index(-\d{1,9})?\.sqlite(-wal|-shm|-journal|\.new(-journal)?)?",
    "spaces": rf"{_KEY}\.json",
    "texts": rf"{_KEY}\.(pin|session)",
    "tables": f"{_KEY}-{_KEY}",
    "staging": "(?!)",
}
"""By folders, the names in them."""
_UNITS = "units"
_UNIT_FOLDER = re.compile(r"units/[0-9a-f]{3,}")


def strangers(folder: Path) -> Iterator[str]:
    """Their names below the folder."""
    for place, folders, files in os.walk(folder):
        below = Path(place).relative_to(folder)
        folders[:] = [name for name in folders if not NAME.fullmatch(name)]
        for name in [name for name in folders if not _may_have_files(below / name)]:
            folders.remove(name)
            yield f"{below / name}/"
        for name in files:
            path = below / name
            if not (NAME.fullmatch(name) or _is_ours(path)):
                yield str(path)


def _may_have_files(path: Path) -> bool:
    """Return whether kvmnn makes this folder."""
    return str(path) in _OURS or path == Path(_UNITS) or _UNIT_FOLDER.fullmatch(str(path)) is not None


def _is_ours(path: Path) -> bool:
    pattern = _OURS.get("" if path.parent == Path() else str(path.parent))
    return re.fullmatch(pattern, path.name) is not None if pattern else is_unit_name(path)
