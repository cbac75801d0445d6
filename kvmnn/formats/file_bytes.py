"""The bytes of a file, whoever holds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ..dtypes import Bytes


class FileBytes(Protocol):
    """A file that is mapped (`MappedFile`), or put together from frames (`KeptBytes`)."""

    @property
    def label(self) -> str: ...
    @property
    def size(self) -> int: ...
    def head(self, nbytes: int) -> bytes: ...
    def view(self, offset: int, nbytes: int, /) -> Bytes: ...
    def drop(self, offset: int, nbytes: int, /) -> None: ...
    def runs(self, offset: int, nbytes: int, step: int) -> Iterator[Bytes]: ...
