"""All tokens of one layer: pieces, most of them as frames, and the raw tail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ...dtypes import DType, Words
from ...packed.reserve import Pair
from ..positions import PositionRuns
from ..schedule import ColdRange
from .memory import copied, empty
from .piece import Piece
from .tail import Tail

RowsOf = Callable[[Piece], Words]
"""The rows of a piece, decoded where it has none."""

WriteRows = Callable[[Piece, Words], None]
"""Writes the rows of a piece to an array of their shape."""


class LayerRows:
    """The rows of one layer and what they stand for.

    Attributes
    ----------
    pieces
        The older tokens, in their order.
    tail
        The others.
    positions
        True positions of all of them.
    """

    def __init__(self, kv_heads: int, head_dim: int, dtype: DType) -> None:
        self.pieces: list[Piece] = []
        self.tail = Tail(np.empty((2, kv_heads, 0, head_dim), dtype.numpy))
        self.positions = PositionRuns()
        self._piece_tokens = 0
        self._token_bytes = 2 * kv_heads * head_dim * dtype.itemsize

    @property
    def tokens(self) -> int:
        """Tokens of the layer."""
        return self._piece_tokens + self.tail.count

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tokens as rows."""
        return self.tokens * self._token_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows and frames that are there."""
        return sum(piece.held_bytes for piece in self.pieces) + self.tail.held_bytes

    @property
    def all(self) -> list[Pair]:
        """All tokens as pairs of index and count."""
        return [(0, self.tokens)] if self.tokens else []

    def placed(self) -> Iterator[tuple[int, Piece]]:
        """Every piece with the index of its first token."""
        offset = 0
        for piece in self.pieces:
            yield offset, piece
            offset += piece.count

    def start_of(self, wanted: Piece) -> int:
        """The index of the first token of a piece; 0 for one that is not there."""
        return next((start for start, piece in self.placed() if piece is wanted), 0)

    def append(self, keys: Words, values: Words, position: int) -> None:
        """Put new tokens, of which the first stands at `position`, behind the others."""
        self.tail.append(keys, values)
        self.positions.append(position, keys.shape[1])

    def copy_to(self, out: Words, write: WriteRows) -> None:
        """Write all rows into ``out[:, :, :tokens]``."""
        offset = 0
        for piece in self.pieces:
            write(piece, out[:, :, offset : offset + piece.count])
            offset += piece.count
        out[:, :, offset : offset + self.tail.count] = self.tail.rows

    # -- blocks --------------------------------------------------------------------------------------------------------

    def carve(self, cold: ColdRange, block: int) -> list[Piece]:
        """Cut the raw rows in `cold` into blocks, which are due now.

        Blocks have `block` tokens. A shorter run between two pieces can never grow and becomes a shorter block; what
        is too short at the end of the cold range waits there.
        """
        due: list[Piece] = []
        pieces: list[Piece] = []
        for offset, piece in self.placed():
            pieces += self._carved(piece, ColdRange(cold.begin - offset, cold.end - offset), block, due)
        offset = sum(piece.count for piece in pieces)
        first = max(0, cold.begin - offset)
        blocks = max(0, cold.end - offset - first) // block
        if blocks:
            rows = self.tail.rows
            if first:
                pieces.append(Piece(first, rows[:, :, :first].copy()))
            end = first + blocks * block
            new = [Piece(block, rows[:, :, at : at + block], "due") for at in range(first, end, block)]
            due += new
            pieces += new
            self.tail = Tail(copied(rows[:, :, end:]))
        self.pieces, self._piece_tokens = pieces, sum(piece.count for piece in pieces)
        return due

    def due_from(self, begin: int, block: int) -> int:
        """Where a cold range that begins at `begin` must end for `carve` to find a block."""
        found = max(self._piece_tokens, begin) + block
        for offset, piece in self.placed():
            first = max(0, begin - offset)
            if piece.state == "raw" and first < piece.count:
                found = min(found, offset + min(piece.count, first + block))
        return found

    def _carved(self, piece: Piece, cold: ColdRange, block: int, due: list[Piece]) -> list[Piece]:
        """A piece between others, cut where it is raw and cold; `cold` counts from its first token."""
        first, last = max(0, cold.begin), min(piece.count, cold.end)
        if last < piece.count:
            last = first + max(0, last - first) // block * block
        if piece.state != "raw" or piece.rows is None or first >= last:
            return [piece]
        bounds = [0, *range(first, last, block), last, piece.count]
        parts = []
        for begin, end in pairwise(bounds):
            if begin == end:
                continue
            cold_part = first <= begin < last
            rows = piece.rows[:, :, begin:end].copy()
            parts.append(Piece(end - begin, rows, "due" if cold_part else "raw"))
            if cold_part:
                due.append(parts[-1])
        return parts

    # -- evictions and erasures ----------------------------------------------------------------------------------------

    def kept(self, pairs: list[Pair], rows_of: RowsOf, *, block: int, hot_sink: int) -> Contents:
        """What the layer holds when only the tokens in `pairs` (index and count, ascending) stay.

        Pieces of which every token stays are left as they are. Those that are cut become raw, and so do neighbours that
        fit into one block together. Nothing is changed before `swap`.
        """
        groups: list[_Group] = []
        start = 0
        for piece in self._selected(pairs, rows_of):
            if not groups or not groups[-1].takes(piece, block=block, hot_sink=hot_sink):
                groups.append(_Group(start))
            groups[-1].pieces.append(piece)
            start += piece.count
        last = groups.pop() if groups and groups[-1].raw else None
        tail = Tail(last.rows(rows_of) if last else self.tail.rows[:, :, :0].copy())
        return Contents([group.joined(rows_of) for group in groups], tail, self.positions.kept(pairs))

    def swap(self, contents: Contents) -> None:
        """Take over what `kept` found; pieces that are gone are no longer alive."""
        staying = {id(piece) for piece in contents.pieces}
        for piece in self.pieces:
            piece.alive = id(piece) in staying
        self.pieces, self.tail, self.positions = contents.pieces, contents.tail, contents.positions
        self._piece_tokens = sum(piece.count for piece in self.pieces)

    def clear(self) -> None:
        """Drop everything."""
        self.swap(Contents([], Tail(self.tail.rows[:, :, :0].copy()), PositionRuns()))

    def _selected(self, pairs: list[Pair], rows_of: RowsOf) -> Iterator[Piece]:
        """The pieces that stay, and raw ones for the parts of others."""
        ranges = iter(pairs)
        begin, end = _bounds(next(ranges, None))
        tail = Piece(self.tail.count, self.tail.rows)
        offset = 0
        for piece in [*self.pieces, tail]:
            stop = offset + piece.count
            while begin < stop:
                low, high = max(begin, offset), min(end, stop)
                if low == offset and high == stop and piece is not tail:
                    yield piece
                elif low < high:
                    yield Piece(high - low, rows_of(piece)[:, :, low - offset : high - offset])
                if end > stop:
                    break
                begin, end = _bounds(next(ranges, None))
            offset = stop


@dataclass(frozen=True, eq=False)
class Contents:
    """What a layer holds after tokens went."""

    pieces: list[Piece]
    tail: Tail
    positions: PositionRuns


@dataclass(eq=False)
class _Group:
    """Neighbouring pieces that become one."""

    start: int
    pieces: list[Piece] = field(default_factory=list)

    @property
    def raw(self) -> bool:
        """Whether the group has to be raw: it is, or it joins several pieces."""
        return len(self.pieces) > 1 or self.pieces[0].state == "raw"

    def takes(self, piece: Piece, *, block: int, hot_sink: int) -> bool:
        """Whether `piece` belongs to the group."""
        if self.raw and piece.state == "raw":
            return True
        if self.start < hot_sink or any(one.state == "queued" for one in (*self.pieces, piece)):
            return False
        return sum(one.count for one in self.pieces) + piece.count <= block

    def rows(self, rows_of: RowsOf) -> Words:
        """The rows of all pieces, in an array of their own."""
        parts = [rows_of(piece) for piece in self.pieces]
        heads, head_dim = parts[0].shape[1], parts[0].shape[3]
        count = sum(piece.count for piece in self.pieces)
        joined = empty((2, heads, count, head_dim), parts[0].dtype)
        return np.concatenate(parts, axis=2, out=joined)

    def joined(self, rows_of: RowsOf) -> Piece:
        """The one piece."""
        only = self.pieces[0]
        if len(self.pieces) == 1 and (only.state != "raw" or only.owns_rows):
            return only
        rows = self.rows(rows_of)
        return Piece(rows.shape[2], rows)


def _bounds(pair: Pair | None) -> Pair:
    """Begin and end of a pair; beyond everything where there is none."""
    return (pair[0], sum(pair)) if pair is not None else (1 << 62, 1 << 62)
