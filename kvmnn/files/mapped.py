"""Files as read-only memory: mapped where they lie, or spooled to an unnamed temporary file when they are pipes."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from ..dtypes import Bytes
from ..errors import LimitError, SourceError
from ._mapping import Mapping
from .changes import FileState, note

STDIN = "-"
_PAGE = mmap.PAGESIZE
_MIN_DROP_BYTES = 1 << 20
_SPOOL_BYTES = 1 << 20


def is_stream(path: str) -> bool:
    """Whether what is at a path can be read only once: standard input, or a pipe."""
    return path == STDIN or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


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

    A file that is cut, or that the disk does not give, reads as zeros from there on, and is an error afterwards:
    `changes.Reading` finds whatever changed while it was read.

    Parameters
    ----------
    path
        File to open; ``"-"`` for standard input.
    expected
        What the file was when it was first looked at.
    max_bytes
        Most bytes of a pipe or of standard input; None for as many as the disk holds.

    Raises
    ------
    SourceError
        When the file cannot be opened, is a device, or is not what it was.
    LimitError
        When a pipe holds more than `max_bytes`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, expected: FileState | None = None, max_bytes: int | None = None
    ) -> None:
        self.path = os.fspath(path)
        self.label = "standard input" if self.path == STDIN else self.path
        self._state: FileState | None = None
        try:
            self._map = self._open(expected, max_bytes)
        except OSError as exc:
            raise SourceError(f"{self.label}: cannot be read: {exc.strerror or exc}") from exc
        self.size = 0 if self._map is None else self._map.nbytes

    def _open(self, expected: FileState | None, max_bytes: int | None) -> Mapping | None:
        if self.path == STDIN:
            if sys.stdin is None:
                raise OSError(errno.EBADF, "it is closed")
            return _spool(sys.stdin.buffer, self.label, max_bytes)
        with open(self.path, "rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISBLK(found.st_mode) or (stat.S_ISCHR(found.st_mode) and not file.isatty()):
                raise SourceError(f"{self.label}: is a device: expected a file or a pipe")
            if not stat.S_ISREG(found.st_mode):
                return _spool(file, self.label, max_bytes)
            self._state = expected or FileState(self.label, self.path, found)
            note(self._state)
            self._state.expect(found)
            made = _map(file)
            if made is not None:
                self._state.follow(made)
            return made

    def view(self, offset: int, nbytes: int) -> Bytes:
        """A read-only view of `nbytes` bytes from `offset`; the range must lie within the file."""
        self._note()
        if self._map is None:
            raise SourceError(f"{self.label}: is empty")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise SourceError(
                f"{self.label}: needs {nbytes} bytes at offset {offset}, but the file has {self.size} bytes"
            )
        return np.frombuffer(memoryview(self._map), np.uint8, nbytes, offset)

    def head(self, nbytes: int) -> bytes:
        """The first `nbytes` bytes, or all if there are fewer."""
        return b"" if self._map is None else self.view(0, min(nbytes, self.size)).tobytes()

    def runs(self, offset: int, nbytes: int, step: int) -> Iterator[Bytes]:
        """Views of `step` bytes each; pages of a large view are given back once the caller comes for the next."""
        for start in range(offset, offset + nbytes, step):
            length = min(step, offset + nbytes - start)
            yield self.view(start, length)
            self.drop(start, length)
        if self._state is not None:
            self._state.check()

    def drop(self, offset: int, nbytes: int) -> None:
        """Let go of the pages behind a large range; they come back from the page cache if touched again."""
        if nbytes >= _MIN_DROP_BYTES and self._map is not None:
            first = offset // _PAGE * _PAGE
            self._map.drop(first, offset + nbytes - first)

    def _note(self) -> None:
        if self._state is not None:
            note(self._state)
            if self._map is not None and self._map.watch.damaged:
                raise self._state.error()


def _map(file: BinaryIO) -> Mapping | None:
    nbytes = os.fstat(file.fileno()).st_size
    return Mapping(file.fileno(), nbytes) if nbytes else None


def _spool(stream: BinaryIO, label: str, max_bytes: int | None) -> Mapping | None:
    """A pipe is read once, to an unnamed file that ends with its mapping."""
    with tempfile.TemporaryFile() as spool:
        while run := stream.read(_SPOOL_BYTES):
            spool.write(run)
            if max_bytes is not None and spool.tell() > max_bytes:
                raise LimitError(f"{label}: holds more than the limit of {max_bytes} bytes")
        spool.flush()
        return _map(spool)
