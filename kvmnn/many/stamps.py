"""Whether files are what they were: sizes and times of the last change."""

from __future__ import annotations

import hashlib
import os

from ..files.names import COMPLETENESS_FILE, SIDECAR_FILES, SIDECAR_SUFFIX


def compute_stamp(path: str) -> str | None:
    """Sizes and times of what lies at a path: of a file, and of what belongs to it by its name (``x.json`` of ``x``,
    ``x.v`` of ``x.k``) or is read beside it (``positions.json`` of ``x.npy``); of all files below a folder. None where
    nothing can be seen there.
    """
    try:
        if os.path.isdir(path):
            return _stamp_folder(path)
        return " ".join(
            [
                _stamp_file(path),
                *(_stamp_file(related) for related in _list_related_files(path) if os.path.exists(related)),
            ]
        )
    except OSError:
        return None


def _stamp_file(path: str) -> str:
    file_stat = os.stat(path)
    return f"{file_stat.st_size}:{file_stat.st_mtime_ns}"


def _list_related_files(path: str) -> list[str]:
    partner_suffix = {".k": ".v", ".v": ".k"}.get(path[-2:])
    names = (*SIDECAR_FILES, COMPLETENESS_FILE) if path.lower().endswith(".npy") else ()
    sidecar_paths = [os.path.join(os.path.dirname(path), name) for name in names]
    return [path + SIDECAR_SUFFIX, *([path[:-2] + partner_suffix] if partner_suffix else []), *sidecar_paths]


def _stamp_folder(path: str) -> str:
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in sorted(files):
            file = os.path.join(folder, name)
            try:
                file_stamp = _stamp_file(file)
            except OSError:  # a link to nothing
                file_stamp = "-"
            digest.update(os.fsencode(os.path.relpath(file, path)) + b"\0" + file_stamp.encode() + b"\0")
    return digest.hexdigest()
