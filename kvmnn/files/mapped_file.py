"""Files as read-only memory: mapped, or for pipes first copied to an unnamed temporary file."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import PurePath
from typing import BinaryIO, Literal, Self

import numpy as np

from .._util.dataclass import dataclass
from ..dtypes import Bytes
from ..errors import LimitError, SourceError, build_read_error
from ._file_mapping import FileMapping
from .change_detection import FileState, record_input
from .urls import URL_SCHEME_PATTERN

STDIN = "-"
HEAD_BYTES = 4096
"""Bytes at the start of a file from which nearly all formats are detected."""
_PAGE_BYTES = mmap.PAGESIZE
_MIN_DROP_BYTES = 1 << 20
_SPOOL_CHUNK_BYTES = 1 << 20
_HASH_CHUNK_BYTES = 8 << 20


def is_stream(path: str) -> bool:
    """Return whether a path can be read only once: standard input, or a pipe."""
    return path == STDIN or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def read_head(path: str, nbytes: int = 64) -> bytes:
    """Return the first bytes of a file; empty for a directory, standard input, or an unreadable file."""
    if path == STDIN or not os.path.isfile(path):
        return b""
    try:
        with open(path, "rb") as file:
            return file.read(nbytes)
    except OSError:
        return b""


class MappedFile:
    """The bytes of a file, mapped. Pipes and standard input (``"-"``) are copied to a temporary file first.

    A file that is truncated or unreadable after it was opened reads as zeros from there on;
    `change_detection.InputGuard` reports that as an error.

    Parameters
    ----------
    path
        File to open; ``"-"`` for standard input.
    expected_state
        State of the file when it was first examined.
    max_bytes
        Maximum bytes of a pipe or of standard input; None for no limit.
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
            raise build_read_error(self.label, exc) from exc
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
        """Return a read-only view of `nbytes` bytes from `offset`; the range must lie within the file."""
        self._record_access()
        if self._mapping is None:
            raise SourceError(f"{self.label}: is empty")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise SourceError(
                f"{self.label}: needs {nbytes} bytes at offset {offset}, but the file has {self.size} bytes"
            )
        return np.frombuffer(memoryview(self._mapping), np.uint8, nbytes, offset)

    def read_head(self, nbytes: int) -> bytes:
        """Return the first `nbytes` bytes, or all if there are fewer."""
        return b"" if self._mapping is None else self.view(0, min(nbytes, self.size)).tobytes()

    def iter_chunks(self, offset: int, nbytes: int, chunk_bytes: int) -> Iterator[Bytes]:
        """Yield views of `chunk_bytes` bytes; pages of a large view are released when the next is requested."""
        for start in range(offset, offset + nbytes, chunk_bytes):
            length = min(chunk_bytes, offset + nbytes - start)
            yield self.view(start, length)
            self.release_pages(start, length)
        if self._state is not None:
            self._state.verify()

    def compute_sha256(self) -> str:
        """Return the SHA-256 of all bytes in hexadecimal digits."""
        digest = hashlib.sha256()
        for chunk in self.iter_chunks(0, self.size, _HASH_CHUNK_BYTES):
            digest.update(chunk.data)
        return digest.hexdigest()

    def release_pages(self, offset: int, nbytes: int) -> None:
        """Release the pages of a large range; they are read again from the page cache when needed."""
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
    """Kind and first bytes of an input, read once to detect its format."""

    #: Path of the input.
    path: str
    #: Kind of the input; a missing one counts as a file. A stream is standard input, or a pipe.
    kind: Literal["file", "folder", "stream", "url"]
    #: First `HEAD_BYTES` bytes of a file or an opened stream.
    data: bytes = b""
    #: The stream once it is opened; before that it has no bytes.
    file: MappedFile | None = None

    @classmethod
    def from_path(cls, path: str) -> Self:
        """Examine a path; an unreadable file has no bytes, and its reader reports why."""
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
        """Examine an opened file."""
        return cls(file.path, "stream", file.read_head(HEAD_BYTES), file)

    @property
    def suffix(self) -> str:
        """Return the suffix of the name in lower case."""
        return PurePath(self.path).suffix.lower()

    def read(self, nbytes: int) -> bytes:
        """Return the first `nbytes` bytes, or all if there are fewer; beyond `data` the file is read again."""
        if nbytes <= len(self.data) or len(self.data) < HEAD_BYTES:
            return self.data[:nbytes]
        return self.file.read_head(nbytes) if self.file else read_head(self.path, nbytes)


def iter_file_chunks(path: str | os.PathLike[str], state: FileState | None, chunk_bytes: int) -> Iterator[Bytes]:
    """Yield the bytes of a file, mapped only while read: a folder may have more files than a process can map."""
    file = MappedFile(path, expected_state=state)
    yield from file.iter_chunks(0, file.size, chunk_bytes)


def _map_file(file: BinaryIO) -> FileMapping | None:
    nbytes = os.fstat(file.fileno()).st_size
    return FileMapping(file.fileno(), nbytes) if nbytes else None


def _spool(stream: BinaryIO, label: str, max_bytes: int | None) -> FileMapping | None:
    """Read a pipe once into an unnamed file that ends with its mapping."""
    import tempfile

    with tempfile.TemporaryFile() as spool:
        while chunk := stream.read(_SPOOL_CHUNK_BYTES):
            spool.write(chunk)
            if max_bytes is not None and spool.tell() > max_bytes:
                raise LimitError(f"{label}: holds more than the limit of {max_bytes} bytes")
        spool.flush()
        return _map_file(spool)
