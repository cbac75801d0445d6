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
    decoded
        Probe and full: whether the block was decoded once; store: always.
    dropped
        Whether its rows were cleared.
    from_dropped
        Whether it overlaps rows that had been cleared when it was made.
    """

    start: int
    count: int
    block: Block
    decoded: bool
    dropped: bool = False
    from_dropped: bool = False

    @property
    def end(self) -> int:
        """The token behind the last one."""
        return self.start + self.count
