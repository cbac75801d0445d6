"""Queries of the index: the longest stored prefix of a sequence, to the token, and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from ..._util.dataclass import dataclass
from ..._util.named_tuple import NamedTuple
from ..backend import PrefixMatch, StateLocation, UnitSlice
from ..namespace import (
    Ids,
    TokenSequence,
    compute_block_keys,
    count_common_entries,
    count_common_ids,
    mask_ids,
    to_sort_key,
)
from ..unit import UnitHeader
from .index import Key, ValidatingCursor

# The index only finds. A unit has its ids, its namespace and checksums of its own, and is a miss where they differ. So
# files need no fsync, and readers no locks: a unit that was evicted between finding and opening is looked for again.
# Units get their names inside the transaction that records them, and lose them after the one that deletes them; a
# process that is killed leaves files without rows, never rows without files. A damaged index is rebuilt from the files
# under another name, as SQLite writes and removes files next to a database by its name. Uses are counted, not timed, so
# that no clock can jump. Numbers of units are never used twice.

_KEYS_PER_QUERY = 256


class BlockLocation(NamedTuple):
    """The unit that contains a block, and the index of the block in it."""

    unit: int
    block_index: int


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
        num_blocks, size = 0, sequence.block_tokens
        for unit, block_index in self._iter_blocks(sequence.keys):
            if runs and runs[-1][0] == unit and runs[-1][2] == block_index:
                runs[-1][2] += 1
            else:
                runs.append([unit, block_index, block_index + 1])
            num_blocks += 1
        slices = [
            UnitSlice(unit, first_block * size, (end_block - first_block) * size)
            for unit, first_block, end_block in runs
        ]
        begin_token = num_blocks * size
        next_ids = sequence.ids[begin_token : begin_token + size]
        if next_ids.size:
            candidates = [
                *self._iter_continuation(slices, next_ids),
                *self._iter_branches(sequence.get_parent_key(num_blocks), next_ids, size),
            ]
            best = max(candidates, key=lambda unit_slice: unit_slice.take, default=None)
            if best and best.take:
                last = slices[-1] if slices else None
                if last and last.unit == best.unit and last.skip + last.take == best.skip:
                    slices[-1] = last._replace(take=last.take + best.take)
                else:
                    slices.append(best)
        return PrefixMatch(tuple(slices), num_blocks)

    def find_state(self, sequence: TokenSequence, tokens: int) -> StateLocation | None:
        """Find the state of the longest prefix of at most `tokens` tokens that has one."""
        keys = sequence.iter_state_keys(tokens)
        while size_by_key := {key: size for size, key in islice(keys, _KEYS_PER_QUERY)}:
            placeholders = ",".join("?" * len(size_by_key))
            rows = self.cursor.fetch_rows(
                tuple[int, Key],
                f"SELECT unit, parent FROM branch WHERE parent IN ({placeholders}) AND text = x''",
                list(size_by_key),
            )
            locations = [StateLocation(size_by_key[key], unit) for unit, key in rows if not self.is_damaged(unit)]
            if locations:
                return max(locations)
        return None

    def find_last_unit(self, sequence: TokenSequence) -> int | None:
        """Find the unit at the end of a sequence, the state unit if it needs one; None unless all of it is stored."""
        if sequence.needs_state:
            state = self.find_state(sequence, sequence.ids.size)
            return state.unit if state is not None and state.tokens == sequence.ids.size else None
        prefix_match = self.find_prefix(sequence)
        return prefix_match.slices[-1].unit if prefix_match.tokens == sequence.ids.size else None

    def find_end(self, namespace_key: bytes, parent: bytes, last_ids: Ids, block_tokens: int) -> int | None:
        """Find the unit that contains `last_ids`, at most a block, after the block with the key `parent`."""
        if last_ids.size == block_tokens:
            (key,) = compute_block_keys(parent, last_ids, block_tokens, self.cursor.cipher.secret)
            block = find_stored_blocks(self.cursor, [key]).get(key)
            return None if block is None or self.is_damaged(block.unit) else block.unit
        slices = []
        if parent != namespace_key:
            block = find_stored_blocks(self.cursor, [parent]).get(parent)
            if block is None or self.is_damaged(block.unit):
                return None
            slices = [UnitSlice(block.unit, block.block_index * block_tokens, block_tokens)]
        candidates = [*self._iter_continuation(slices, last_ids), *self._iter_branches(parent, last_ids, block_tokens)]
        return next((unit_slice.unit for unit_slice in candidates if unit_slice.take == last_ids.size), None)

    def _iter_blocks(self, keys: Sequence[bytes]) -> Iterator[BlockLocation]:
        """Yield the places of blocks, up to the first one that is not stored."""
        for begin_key in range(0, len(keys), _KEYS_PER_QUERY):
            batch = keys[begin_key : begin_key + _KEYS_PER_QUERY]
            block_by_key = find_stored_blocks(self.cursor, batch)
            for key in batch:
                block = block_by_key.get(key)
                if block is None or self.is_damaged(block.unit):
                    return
                yield block

    def _iter_continuation(self, slices: Sequence[UnitSlice], next_ids: Ids) -> Iterator[UnitSlice]:
        """Yield the tokens that follow the last slice in its own unit."""
        for unit, skip, take, _ in slices[-1:]:
            tokens = self.cursor.fetch_number("SELECT tokens FROM unit WHERE id = ?", (unit,))
            if tokens is not None and tokens > skip + take:
                header = self.read_header(unit)
                if header is not None:
                    yield UnitSlice(unit, skip + take, count_common_entries(header.ids[skip + take :], next_ids))

    def _iter_branches(self, parent: bytes, next_ids: Ids, block_tokens: int) -> Iterator[UnitSlice]:
        """Yield the two units after a block that are next to `next_ids` in sort order: one of them matches longest."""
        sort_key = to_sort_key(mask_ids(parent, next_ids, self.cursor.cipher.secret))
        for order in (">= ? ORDER BY text", "< ? ORDER BY text DESC"):
            rows = self.cursor.iter_rows(
                tuple[int, int, bytes],
                "SELECT unit.id, unit.skip, branch.text FROM branch JOIN unit ON unit.id = branch.unit "
                f"WHERE branch.parent = ? AND branch.text {order}",
                (parent, sort_key),
            )
            for unit, skip, unit_sort_key in rows:
                if not self.is_damaged(unit):
                    yield UnitSlice(unit, skip * block_tokens, count_common_ids(unit_sort_key, sort_key))
                    break


def find_stored_blocks(cursor: ValidatingCursor, keys: Sequence[bytes]) -> dict[bytes, BlockLocation]:
    """Return the places of those blocks that are stored, by key."""
    block_by_key: dict[bytes, BlockLocation] = {}
    for begin_key in range(0, len(keys), _KEYS_PER_QUERY):
        batch = keys[begin_key : begin_key + _KEYS_PER_QUERY]
        placeholders = ",".join("?" * len(batch))
        query = f"SELECT key, unit, number FROM block WHERE key IN ({placeholders})"
        for key, unit, block_index in cursor.iter_rows(tuple[Key, int, int], query, batch):
            block_by_key[key] = BlockLocation(unit, block_index)
    return block_by_key
