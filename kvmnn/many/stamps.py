"""Whether files are what they were: sizes and times of the last change."""

from __future__ import annotations

import hashlib
import os

from ..files.names import BESIDE, COMPLETENESS, SIDE_SUFFIX


def stamp(path: str) -> str | None:
    """Sizes and times of what lies at a path: of a file, and of what belongs to it by its name (``x.json`` of ``x``,
    ``x.v`` of ``x.k``) or is read beside it (``positions.json`` of ``x.npy``); of all files below a folder. None where
    nothing can be seen there.
    """
    try:
        if os.path.isdir(path):
            return _of_folder(path)
        return " ".join([_of_file(path), *(_of_file(other) for other in _beside(path) if os.path.exists(other))])
    except OSError:
        return None


def _of_file(path: str) -> str:
    found = os.stat(path)
    return f"{found.st_size}:{found.st_mtime_ns}"


def _beside(path: str) -> list[str]:
    other = {".k": ".v", ".v": ".k"}.get(path[-2:])
    names = (*BESIDE, COMPLETENESS) if path.lower().endswith(".npy") else ()
    told = [os.path.join(os.path.dirname(path), name) for name in names]
    return [path + SIDE_SUFFIX, *([path[:-2] + other] if other else []), *told]


def _of_folder(path: str) -> str:
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in sorted(files):
            file = os.path.join(folder, name)
            try:
                said = _of_file(file)
            except OSError:  # a link to nothing
                said = "-"
            digest.update(os.fsencode(os.path.relpath(file, path)) + b"\0" + said.encode() + b"\0")
    return digest.hexdigest()
