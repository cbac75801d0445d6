"""Temporary files and folders next to what they will become, and the removal of those that dead processes left.

A name is ``.<target>.kvmnn-<pid>-<random>.tmp``. The process that writes there holds a lock (``flock``), which ends
with it however it ends, in whatever pid namespace or container it ran. Whoever writes to the same folder next removes
what bears such a name and is not locked. Where a file system has no locks nothing is removed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: nothing is locked and nothing is removed
    fcntl = None

_MAX_ATTEMPTS = 100
"""Times that others may sweep a new file away before it is locked."""

TEMPORARY_NAME_PATTERN = re.compile(r"\..{0,200}\.kvmnn-\d+-[0-9a-f]{8}\.tmp", re.DOTALL)
"""Of what is temporary."""


class TemporaryPath:
    """A new file or folder that is this process's until `release`.

    Parameters
    ----------
    target
        What it will become.
    parent
        Where it lies; None for the folder of its target.
    is_folder
        Make a folder instead of a file.
    """

    def __init__(self, target: Path, *, parent: Path | None = None, is_folder: bool = False) -> None:
        folder = target.parent if parent is None else parent
        remove_stale(folder)
        for remaining_attempts in range(_MAX_ATTEMPTS, -1, -1):
            self.path = folder / f".{_shorten_name(target.name)}.kvmnn-{os.getpid()}-{secrets.token_hex(4)}.tmp"
            try:
                self._handle = _create(self.path, is_folder)
            except FileNotFoundError:
                if not (remaining_attempts and folder.is_dir()):  # /proc lets nobody make files, and says this
                    raise
                continue  # somebody swept before it was opened
            if self._handle is None or (_try_lock(self._handle, wait=True) and _is_same_file(self.path, self._handle)):
                return
            os.close(self._handle)  # somebody swept before it was locked
        raise OSError(errno.EAGAIN, "temporary files vanish as soon as they are made", str(folder))

    def release(self) -> None:
        """Let go of the lock; what is still there may be removed by others."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def remove_stale(folder: Path) -> None:
    """Remove what processes that are gone have left in a folder."""
    if fcntl is None:
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for path in [entry.path for entry in entries if TEMPORARY_NAME_PATTERN.fullmatch(entry.name)]:
            with suppress(OSError):
                _remove_if_unlocked(path)


def _remove_if_unlocked(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        mode = os.fstat(handle).st_mode
        if (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and _try_lock(handle, wait=False):
            if stat.S_ISDIR(mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
    finally:
        os.close(handle)


def _shorten_name(name: str) -> str:
    """As much of a name as leaves room for the rest in the 255 bytes that file systems have."""
    return os.fsencode(name)[:100].decode(sys.getfilesystemencoding(), "ignore")


def _create(path: Path, is_folder: bool) -> int | None:
    """A descriptor of something new, kept for its lock; None for folders where they cannot be opened."""
    if not is_folder:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    path.mkdir()
    return None if fcntl is None else os.open(path, os.O_RDONLY)


def _try_lock(handle: int, *, wait: bool) -> bool:
    """Whether the lock is ours; a file system without locks locks nothing out, and gives none to those who sweep."""
    if fcntl is None:
        return wait
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return wait
    return True


def _is_same_file(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
