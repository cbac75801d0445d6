"""The longest beginning of a text that the index knows, to the token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from .directory.index import BlockRow, BranchParentRow, BranchUnitRow, Key, NumberRow, ValidatingCursor
from .namespace import Ids, compute_block_keys, count_common_entries, count_common_ids, to_sort_key
from .unit_codec import compute_state_key

_KEYS_PER_QUERY = 256
"""Keys in one question."""


class UnitSlice(NamedTuple):
    """Tokens of a unit: `take` of them behind the first `skip`."""

    unit: int
    skip: int
    take: int


class StateLocation(NamedTuple):
    """State of a prefix: tokens of the prefix, and the number of the unit that it is stored as."""

    tokens: int
    unit: int


class PrefixMatch(NamedTuple):
    """A stored beginning: its places in order, and how many whole blocks of the text are among them."""

    slices: tuple[UnitSlice, ...]
    num_blocks: int

    @property
    def tokens(self) -> int:
        """Tokens of the text that are stored."""
        return sum(unit_slice.take for unit_slice in self.slices)

    def take_prefix(self, tokens: int, block_tokens: int) -> PrefixMatch:
        """The places of its first `tokens` tokens."""
        prefix_slices, remaining = [], tokens
        for unit_slice in self.slices:
            if remaining > 0:
                prefix_slices.append(unit_slice._replace(take=min(unit_slice.take, remaining)))
                remaining -= unit_slice.take
        return PrefixMatch(tuple(prefix_slices), min(self.num_blocks, tokens // block_tokens))


@dataclass(frozen=True)
class TokenSequence:
    """A text that is looked for.

    Parameters
    ----------
    namespace_key
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

    namespace_key: bytes
    ids: Ids
    keys: Sequence[bytes]
    block_tokens: int
    needs_state: bool = False

    def get_parent_key(self, block_index: int) -> bytes:
        """Key of the block before this one; that of the space before the first."""
        return self.keys[block_index - 1] if block_index else self.namespace_key

    def take_prefix(self, tokens: int) -> TokenSequence:
        """Its first tokens."""
        keys = self.keys[: tokens // self.block_tokens]
        return TokenSequence(self.namespace_key, self.ids[:tokens], keys, self.block_tokens, self.needs_state)

    def get_end(self, tokens: int) -> tuple[bytes, Ids]:
        """The last ids of its first `tokens` tokens, at most a block, and the key of the block before them."""
        block_index = (tokens - 1) // self.block_tokens
        return self.get_parent_key(block_index), self.ids[block_index * self.block_tokens : tokens]

    def iter_state_keys(self, tokens: int) -> Iterator[tuple[int, bytes]]:
        """Of each beginning of at most `tokens` tokens, the longest first: its tokens, and the key of its state."""
        for size in range(tokens, 0, -1):
            yield size, compute_state_key(*self.get_end(size))


@dataclass(frozen=True)
class Lookup:
    """A way to ask an index.

    Parameters
    ----------
    cursor
        In a transaction.
    read_ids
        The ids in the file of a unit; none where it cannot be read.
    is_damaged
        Whether a unit is known not to be what it should be.
    """

    cursor: ValidatingCursor
    read_ids: Callable[[int], Ids | None]
    is_damaged: Callable[[int], bool]

    def find_prefix(self, sequence: TokenSequence) -> PrefixMatch:
        """The longest stored beginning: whole blocks by their keys, and of the next block as many tokens as agree."""
        runs: list[list[int]] = []  # unit, its first block, and the block behind the last
        num_blocks = 0
        for unit, block_index in self._iter_blocks(sequence.keys):
            if runs and runs[-1][0] == unit and runs[-1][2] == block_index:
                runs[-1][2] += 1
            else:
                runs.append([unit, block_index, block_index + 1])
            num_blocks += 1
        size = sequence.block_tokens
        slices = [
            UnitSlice(unit, first_block * size, (end_block - first_block) * size)
            for unit, first_block, end_block in runs
        ]
        begin_token = num_blocks * sequence.block_tokens
        next_ids = sequence.ids[begin_token : begin_token + sequence.block_tokens]
        if next_ids.size:
            candidates = [
                *self._iter_continuation(slices, next_ids),
                *self._iter_branches(sequence.get_parent_key(num_blocks), next_ids, size),
            ]
            best_slice = max(candidates, key=lambda unit_slice: unit_slice.take, default=None)
            if best_slice and best_slice.take:
                slices = _append_slice(slices, best_slice)
        return PrefixMatch(tuple(slices), num_blocks)

    def find_state(self, sequence: TokenSequence, tokens: int) -> StateLocation | None:
        """The state of the longest beginning of at most `tokens` tokens that has one."""
        keys = sequence.iter_state_keys(tokens)
        while size_by_key := {key: size for size, key in islice(keys, _KEYS_PER_QUERY)}:
            placeholders = ",".join("?" * len(size_by_key))
            rows = self.cursor.fetch_rows(
                BranchParentRow,
                f"SELECT unit, parent FROM branch WHERE parent IN ({placeholders}) AND text = x''",
                list(size_by_key),
            )
            locations = [
                StateLocation(size_by_key[row.parent], row.unit) for row in rows if not self.is_damaged(row.unit)
            ]
            if locations:
                return max(locations)
        return None

    def last_unit(self, sequence: TokenSequence) -> int | None:
        """The unit that has the end of a text, all of which is stored: its state, where it needs that."""
        if sequence.needs_state:
            state = self.find_state(sequence, sequence.ids.size)
            return state.unit if state is not None and state.tokens == sequence.ids.size else None
        prefix_match = self.find_prefix(sequence)
        return prefix_match.slices[-1].unit if prefix_match.tokens == sequence.ids.size else None

    def find_end(self, namespace_key: bytes, parent: bytes, last_ids: Ids, block_tokens: int) -> int | None:
        """The unit that has the end of a prefix: `last_ids`, at most a block, behind the block with the key `parent`.

        None where it is not stored.
        """
        if last_ids.size == block_tokens:
            key = Key(compute_block_keys(parent, last_ids, block_tokens)[0])
            row = find_stored_blocks(self.cursor, [key]).get(key)
            return None if row is None or self.is_damaged(row.unit) else row.unit
        slices = []
        if parent != namespace_key:
            parent_row = find_stored_blocks(self.cursor, [parent]).get(Key(parent))
            if parent_row is None or self.is_damaged(parent_row.unit):
                return None
            slices = [UnitSlice(parent_row.unit, parent_row.number * block_tokens, block_tokens)]
        candidates = [*self._iter_continuation(slices, last_ids), *self._iter_branches(parent, last_ids, block_tokens)]
        return next((unit_slice.unit for unit_slice in candidates if unit_slice.take == last_ids.size), None)

    def _iter_blocks(self, keys: Sequence[bytes]) -> Iterator[tuple[int, int]]:
        """Unit, and number in it, of each block, up to the first that is not stored."""
        for begin_key in range(0, len(keys), _KEYS_PER_QUERY):
            batch = keys[begin_key : begin_key + _KEYS_PER_QUERY]
            row_by_key = find_stored_blocks(self.cursor, batch)
            for key in batch:
                if key not in row_by_key:
                    return
                if self.is_damaged(row_by_key[key].unit):
                    return
                yield row_by_key[key].unit, row_by_key[key].number

    def _iter_continuation(self, slices: Sequence[UnitSlice], next_ids: Ids) -> Iterator[UnitSlice]:
        """What follows in the unit of the last block."""
        for unit, skip, take in slices[-1:]:
            tokens = self.cursor.fetch_row(NumberRow, "SELECT tokens FROM unit WHERE id = ?", (unit,))
            if tokens is not None and tokens.value > skip + take:
                ids = self.read_ids(unit)
                if ids is not None:
                    yield UnitSlice(unit, skip + take, count_common_entries(ids[skip + take :], next_ids))

    def _iter_branches(self, parent: bytes, next_ids: Ids, block_tokens: int) -> Iterator[UnitSlice]:
        """Of all units that follow a block the two that stand beside the text: one of them agrees longest."""
        sort_key = to_sort_key(next_ids)
        for order in (">= ? ORDER BY text", "< ? ORDER BY text DESC"):
            rows = self.cursor.iter_rows(
                BranchUnitRow,
                "SELECT unit.id, unit.skip, branch.text FROM branch JOIN unit ON unit.id = branch.unit "
                f"WHERE branch.parent = ? AND branch.text {order}",
                (parent, sort_key),
            )
            branch = next((row for row in rows if not self.is_damaged(row.unit)), None)
            if branch is not None:
                yield UnitSlice(branch.unit, branch.skip * block_tokens, count_common_ids(branch.sort_key, sort_key))


def find_stored_blocks(cursor: ValidatingCursor, keys: Sequence[bytes]) -> dict[bytes, BlockRow]:
    """Of each of these blocks that is stored its unit, and its number there, as the index has them."""
    row_by_key: dict[bytes, BlockRow] = {}
    for begin_key in range(0, len(keys), _KEYS_PER_QUERY):
        batch = keys[begin_key : begin_key + _KEYS_PER_QUERY]
        placeholders = ",".join("?" * len(batch))
        rows = cursor.iter_rows(BlockRow, f"SELECT key, unit, number FROM block WHERE key IN ({placeholders})", batch)
        row_by_key.update({row.key: row for row in rows})
    return row_by_key


def _append_slice(slices: list[UnitSlice], new_slice: UnitSlice) -> list[UnitSlice]:
    last_slice = slices[-1] if slices else None
    if last_slice and last_slice.unit == new_slice.unit and last_slice.skip + last_slice.take == new_slice.skip:
        return [*slices[:-1], last_slice._replace(take=last_slice.take + new_slice.take)]
    return [*slices, new_slice]


def list_units(slices: Iterable[UnitSlice]) -> tuple[int, ...]:
    """The units, each once."""
    return tuple(dict.fromkeys(unit_slice.unit for unit_slice in slices))
