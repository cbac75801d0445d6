"""Types that formats share: bytes of a file that is mapped or rebuilt, and sinks for writers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from ..arrays.array import ArrayInfo, Chunk
from ..dtypes import Bytes


class FileBytes(Protocol):
    """A file that is mapped (`MappedFile`), or put together from frames (`PassthroughBytes`)."""

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
    """What takes bytes: a file being written, or standard output."""

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
    """The runs, each with whether it is the first of its array."""
    current_index = -1
    for index, data in chunks:
        yield index, data, index != current_index
        current_index = index
        del data
