"""Which file a path leads to."""

from __future__ import annotations

import os


def file_id(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Device and inode, the same for all names that a file has; None where there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino
