"""The newest rows of a layer, in one array that grows."""

from __future__ import annotations

from ...dtypes import Elements, KVPair
from .memory import allocate, to_read_only

MIN_GROWTH_TOKENS = 64
"""Least room beyond the need when the array grows; an eighth of the need where that is more."""


class HotBuffer:
    """Rows ``[2, kv_head, token, head_dim]`` that are appended to and never changed.

    Attributes
    ----------
    count
        Tokens.
    """

    def __init__(self, rows: Elements) -> None:
        self.count = int(rows.shape[2])
        self._set_buffer(rows)

    def _set_buffer(self, rows: Elements) -> None:
        self._rows, self._capacity = rows, int(rows.shape[2])
        self._keys, self._values = rows[0], rows[1]
        self._read_only = to_read_only(rows)

    @property
    def rows(self) -> Elements:
        """A view of all rows."""
        return self._rows[:, :, : self.count]

    def to_read_only(self) -> KVPair:
        """K and V, not to be written to."""
        keys, values = self._read_only
        return keys[:, : self.count], values[:, : self.count]

    @property
    def resident_bytes(self) -> int:
        """Bytes of the array, its room included."""
        return int(self._rows.nbytes)

    def reserve(self, num_new: int) -> None:
        """Make room for `num_new` more tokens."""
        required_tokens = self.count + num_new
        if required_tokens > self._capacity:
            heads, head_dim = self._rows.shape[1], self._rows.shape[3]
            grown_buffer = allocate(
                (2, heads, required_tokens + max(MIN_GROWTH_TOKENS, required_tokens // 8), head_dim), self._rows.dtype
            )
            grown_buffer[:, :, : self.count] = self.rows
            self._set_buffer(grown_buffer)

    def append(self, keys: Elements, values: Elements) -> None:
        """Put tokens behind the others."""
        begin, end = self.count, self.count + keys.shape[1]
        if end > self._capacity:
            self.reserve(end - begin)
        self._keys[:, begin:end] = keys
        self._values[:, begin:end] = values
        self.count = end
