"""Decoded rows that are kept: bounded in entries and in bytes."""

from __future__ import annotations

from ...dtypes import Words
from .piece import Piece


class DecodedRows:
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
        self._entries: dict[int, tuple[Piece, Words]] = {}
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self.hits = self.misses = self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, piece: Piece) -> Words | None:
        """The rows of a piece, if they are there."""
        found = self._entries.get(id(piece))
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        return found[1]

    def has(self, piece: Piece) -> bool:
        """Whether the rows of a piece are there."""
        return id(piece) in self._entries

    def insert(self, piece: Piece, rows: Words) -> None:
        """Keep the rows of a piece if there is room, once those of dead pieces are gone."""
        if id(piece) in self._entries or not self.has_room(rows.nbytes):
            return
        self._entries[id(piece)] = piece, rows
        self.nbytes += rows.nbytes

    def sweep(self) -> None:
        """Forget pieces that stand for no tokens any more."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry[0].alive}
        self.nbytes = sum(rows.nbytes for _, rows in self._entries.values())

    def has_room(self, nbytes: int) -> bool:
        """Whether rows of `nbytes` would be kept."""
        if nbytes > self._max_bytes or not self._max_entries:
            return False
        if self._full(nbytes):
            self.sweep()
        return not self._full(nbytes)

    def _full(self, nbytes: int) -> bool:
        return len(self._entries) >= self._max_entries or self.nbytes + nbytes > self._max_bytes
