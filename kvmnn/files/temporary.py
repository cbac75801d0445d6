"""Temporary files and folders next to their targets, and removal of those of dead processes.

A name is ``.<target>.kvmnn-<pid>-<random>.tmp``. The process that writes it holds a lock (``flock``), which is released
however the process ends, in any pid namespace or container. The next process that writes to the same folder removes
such names that are not locked. On file systems without locks nothing is removed.

A folder whose files are moved into place one by one ends in ``.moving`` instead of ``.tmp`` from the first move on. It
is not removed with the others: files that are still in it after a kill show that those in place are a mixture.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .._util.patterns import declare_pattern

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: nothing is locked and nothing is removed
    fcntl = None

_MAX_ATTEMPTS = 100
"""How often other processes may remove a new file before it is locked."""

TEMPORARY_NAME_PATTERN = declare_pattern(r"\..{0,200}\.kvmnn-\d+-[0-9a-f]{8}\.tmp", re.DOTALL)
"""Names of temporary files."""

_MOVING_SUFFIX = ".moving"
_MOVING_NAME_PATTERN = re.compile(TEMPORARY_NAME_PATTERN.pattern.removesuffix(r"\.tmp") + r"\.moving", re.DOTALL)


class TemporaryPath:
    """A new file or folder that belongs to this process until `release`, by default in the folder of its target."""

    def __init__(self, target: Path, *, parent: Path | None = None, is_folder: bool = False) -> None:
        folder = target.parent if parent is None else parent
        remove_stale(folder)
        for remaining_attempts in range(_MAX_ATTEMPTS, -1, -1):
            self.path = folder / f".{_shorten_name(target.name)}.kvmnn-{os.getpid()}-{os.urandom(4).hex()}.tmp"
            try:
                self._handle = _create(self.path, is_folder)
            except FileNotFoundError:
                if not (remaining_attempts and folder.is_dir()):  # /proc rejects new files with this error
                    raise
                continue  # another process removed it before it was opened
            if self._handle is None or (_try_lock(self._handle, wait=True) and _is_same_file(self.path, self._handle)):
                return
            os.close(self._handle)  # another process removed it before it was locked
        raise OSError(errno.EAGAIN, "temporary files vanish as soon as they are made", str(folder))

    def mark_as_moving(self) -> None:
        """Rename a folder from which files are moved into place from now on."""
        moving_path = self.path.with_suffix(_MOVING_SUFFIX)
        os.rename(self.path, moving_path)
        self.path = moving_path

    def release(self) -> None:
        """Release the lock; other processes may then remove what still exists."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def remove_stale(folder: Path) -> None:
    """Remove temporary files of dead processes from a folder."""
    if fcntl is None:
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for path in [entry.path for entry in entries if TEMPORARY_NAME_PATTERN.fullmatch(entry.name)]:
            with suppress(OSError):
                _remove_if_unlocked(path)


def iter_unmoved_files(folder: str | os.PathLike[str]) -> Iterator[tuple[Path, list[str]]]:
    """Yield each subfolder from which files are, or were, moved into `folder`, and the names of those still in it."""
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if _MOVING_NAME_PATTERN.fullmatch(entry.name)]
        for path in (Path(folder, name) for name in sorted(names)):
            yield path, sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir())


def remove_superseded(folder: Path, written_names: Collection[str]) -> None:
    """Remove what dead processes did not move into `folder`, where all of it has been written again."""
    for path, names in iter_unmoved_files(folder) if fcntl is not None else ():
        if set(names) <= set(written_names):
            with suppress(OSError):
                _remove_if_unlocked(str(path))


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
    """Truncate a name so that the temporary name fits the 255 bytes of file systems."""
    return os.fsencode(name)[:100].decode(sys.getfilesystemencoding(), "ignore")


def _create(path: Path, is_folder: bool) -> int | None:
    """Return a descriptor of a new file or folder, for its lock; None for folders that cannot be opened."""
    if not is_folder:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    path.mkdir()
    return None if fcntl is None else os.open(path, os.O_RDONLY)


def _try_lock(handle: int, *, wait: bool) -> bool:
    """Lock a file and return whether that worked; without support for locks, return `wait`."""
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
