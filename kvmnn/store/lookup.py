"""The longest beginning of a text that the index knows, to the token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from .prefix_state import state_key
from .rows import BlockRow, BranchEndRow, BranchRow, Cursor, Key, Number
from .token_ids import Ids, agreeing, agreeing_texts, as_text, block_keys

_AT_ONCE = 256
"""Keys in one question."""


class Place(NamedTuple):
    """Tokens of a unit: `take` of them behind the first `skip`."""

    unit: int
    skip: int
    take: int


class StatePlace(NamedTuple):
    """State of a prefix: tokens of the prefix, and the number of the unit that it is stored as."""

    tokens: int
    unit: int


class Found(NamedTuple):
    """A stored beginning: its places in order, and how many whole blocks of the text are among them."""

    places: tuple[Place, ...]
    blocks: int

    @property
    def tokens(self) -> int:
        """Tokens of the text that are stored."""
        return sum(place.take for place in self.places)

    def beginning(self, tokens: int, block_tokens: int) -> Found:
        """The places of its first `tokens` tokens."""
        places, left = [], tokens
        for place in self.places:
            if left > 0:
                places.append(place._replace(take=min(place.take, left)))
                left -= place.take
        return Found(tuple(places), min(self.blocks, tokens // block_tokens))


@dataclass(frozen=True)
class Text:
    """A text that is looked for.

    Parameters
    ----------
    space
        Key of its space.
    ids
        Of the whole text.
    keys
        Of its whole blocks.
    block_tokens
        Of the store.
    needs_state
        Whether its model has windows or state: a stored prefix is of use only where these are stored as well.
    """

    space: bytes
    ids: Ids
    keys: Sequence[bytes]
    block_tokens: int
    needs_state: bool = False

    def key_before(self, block: int) -> bytes:
        """Key of the block before this one; that of the space before the first."""
        return self.keys[block - 1] if block else self.space

    def beginning(self, tokens: int) -> Text:
        """Its first tokens."""
        keys = self.keys[: tokens // self.block_tokens]
        return Text(self.space, self.ids[:tokens], keys, self.block_tokens, self.needs_state)

    def end(self, tokens: int) -> tuple[bytes, Ids]:
        """The last ids of its first `tokens` tokens, at most a block, and the key of the block before them."""
        block = (tokens - 1) // self.block_tokens
        return self.key_before(block), self.ids[block * self.block_tokens : tokens]

    def state_keys(self, tokens: int) -> Iterator[tuple[int, bytes]]:
        """Of each beginning of at most `tokens` tokens, the longest first: its tokens, and the key of its state."""
        for size in range(tokens, 0, -1):
            yield size, state_key(*self.end(size))


@dataclass(frozen=True)
class Lookup:
    """A way to ask an index.

    Parameters
    ----------
    cursor
        In a transaction.
    ids_of
        The ids in the file of a unit; none where it cannot be read.
    is_bad
        Whether a unit is known not to be what it should be.
    """

    cursor: Cursor
    ids_of: Callable[[int], Ids | None]
    is_bad: Callable[[int], bool]

    def find(self, text: Text) -> Found:
        """The longest stored beginning: whole blocks by their keys, and of the next block as many tokens as agree."""
        runs: list[list[int]] = []  # unit, its first block, and the block behind the last
        blocks = 0
        for unit, number in self._blocks(text.keys):
            if runs and runs[-1][0] == unit and runs[-1][2] == number:
                runs[-1][2] += 1
            else:
                runs.append([unit, number, number + 1])
            blocks += 1
        size = text.block_tokens
        places = [Place(unit, first * size, (end - first) * size) for unit, first, end in runs]
        begin = blocks * text.block_tokens
        rest = text.ids[begin : begin + text.block_tokens]
        if rest.size:
            found = [*self._behind(places, rest), *self._branches(text.key_before(blocks), rest, size)]
            best = max(found, key=lambda place: place.take, default=None)
            if best and best.take:
                places = _joined(places, best)
        return Found(tuple(places), blocks)

    def find_state(self, text: Text, tokens: int) -> StatePlace | None:
        """The state of the longest beginning of at most `tokens` tokens that has one."""
        keys = text.state_keys(tokens)
        while asked := {key: size for size, key in islice(keys, _AT_ONCE)}:
            marks = ",".join("?" * len(asked))
            rows = self.cursor.all_rows(
                BranchEndRow,
                f"SELECT unit, parent FROM branch WHERE parent IN ({marks}) AND text = x''",
                list(asked),
            )
            found = [StatePlace(asked[row.parent], row.unit) for row in rows if not self.is_bad(row.unit)]
            if found:
                return max(found)
        return None

    def last_unit(self, text: Text) -> int | None:
        """The unit that has the end of a text, all of which is stored: its state, where it needs that."""
        if text.needs_state:
            state = self.find_state(text, text.ids.size)
            return state.unit if state is not None and state.tokens == text.ids.size else None
        found = self.find(text)
        return found.places[-1].unit if found.tokens == text.ids.size else None

    def find_end(self, space: bytes, parent: bytes, rest: Ids, block_tokens: int) -> int | None:
        """The unit that has the end of a prefix: `rest`, at most a block, behind the block with the key `parent`.

        None where it is not stored.
        """
        if rest.size == block_tokens:
            key = Key(block_keys(parent, rest, block_tokens)[0])
            row = stored_blocks(self.cursor, [key]).get(key)
            return None if row is None or self.is_bad(row.unit) else row.unit
        places = []
        if parent != space:
            before = stored_blocks(self.cursor, [parent]).get(Key(parent))
            if before is None or self.is_bad(before.unit):
                return None
            places = [Place(before.unit, before.number * block_tokens, block_tokens)]
        found = [*self._behind(places, rest), *self._branches(parent, rest, block_tokens)]
        return next((place.unit for place in found if place.take == rest.size), None)

    def _blocks(self, keys: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        """Unit, and number in it, of each block, up to the first that is not stored."""
        for begin in range(0, len(keys), _AT_ONCE):
            asked = keys[begin : begin + _AT_ONCE]
            known = stored_blocks(self.cursor, asked)
            for key in asked:
                if key not in known:
                    return
                if self.is_bad(known[key].unit):
                    return
                yield known[key].unit, known[key].number

    def _behind(self, places: Sequence[Place], rest: Ids) -> Iterator[Place]:
        """What follows in the unit of the last block."""
        for unit, skip, take in places[-1:]:
            tokens = self.cursor.row(Number, "SELECT tokens FROM unit WHERE id = ?", (unit,))
            if tokens is not None and tokens.value > skip + take:
                ids = self.ids_of(unit)
                if ids is not None:
                    yield Place(unit, skip + take, agreeing(ids[skip + take :], rest))

    def _branches(self, parent: bytes, rest: Ids, block_tokens: int) -> Iterator[Place]:
        """Of all units that follow a block the two that stand beside the text: one of them agrees longest."""
        wanted = as_text(rest)
        for order in (">= ? ORDER BY text", "< ? ORDER BY text DESC"):
            rows = self.cursor.rows(
                BranchRow,
                "SELECT unit.id, unit.skip, branch.text FROM branch JOIN unit ON unit.id = branch.unit "
                f"WHERE branch.parent = ? AND branch.text {order}",
                (parent, wanted),
            )
            branch = next((row for row in rows if not self.is_bad(row.unit)), None)
            if branch is not None:
                yield Place(branch.unit, branch.skip * block_tokens, agreeing_texts(branch.text, wanted))


def stored_blocks(cursor: Cursor, keys: Sequence[bytes]) -> dict[bytes, BlockRow]:
    """Of each of these blocks that is stored its unit, and its number there, as the index has them."""
    found: dict[bytes, BlockRow] = {}
    for begin in range(0, len(keys), _AT_ONCE):
        asked = keys[begin : begin + _AT_ONCE]
        marks = ",".join("?" * len(asked))
        rows = cursor.rows(BlockRow, f"SELECT key, unit, number FROM block WHERE key IN ({marks})", asked)
        found.update({row.key: row for row in rows})
    return found


def _joined(places: list[Place], tail: Place) -> list[Place]:
    last = places[-1] if places else None
    if last and last.unit == tail.unit and last.skip + last.take == tail.skip:
        return [*places[:-1], last._replace(take=last.take + tail.take)]
    return [*places, tail]


def units_of(places: Iterable[Place]) -> tuple[int, ...]:
    """The units, each once."""
    return tuple(dict.fromkeys(place.unit for place in places))
