"""The bytes of a file, whoever holds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

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
