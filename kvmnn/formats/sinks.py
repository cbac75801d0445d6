"""Where writers of formats send bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from ..arrays.named_array import ArrayInfo, Piece

Runs = Iterable[tuple[int, Piece]]
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


Writer = Callable[[SeekableSink, Sequence[ArrayInfo], Runs, dict[str, str]], None]
"""Writes arrays and metadata in one format."""


def beginnings(runs: Runs) -> Iterator[tuple[int, Piece, bool]]:
    """The runs, each with whether it is the first of its array."""
    current = -1
    for index, data in runs:
        yield index, data, index != current
        current = index
        del data
