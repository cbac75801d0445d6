"""Files as read-only memory: mapped where they lie, or spooled to an unnamed temporary file when they are pipes."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import BinaryIO, Literal, Self

import numpy as np

from ..dtypes import Bytes
from ..errors import LimitError, SourceError
from ._file_mapping import FileMapping
from .change_detection import FileState, record_input
from .urls import URL_SCHEME_PATTERN

STDIN = "-"
HEAD_BYTES = 4096
"""Bytes at the beginning of a file that tell of nearly all formats what it is."""
_PAGE_BYTES = mmap.PAGESIZE
_MIN_DROP_BYTES = 1 << 20
_SPOOL_CHUNK_BYTES = 1 << 20
_HASH_CHUNK_BYTES = 8 << 20


def is_stream(path: str) -> bool:
    """Whether what is at a path can be read only once: standard input, or a pipe."""
    return path == STDIN or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def read_head(path: str, nbytes: int = 64) -> bytes:
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
    expected_state
        What the file was when it was first looked at.
    max_bytes
        Most bytes of a pipe or of standard input; None for as many as the disk holds.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, expected_state: FileState | None = None, max_bytes: int | None = None
    ) -> None:
        self.path = os.fspath(path)
        self.label = "standard input" if self.path == STDIN else self.path
        self._state: FileState | None = None
        try:
            self._mapping = self._open(expected_state, max_bytes)
        except OSError as exc:
            raise SourceError(f"{self.label}: cannot be read: {exc.strerror or exc}") from exc
        self.size = 0 if self._mapping is None else self._mapping.nbytes

    def _open(self, expected_state: FileState | None, max_bytes: int | None) -> FileMapping | None:
        if self.path == STDIN:
            if sys.stdin is None:
                raise OSError(errno.EBADF, "it is closed")
            return _spool(sys.stdin.buffer, self.label, max_bytes)
        with open(self.path, "rb") as file:
            file_stat = os.fstat(file.fileno())
            if stat.S_ISBLK(file_stat.st_mode) or (stat.S_ISCHR(file_stat.st_mode) and not file.isatty()):
                raise SourceError(f"{self.label}: is a device: expected a file or a pipe")
            if not stat.S_ISREG(file_stat.st_mode):
                return _spool(file, self.label, max_bytes)
            self._state = expected_state or FileState(self.label, self.path, file_stat)
            record_input(self._state)
            self._state.verify_opened(file_stat)
            mapping = _map_file(file)
            if mapping is not None:
                self._state.track_mapping(mapping)
            return mapping

    def view(self, offset: int, nbytes: int) -> Bytes:
        """A read-only view of `nbytes` bytes from `offset`; the range must lie within the file."""
        self._record_access()
        if self._mapping is None:
            raise SourceError(f"{self.label}: is empty")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise SourceError(
                f"{self.label}: needs {nbytes} bytes at offset {offset}, but the file has {self.size} bytes"
            )
        return np.frombuffer(memoryview(self._mapping), np.uint8, nbytes, offset)

    def read_head(self, nbytes: int) -> bytes:
        """The first `nbytes` bytes, or all if there are fewer."""
        return b"" if self._mapping is None else self.view(0, min(nbytes, self.size)).tobytes()

    def iter_chunks(self, offset: int, nbytes: int, chunk_bytes: int) -> Iterator[Bytes]:
        """Views of `chunk_bytes` bytes each; pages of a large view are given back once the caller comes for the
        next.
        """
        for start in range(offset, offset + nbytes, chunk_bytes):
            length = min(chunk_bytes, offset + nbytes - start)
            yield self.view(start, length)
            self.release_pages(start, length)
        if self._state is not None:
            self._state.verify()

    def compute_sha256(self) -> str:
        """The hash of all bytes, in hexadecimal digits."""
        digest = hashlib.sha256()
        for chunk in self.iter_chunks(0, self.size, _HASH_CHUNK_BYTES):
            digest.update(chunk.data)
        return digest.hexdigest()

    def release_pages(self, offset: int, nbytes: int) -> None:
        """Let go of the pages after a large range; they come back from the page cache if touched again."""
        if nbytes >= _MIN_DROP_BYTES and self._mapping is not None:
            first = offset // _PAGE_BYTES * _PAGE_BYTES
            self._mapping.release_pages(first, offset + nbytes - first)

    def _record_access(self) -> None:
        if self._state is not None:
            record_input(self._state)
            if self._mapping is not None and self._mapping.monitor.is_damaged:
                raise self._state.build_error()


@dataclass(frozen=True)
class FileHead:
    """What lies at a path, looked at once, before anything is read."""

    #: Where it lies.
    path: str
    #: What it is; a file where nothing is there. A stream is standard input, or a pipe.
    kind: Literal["file", "folder", "stream", "url"]
    #: The first `HEAD_BYTES` bytes of a file, or of a stream that was opened.
    data: bytes = b""
    #: The stream, where it was opened: nothing of it can be read before.
    file: MappedFile | None = None

    @classmethod
    def from_path(cls, path: str) -> Self:
        """Look at a path; a file that cannot be read has no bytes, and its reader says why."""
        if URL_SCHEME_PATTERN.match(path):
            return cls(path, "url")
        if path == STDIN:
            return cls(path, "stream")
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):
            return cls(path, "file")
        if stat.S_ISDIR(mode):
            return cls(path, "folder")
        return cls(path, "file", read_head(path, HEAD_BYTES)) if stat.S_ISREG(mode) else cls(path, "stream")

    @classmethod
    def from_stream(cls, file: MappedFile) -> Self:
        """Look at what was opened."""
        return cls(file.path, "stream", file.read_head(HEAD_BYTES), file)

    @property
    def suffix(self) -> str:
        """Of the name, in lower case."""
        return PurePath(self.path).suffix.lower()

    def read(self, nbytes: int) -> bytes:
        """The first `nbytes` bytes, or all that there are: of more than `data` has, the file is read again."""
        if nbytes <= len(self.data) or len(self.data) < HEAD_BYTES:
            return self.data[:nbytes]
        return self.file.read_head(nbytes) if self.file else read_head(self.path, nbytes)


def iter_file_chunks(path: str | os.PathLike[str], state: FileState | None, chunk_bytes: int) -> Iterator[Bytes]:
    """The bytes of a file, mapped only while they are read: a folder may have more files than a process may map."""
    file = MappedFile(path, expected_state=state)
    yield from file.iter_chunks(0, file.size, chunk_bytes)


def _map_file(file: BinaryIO) -> FileMapping | None:
    nbytes = os.fstat(file.fileno()).st_size
    return FileMapping(file.fileno(), nbytes) if nbytes else None


def _spool(stream: BinaryIO, label: str, max_bytes: int | None) -> FileMapping | None:
    """A pipe is read once, to an unnamed file that ends with its mapping."""
    with tempfile.TemporaryFile() as spool:
        while chunk := stream.read(_SPOOL_CHUNK_BYTES):
            spool.write(chunk)
            if max_bytes is not None and spool.tell() > max_bytes:
                raise LimitError(f"{label}: holds more than the limit of {max_bytes} bytes")
        spool.flush()
        return _map_file(spool)
