"""The newest rows of a layer, in one array that grows."""

from __future__ import annotations

from ...dtypes import Words
from .memory import empty

ROOM_TOKENS = 64
"""Least room beyond the need when the array grows; an eighth of the need where that is more."""


class Tail:
    """Rows ``[2, kv_head, token, head_dim]`` that are appended to and never changed."""

    def __init__(self, rows: Words) -> None:
        self._rows = rows
        self.count = int(rows.shape[2])

    @property
    def rows(self) -> Words:
        """A view of all rows."""
        return self._rows[:, :, : self.count]

    @property
    def held_bytes(self) -> int:
        """Bytes of the array, its room included."""
        return int(self._rows.nbytes)

    def reserve(self, add: int) -> None:
        """Make room for `add` more tokens."""
        need = self.count + add
        if need > self._rows.shape[2]:
            heads, head_dim = self._rows.shape[1], self._rows.shape[3]
            wide = empty((2, heads, need + max(ROOM_TOKENS, need // 8), head_dim), self._rows.dtype)
            wide[:, :, : self.count] = self.rows
            self._rows = wide

    def append(self, keys: Words, values: Words) -> None:
        """Put tokens behind the others."""
        add = keys.shape[1]
        self.reserve(add)
        self._rows[0, :, self.count : self.count + add] = keys
        self._rows[1, :, self.count : self.count + add] = values
        self.count += add
