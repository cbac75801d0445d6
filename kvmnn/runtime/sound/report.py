"""What one call of a sound runtime did."""

from __future__ import annotations

from typing import NamedTuple

from ...text import pluralize


class StrictCallResult(NamedTuple):
    """One call of one layer; a tuple, as a frozen dataclass takes longer to make than the call.

    Attributes
    ----------
    layer
        Which.
    tokens
        Tokens that it holds, the new ones included.
    evicted
        Tokens that went before the new ones came.
    planned
        Tokens that the planner means to evict at the layer's next call.
    submitted, finished
        Encodings handed in by this call, and taken in by it (of any layer).
    waiting
        Blocks of this layer that found no place in the queue; they are tried again at its next call.
    """

    layer: int
    tokens: int
    evicted: int
    planned: int
    submitted: int
    finished: int
    waiting: int

    def to_dict(self) -> dict[str, int]:
        """Name to figure."""
        return self._asdict()

    def __str__(self) -> str:
        return (
            f"layer {self.layer}: {pluralize(self.tokens, 'token')}, {self.evicted:,} evicted, "
            f"{pluralize(self.submitted, 'block')} handed in, {self.waiting:,} waiting"
        )
