"""The newest rows of a layer, in one array that grows."""

from __future__ import annotations

from ...dtypes import KVPair, Words
from .memory import empty, read_only

ROOM_TOKENS = 64
"""Least room beyond the need when the array grows; an eighth of the need where that is more."""


class Tail:
    """Rows ``[2, kv_head, token, head_dim]`` that are appended to and never changed.

    Attributes
    ----------
    count
        Tokens.
    """

    def __init__(self, rows: Words) -> None:
        self.count = int(rows.shape[2])
        self._take(rows)

    def _take(self, rows: Words) -> None:
        self._rows, self._room = rows, int(rows.shape[2])
        self._keys, self._values = rows[0], rows[1]
        self._read_only = read_only(rows)

    @property
    def rows(self) -> Words:
        """A view of all rows."""
        return self._rows[:, :, : self.count]

    def read(self) -> KVPair:
        """K and V, not to be written to."""
        keys, values = self._read_only
        return keys[:, : self.count], values[:, : self.count]

    @property
    def held_bytes(self) -> int:
        """Bytes of the array, its room included."""
        return int(self._rows.nbytes)

    def reserve(self, add: int) -> None:
        """Make room for `add` more tokens."""
        need = self.count + add
        if need > self._room:
            heads, head_dim = self._rows.shape[1], self._rows.shape[3]
            wide = empty((2, heads, need + max(ROOM_TOKENS, need // 8), head_dim), self._rows.dtype)
            wide[:, :, : self.count] = self.rows
            self._take(wide)

    def append(self, keys: Words, values: Words) -> None:
        """Put tokens behind the others."""
        begin, end = self.count, self.count + keys.shape[1]
        if end > self._room:
            self.reserve(end - begin)
        self._keys[:, begin:end] = keys
        self._values[:, begin:end] = values
        self.count = end
