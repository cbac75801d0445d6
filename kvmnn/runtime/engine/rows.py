"""The K and V rows of one layer as the engine keeps them: one buffer, edited and zeroed in place."""

from __future__ import annotations

import numpy as np

from ...dtypes import DType, Elements, KVPair
from ...packed.reserve import ReservePair, simulate_fork
from ..positions import PositionRuns

GROWTH_TOKENS = 64
"""Room beyond the need at each allocation."""


class EngineRowBuffer:
    """Live rows ``[kv_head, token, head_dim]`` of a layer and the room that is allocated for them."""

    def __init__(self, kv_heads: int, head_dim: int, dtype: DType) -> None:
        self._shape = (2, kv_heads, 0, head_dim)
        self._dtype = dtype.numpy_dtype
        self._buffer: Elements = np.zeros(self._shape, self._dtype)
        self.tokens = 0
        self.positions = PositionRuns()

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return int(self._buffer.shape[2])

    @property
    def resident_bytes(self) -> int:
        """Bytes of the buffer, which clearing a range does not make smaller."""
        return int(self._buffer.nbytes)

    @property
    def live_rows(self) -> KVPair:
        """K and V of all tokens, as views."""
        return self._buffer[0, :, : self.tokens], self._buffer[1, :, : self.tokens]

    def clear(self, num_new: int) -> None:
        """Drop everything and allocate room for `num_new` tokens."""
        heads, head_dim = self._shape[1], self._shape[3]
        self._buffer = np.zeros((2, heads, num_new + GROWTH_TOKENS, head_dim), self._dtype)
        self.tokens = 0
        self.positions = PositionRuns()

    def apply_edit(self, remove: int, pairs: tuple[ReservePair, ...], num_new: int) -> None:
        """Drop the last `remove` tokens but for `pairs` of them, and make room for `num_new` more."""
        outcome = simulate_fork(self.tokens, remove, pairs, num_new, False)
        if outcome.min_capacity > self.capacity:
            self._grow(outcome.min_capacity + GROWTH_TOKENS)
        for source, target, count in outcome.moves:
            self._buffer[:, :, target : target + count] = self._buffer[:, :, source : source + count].copy()
        start = self.tokens - remove
        kept_runs = [(source, count) for source, _, count in outcome.moves]
        self.positions = self.positions.select([(0, start), *kept_runs] if start > 0 else kept_runs)
        self.tokens = outcome.past_length

    def append(self, keys: Elements, values: Elements, position: int) -> None:
        """Put new tokens, of which the first stands at `position`, behind the others; there must be room."""
        end = self.tokens + keys.shape[1]
        self._buffer[0, :, self.tokens : end] = keys
        self._buffer[1, :, self.tokens : end] = values
        self.tokens = end
        self.positions.append(position, keys.shape[1])

    def contains_range(self, start: int, count: int) -> bool:
        """Whether the range lies inside the live tokens."""
        return count > 0 and start >= 0 and start + count <= self.tokens

    def gather(self, start: int, count: int) -> KVPair | None:
        """Copies of a range; None where it does not lie inside the live tokens."""
        if not self.contains_range(start, count):
            return None
        rows = np.ascontiguousarray(self._buffer[:, :, start : start + count])
        return rows[0], rows[1]

    def zero(self, start: int, count: int) -> bool:
        """Clear a range; False, and nothing done, where it does not lie inside the live tokens."""
        if not self.contains_range(start, count):
            return False
        self._buffer[:, :, start : start + count] = 0
        return True

    def scatter(self, start: int, count: int, keys: Elements, values: Elements) -> bool:
        """Write a range from flat words in the order ``[kv_head, token, head_dim]``; False where it does not fit."""
        shape = (self._shape[1], count, self._shape[3])
        if (
            not self.contains_range(start, count)
            or keys.size != values.size
            or keys.size != shape[0] * shape[1] * shape[2]
        ):
            return False
        self._buffer[0, :, start : start + count] = keys.reshape(shape)
        self._buffer[1, :, start : start + count] = values.reshape(shape)
        return True

    def _grow(self, capacity: int) -> None:
        grown_buffer = np.zeros((2, self._shape[1], capacity, self._shape[3]), self._dtype)
        grown_buffer[:, :, : self.capacity] = self._buffer
        self._buffer = grown_buffer
