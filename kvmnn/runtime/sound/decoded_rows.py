"""Decoded rows that are kept: bounded in entries and in bytes."""

from __future__ import annotations

from ...dtypes import Elements
from .piece import TokenSegment


class DecodedRowCache:
    """Rows of stored pieces that need not be decoded again.

    Every call of a layer reads all of its pieces in turn. A cache that drops the entry that was not used for longest
    would drop each one just before it is read; this one keeps what it has and takes new pieces where there is room.

    Attributes
    ----------
    hits, misses
        Pieces found, and not found.
    nbytes
        Bytes of all rows.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._entries: dict[int, tuple[TokenSegment, Elements]] = {}
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self.hits = self.misses = self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, segment: TokenSegment) -> Elements | None:
        """The rows of a piece, if they are there."""
        entry = self._entries.get(id(segment))
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        return entry[1]

    def contains(self, segment: TokenSegment) -> bool:
        """Whether the rows of a piece are there."""
        return id(segment) in self._entries

    def insert(self, segment: TokenSegment, rows: Elements) -> None:
        """Keep the rows of a piece if there is room, once those of dead pieces are gone."""
        if id(segment) in self._entries or not self.has_capacity(rows.nbytes):
            return
        self._entries[id(segment)] = segment, rows
        self.nbytes += rows.nbytes

    def remove_dead(self) -> None:
        """Forget pieces that stand for no tokens any more."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry[0].is_alive}
        self.nbytes = sum(rows.nbytes for _, rows in self._entries.values())

    def has_capacity(self, nbytes: int) -> bool:
        """Whether rows of `nbytes` would be kept."""
        if nbytes > self._max_bytes or not self._max_entries:
            return False
        if self._is_full(nbytes):
            self.remove_dead()
        return not self._is_full(nbytes)

    def _is_full(self, nbytes: int) -> bool:
        return len(self._entries) >= self._max_entries or self.nbytes + nbytes > self._max_bytes
