"""The K and V rows of one layer as the engine keeps them: one buffer, edited and zeroed in place."""

from __future__ import annotations

import numpy as np

from ...dtypes import DType, KVPair, Words
from ...packed.reserve import Pair, fork_outcome
from ..positions import PositionRuns

EXPAND_TOKENS = 64
"""Room beyond the need at each allocation."""


class Rows:
    """Live rows ``[kv_head, token, head_dim]`` of a layer and the room that is allocated for them."""

    def __init__(self, kv_heads: int, head_dim: int, dtype: DType) -> None:
        self._shape = (2, kv_heads, 0, head_dim)
        self._dtype = dtype.numpy
        self._both: Words = np.zeros(self._shape, self._dtype)
        self.tokens = 0
        self.positions = PositionRuns()

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return int(self._both.shape[2])

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffer, which clearing a range does not make smaller."""
        return int(self._both.nbytes)

    @property
    def live(self) -> KVPair:
        """K and V of all tokens, as views."""
        return self._both[0, :, : self.tokens], self._both[1, :, : self.tokens]

    def clear(self, add: int) -> None:
        """Drop everything and allocate room for `add` tokens."""
        heads, head_dim = self._shape[1], self._shape[3]
        self._both = np.zeros((2, heads, add + EXPAND_TOKENS, head_dim), self._dtype)
        self.tokens = 0
        self.positions = PositionRuns()

    def edit(self, remove: int, pairs: tuple[Pair, ...], add: int) -> None:
        """Drop the last `remove` tokens but for `pairs` of them, and make room for `add` more."""
        outcome = fork_outcome(self.tokens, remove, pairs, add, False)
        if outcome.need > self.capacity:
            self._grow(outcome.need + EXPAND_TOKENS)
        for source, to, count in outcome.moves:
            self._both[:, :, to : to + count] = self._both[:, :, source : source + count].copy()
        start = self.tokens - remove
        kept = [(source, count) for source, _, count in outcome.moves]
        self.positions = self.positions.kept([(0, start), *kept] if start > 0 else kept)
        self.tokens = outcome.past

    def append(self, keys: Words, values: Words, position: int) -> None:
        """Put new tokens, of which the first stands at `position`, behind the others; there must be room."""
        end = self.tokens + keys.shape[1]
        self._both[0, :, self.tokens : end] = keys
        self._both[1, :, self.tokens : end] = values
        self.tokens = end
        self.positions.append(position, keys.shape[1])

    def holds(self, start: int, count: int) -> bool:
        """Whether the range lies inside the live tokens."""
        return count > 0 and start >= 0 and start + count <= self.tokens

    def gather(self, start: int, count: int) -> KVPair | None:
        """Copies of a range; None where it does not lie inside the live tokens."""
        if not self.holds(start, count):
            return None
        part = np.ascontiguousarray(self._both[:, :, start : start + count])
        return part[0], part[1]

    def zero(self, start: int, count: int) -> bool:
        """Clear a range; False, and nothing done, where it does not lie inside the live tokens."""
        if not self.holds(start, count):
            return False
        self._both[:, :, start : start + count] = 0
        return True

    def scatter(self, start: int, count: int, keys: Words, values: Words) -> bool:
        """Write a range from flat words in the order ``[kv_head, token, head_dim]``; False where it does not fit."""
        shape = (self._shape[1], count, self._shape[3])
        if not self.holds(start, count) or keys.size != values.size or keys.size != shape[0] * shape[1] * shape[2]:
            return False
        self._both[0, :, start : start + count] = keys.reshape(shape)
        self._both[1, :, start : start + count] = values.reshape(shape)
        return True

    def _grow(self, room: int) -> None:
        wide = np.zeros((2, self._shape[1], room, self._shape[3]), self._dtype)
        wide[:, :, : self.capacity] = self._both
        self._both = wide
