"""Where writers of formats send bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from ..arrays.named_array import ArrayInfo, Piece

Runs = Iterable[tuple[int, Piece]]
"""``(array index, little-endian bytes in memory order)``, array after array."""


class Sink(Protocol):
    """Where bytes go: an `output.StagedFile`, or standard output."""

    def write(self, data: bytes | memoryview, /) -> int: ...


class SeekableSink(Sink, Protocol):
    """A sink whose position can be set; devices and pipes have none."""

    def seek(self, position: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


Writer = Callable[[SeekableSink, Sequence[ArrayInfo], Runs, dict[str, str]], None]


def beginnings(runs: Runs) -> Iterator[tuple[int, Piece, bool]]:
    current = -1
    for index, data in runs:
        yield index, data, index != current
        current = index
        del data
