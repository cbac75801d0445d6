"""Files as read-only memory: mapped where they lie, or spooled to an unnamed temporary file when they are pipes."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from ..dtypes import Bytes
from ..errors import SourceError

STDIN = "-"
_PAGE = mmap.PAGESIZE
_MIN_DROP_BYTES = 1 << 20


def head_of(path: str, nbytes: int = 64) -> bytes:
    """The first bytes of a file; none of a directory, of standard input, or of what cannot be read."""
    if path == STDIN or not os.path.isfile(path):
        return b""
    try:
        with open(path, "rb") as file:
            return file.read(nbytes)
    except OSError:
        return b""


class MappedFile:
    """The bytes of a file, mapped. Pipes and standard input (``"-"``) are copied to a temporary file first.

    Parameters
    ----------
    path
        File to open; ``"-"`` for standard input.

    Raises
    ------
    SourceError
        When the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.label = "standard input" if self.path == STDIN else self.path
        try:
            self._map = self._open()
        except OSError as exc:
            raise SourceError(f"{self.label}: cannot be read: {exc.strerror or exc}") from exc
        self.size = len(self._map) if self._map is not None else 0

    def _open(self) -> mmap.mmap | None:
        if self.path == STDIN:
            if sys.stdin is None:
                raise OSError(errno.EBADF, "it is closed")
            return _spool(sys.stdin.buffer)
        with open(self.path, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return _spool(file)
            return _map(file)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """A read-only view of `nbytes` bytes from `offset`; the range must lie within the file."""
        if self._map is None or offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise SourceError(
                f"{self.label}: needs {nbytes} bytes at offset {offset}, but the file has {self.size} bytes"
            )
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    def head(self, nbytes: int) -> bytes:
        """The first `nbytes` bytes, or all if there are fewer."""
        return b"" if self._map is None else self._map[:nbytes]

    def runs(self, offset: int, nbytes: int, step: int) -> Iterator[Bytes]:
        """Views of `step` bytes each; pages of a large view are given back once the caller comes for the next."""
        for start in range(offset, offset + nbytes, step):
            length = min(step, offset + nbytes - start)
            yield self.view(start, length)
            self.drop(start, length)

    def drop(self, offset: int, nbytes: int) -> None:
        """Let go of the pages behind a large range; they come back from the page cache if touched again."""
        if nbytes >= _MIN_DROP_BYTES and self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            first = offset // _PAGE * _PAGE
            self._map.madvise(mmap.MADV_DONTNEED, first, offset + nbytes - first)


def _map(file: BinaryIO) -> mmap.mmap | None:
    if os.fstat(file.fileno()).st_size == 0:
        return None
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _spool(stream: BinaryIO) -> mmap.mmap | None:
    with tempfile.TemporaryFile() as spool:
        shutil.copyfileobj(stream, spool, 1 << 20)
        spool.flush()
        return _map(spool)
