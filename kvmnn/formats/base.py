"""Format protocols and their shared parts: bytes of a file that is mapped or reassembled, and sinks for writers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from .._util.dataclass import dataclass
from ..arrays.array import ArrayInfo, Chunk
from ..arrays.source import Source
from ..dtypes import Bytes
from ..files.mapped_file import FileHead, MappedFile
from . import sidecars
from .options import ReadOptions


class FileBytes(Protocol):
    """A file that is mapped (`MappedFile`), or reassembled from frames (`PassthroughBytes`)."""

    @property
    def label(self) -> str: ...
    @property
    def size(self) -> int: ...
    def read_head(self, nbytes: int) -> bytes: ...
    def view(self, offset: int, nbytes: int, /) -> Bytes: ...
    def release_pages(self, offset: int, nbytes: int, /) -> None: ...
    def iter_chunks(self, offset: int, nbytes: int, chunk_bytes: int) -> Iterator[Bytes]: ...


ArrayChunks = Iterable[tuple[int, Chunk]]
"""``(array index, little-endian bytes in memory order)``, array after array."""


class Sink(Protocol):
    """A destination of bytes: a file being written, or standard output."""

    def write(self, data: bytes | memoryview, /) -> int: ...


class SeekableSink(Sink, Protocol):
    """A sink whose position can be set; devices and pipes have none."""

    def seek(self, position: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


ArrayWriter = Callable[[SeekableSink, Sequence[ArrayInfo], ArrayChunks, dict[str, str]], None]
"""Writes arrays and metadata in one format."""


def mark_first_chunks(chunks: ArrayChunks) -> Iterator[tuple[int, Chunk, bool]]:
    """Yield each chunk with its array index and whether it is the first of its array."""
    current_index = -1
    for index, data in chunks:
        yield index, data, index != current_index
        current_index = index
        del data


class Format(Protocol):
    """A kind of input that kvmnn reads: an entry of `kvmnn.formats.registry.FORMATS`."""

    @property
    def name(self) -> str:
        """Return the name of the format in documents and in the API."""

    def detect(self, head: FileHead) -> bool:
        """Return whether an input is of this format, by its name and first bytes; never raises."""

    def read(self, head: FileHead, options: ReadOptions) -> Source:
        """Return the arrays of an input of this format; `KvmnnError` for a damaged one."""


@dataclass(frozen=True, kw_only=True)
class PathFormat:
    """A format whose inputs are read by their path: folders of several files, and files that need others."""

    #: As for `Format`.
    name: str
    #: Possible values of `FileHead.kind` of its inputs.
    kinds: tuple[str, ...] = ("folder",)
    #: Returns whether an input of these kinds is of this format.
    check: Callable[[FileHead], bool]
    #: Reads the arrays of a path.
    read_path: Callable[[str, ReadOptions], Source]

    def detect(self, head: FileHead) -> bool:
        """Return whether an input is of this format."""
        return head.kind in self.kinds and head.file is None and self.check(head)

    def read(self, head: FileHead, options: ReadOptions) -> Source:
        """Return the arrays of an input."""
        return self.read_path(head.path, options)


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """A format whose inputs are one file, or a stream with the contents of such a file."""

    #: As for `Format`.
    name: str
    #: Suffixes, in lower case, one of which a file must have; empty if the content suffices. An opened stream may have
    #: any name.
    extensions: tuple[str, ...] = ()
    #: Possible first bytes of the content; empty if `check` decides.
    signatures: tuple[bytes, ...] = ()
    #: Returns whether a file with the suffix and the signature, or a stream, is of this format; None: it always is.
    check: Callable[[FileHead], bool] | None = None
    #: Reads the arrays of a file.
    read_file: Callable[[MappedFile, ReadOptions], Source]
    #: Whether sidecars may describe the arrays of a file (`kvmnn.formats.sidecars`).
    has_sidecars: bool = False
    #: Writes arrays to such a file; None if kvmnn cannot.
    write: ArrayWriter | None = None
    #: Whether a file can contain several arrays.
    is_multi_array: bool = False
    #: Reads a whole file for frames from which it can be restored (`EngineOptions.passthrough`); None if unsupported.
    capture: Callable[[MappedFile, ReadOptions], Source] | None = None
    #: As `read_file`, for a file that is reassembled from such frames.
    read_original: Callable[[FileBytes, ReadOptions], Source] | None = None

    def detect(self, head: FileHead) -> bool:
        """Return whether an input is of this format."""
        if head.kind not in ("file", "stream") or (self.signatures and not head.data.startswith(self.signatures)):
            return False
        if self.extensions and head.file is None and head.suffix not in self.extensions:
            return False
        return self.check is None or self.check(head)

    def read(self, head: FileHead, options: ReadOptions) -> Source:
        """Return the arrays of an input."""
        file = head.file or MappedFile(head.path, max_bytes=options.max_bytes)
        if self.capture is not None and options.engine.passthrough:
            return self.capture(file, options)
        source = self.read_file(file, options)
        if self.has_sidecars and head.file is None:
            sidecars.add_sidecars(source, os.path.dirname(head.path))
        return source


def has_format(path: str, candidate: Format) -> bool:
    """Return whether the input at a path is of a format."""
    return candidate.detect(FileHead.from_path(path))
