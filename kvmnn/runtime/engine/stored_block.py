"""A block of the engine's store."""

from __future__ import annotations

from dataclasses import dataclass

from ...frames import Block


@dataclass(eq=False)
class StoredBlock:
    """Frames of one token range of one layer.

    Attributes
    ----------
    start, count
        The tokens.
    block
        Frames, sizes and hashes.
    is_decoded
        Probe and full: whether the block was decoded once; store: always.
    is_dropped
        Whether its rows were cleared.
    is_from_dropped
        Whether it overlaps rows that had been cleared when it was made.
    """

    start: int
    count: int
    block: Block
    is_decoded: bool
    is_dropped: bool = False
    is_from_dropped: bool = False

    @property
    def end(self) -> int:
        """The token behind the last one."""
        return self.start + self.count
