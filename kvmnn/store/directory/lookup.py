"""Queries of the index: the longest stored prefix of a sequence, to the token, and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ..backend import PrefixMatch, StateLocation, UnitSlice
from ..namespace import Ids, TokenSequence, compute_block_keys, count_common_entries, count_common_ids, to_sort_key
from ..unit import UnitHeader
from .index import BlockRow, BranchParentRow, BranchUnitRow, Key, NumberRow, ValidatingCursor

# The index only finds. A unit has its ids, its namespace and checksums of its own, and is a miss where they differ. So
# files need no fsync, and readers no locks: a unit that was evicted between finding and opening is looked for again.
# Units get their names inside the transaction that records them, and lose them after the one that deletes them; a
# process that is killed leaves files without rows, never rows without files. A damaged index is rebuilt from the files
# under another name, as SQLite writes and removes files next to a database by its name. Uses are counted, not timed, so
# that no clock can jump. Numbers of units are never used twice.

_KEYS_PER_QUERY = 256


@dataclass(frozen=True)
class Lookup:
    """Queries of the index inside a transaction."""

    #: Cursor of the transaction.
    cursor: ValidatingCursor
    #: Reads the header of a unit from its file; returns None if the file is missing or damaged.
    read_header: Callable[[int], UnitHeader | None]
    #: Returns whether a unit is known to be damaged.
    is_damaged: Callable[[int], bool]

    def find_prefix(self, sequence: TokenSequence) -> PrefixMatch:
        """Find the longest stored prefix: whole blocks by their keys, then the tokens of the next block that match."""
        runs: list[list[int]] = []  # unit, first block, end block
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
        """Find the state of the longest prefix of at most `tokens` tokens that has one."""
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
        """Return the unit at the end of a sequence, its state unit if the model needs state; None unless all of it is
        stored.
        """
        if sequence.needs_state:
            state = self.find_state(sequence, sequence.ids.size)
            return state.unit if state is not None and state.tokens == sequence.ids.size else None
        prefix_match = self.find_prefix(sequence)
        return prefix_match.slices[-1].unit if prefix_match.tokens == sequence.ids.size else None

    def find_end(self, namespace_key: bytes, parent: bytes, last_ids: Ids, block_tokens: int) -> int | None:
        """Find the unit that contains `last_ids`, at most a block, after the block with the key `parent`; None if not
        stored.
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
        """Yield the unit of each block and its number there, up to the first block that is not stored."""
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
        """Yield the tokens that follow the last slice in its own unit."""
        for unit, skip, take in slices[-1:]:
            tokens = self.cursor.fetch_row(NumberRow, "SELECT tokens FROM unit WHERE id = ?", (unit,))
            if tokens is not None and tokens.value > skip + take:
                header = self.read_header(unit)
                if header is not None:
                    yield UnitSlice(unit, skip + take, count_common_entries(header.ids[skip + take :], next_ids))

    def _iter_branches(self, parent: bytes, next_ids: Ids, block_tokens: int) -> Iterator[UnitSlice]:
        """Yield, of the units that follow a block, the two next to the sequence in sort order: one of them matches
        longest.
        """
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
    """Return the rows of those blocks that are stored, by key."""
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
