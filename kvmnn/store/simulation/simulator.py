"""A prefix store without contents: which tokens of a trace are found, within a limit and with a policy of eviction.

It repeats what a directory does: units of up to 512 tokens of one put, found by keys of blocks and to the symbol in the
block where two texts part; ends of texts are evicted before their beginnings; a use sets all units of a prefix to one
tick; candidates for eviction are selected 64 at a time. `tests/store/test_simulation.py` compares it with real stores.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .trace import BlockTrace

SIMULATED_POLICIES = ("lru", "benefit", "belady")
"""Least recently used; fewest seconds saved per byte so far; next use farthest away, which only a trace can know."""
_LEAVES_PER_BATCH = 64
_NO_UNIT = -1
_COMPACTION_MIN_ENTRIES = 4096


class UnitCost(NamedTuple):
    """Bytes of a unit in the store, and the seconds that it saves per use and byte."""

    nbytes: int
    benefit: float


class SimulationCounts(NamedTuple):
    """Result of a simulation."""

    #: Tokens that were found for each request.
    hits: npt.NDArray[np.int64]
    #: Bytes that were put and evicted, and units that were evicted.
    put_bytes: int
    evicted_bytes: int
    evicted_units: int
    #: Bytes at the end.
    stored_bytes: int


class StoreSimulator:
    """Runs the requests of a trace through one store: a get, and a put of what was not found.

    Parameters
    ----------
    blocks
        The trace.
    max_bytes
        Limit on the bytes of all units; None for no limit.
    policy
        One of `SIMULATED_POLICIES`.
    unit_blocks
        Maximum number of whole blocks in a unit.
    compute_cost
        Returns bytes and seconds of a unit from the tokens before it and its own.
    """

    def __init__(
        self,
        blocks: BlockTrace,
        *,
        max_bytes: int | None,
        policy: str,
        unit_blocks: int,
        compute_cost: Callable[[int, int], UnitCost],
    ) -> None:
        self._blocks = blocks
        self._max_bytes = max_bytes
        self._policy = policy
        self._unit_blocks = unit_blocks
        self._compute_cost = compute_cost
        self._next_uses = blocks.find_next_uses().tolist() if policy == "belady" else []
        self._keys = blocks.keys.tolist()
        self._owners = [_NO_UNIT] * blocks.num_keys
        """The unit of each whole block that is stored, by its key."""
        self._cost_by_span: dict[tuple[int, int, int], UnitCost] = {}
        # columns of the units
        self._parents: list[int] = []
        self._children: list[int] = []
        self._costs: list[UnitCost] = []
        self._num_uses: list[int] = []
        self._priorities: list[float] = []
        self._key_begins: list[int] = []
        self._key_ends: list[int] = []
        self._first_blocks: list[int] = []
        self._branches: dict[int, list[tuple[bytes, int]]] = {}
        """By the key before them: symbols of the first block and number of each unit, in order."""
        self._leaves: list[tuple[float, int]] = []
        self._tick = self._clock = 0.0
        self._total_bytes = self._put_bytes = self._evicted_bytes = self._evicted_units = 0

    def run(self) -> SimulationCounts:
        """Run all requests."""
        blocks, owners = self._blocks, self._owners
        block_tokens, keys, begins = blocks.block_tokens, self._keys, blocks.begins.tolist()
        has_chunks = bool(blocks.chunks)
        hits = np.zeros(len(begins) - 1, np.int64)
        for request, num_tokens in enumerate(blocks.trace.named_tokens.tolist()):
            begin, end = begins[request], begins[request + 1]
            units: list[int] = []
            num_matched = 0
            unit = _NO_UNIT
            # a partial block has a key; where no part of it can match it is a block as any other
            for key in keys[begin : begin + num_tokens // block_tokens if has_chunks else end]:
                owner = owners[key]
                if owner < 0:
                    break
                if owner != unit:
                    units.append(owner)
                    unit = owner
                num_matched += 1
            hit = min(num_matched * block_tokens, num_tokens)
            if has_chunks and hit < num_tokens:
                partial_tokens, partial_unit = self._match_partially(begin, num_matched, unit)
                if partial_tokens:
                    hit = min(hit + partial_tokens, num_tokens)
                    if partial_unit != unit:
                        units.append(partial_unit)
            hits[request] = hit
            if units:
                self._touch(units, begin)
            if hit < num_tokens:
                self._put(begin, end, num_matched, num_tokens)
                if units:
                    self._touch([unit for unit in units if self._children[unit] >= 0], begin)
        return SimulationCounts(hits, self._put_bytes, self._evicted_bytes, self._evicted_units, self._total_bytes)

    def _match_partially(self, begin: int, num_matched: int, unit: int) -> tuple[int, int]:
        """Return how many tokens of the first block that is not stored match a unit, and that unit."""
        chunk = self._blocks.chunks[self._keys[begin + num_matched]]
        parent = self._keys[begin + num_matched - 1] if num_matched else _NO_UNIT
        candidates: list[tuple[bytes, int]] = []
        if unit >= 0:
            index = self._key_begins[unit] + num_matched - self._first_blocks[unit]
            if index < self._key_ends[unit]:
                candidates.append((self._blocks.chunks[self._keys[index]], unit))
        branches = self._branches.get(parent)
        if branches:
            place = bisect_left(branches, (chunk, 0))
            candidates += branches[place : place + 1]
            candidates += branches[place - 1 : place] if place else []
        best_symbols, best_unit = 0, _NO_UNIT
        for stored_chunk, stored_unit in candidates:
            num_symbols = _count_common_symbols(stored_chunk, chunk)
            if num_symbols > best_symbols:
                best_symbols, best_unit = num_symbols, stored_unit
        return best_symbols * self._blocks.trace.symbol_tokens, best_unit

    def _touch(self, units: Sequence[int], begin: int) -> None:
        """Record one use of units."""
        self._tick += 1
        policy, children, priorities = self._policy, self._children, self._priorities
        for unit in units:
            if policy == "lru":
                priority = self._tick
            elif policy == "benefit":
                self._num_uses[unit] += 1
                priority = self._clock + self._num_uses[unit] * self._costs[unit].benefit
            else:
                priority = -self._find_next_use(unit, begin)
            if priority != priorities[unit]:
                priorities[unit] = priority
                if not children[unit]:
                    heapq.heappush(self._leaves, (priority, -unit))
        if len(self._leaves) > _COMPACTION_MIN_ENTRIES + 4 * len(self._children):
            self._leaves = sorted({entry for entry in self._leaves if self._is_current(entry)})

    def _find_next_use(self, unit: int, begin: int) -> float:
        """Return the next request after this one that uses the first block of a unit."""
        index = begin + self._first_blocks[unit]
        is_on_path = index < len(self._next_uses) and self._keys[index] == self._keys[self._key_begins[unit]]
        return self._next_uses[index] if is_on_path else -self._priorities[unit]

    def _is_current(self, entry: tuple[float, int]) -> bool:
        priority, negative_unit = entry
        return not self._children[-negative_unit] and self._priorities[-negative_unit] == priority

    def _put(self, begin: int, end: int, num_matched: int, num_tokens: int) -> None:
        """Add units for the blocks of a request that are not stored; its keys are those from `begin` to `end`."""
        self._tick += 1
        keys, owners, costs = self._keys, self._owners, self._cost_by_span
        block_tokens, num_keys = self._blocks.block_tokens, end - begin
        has_chunks = bool(self._blocks.chunks)
        num_whole = num_tokens // block_tokens if has_chunks else num_keys
        parent = owners[keys[begin + num_matched - 1]] if num_matched else _NO_UNIT
        first_block, unit = num_matched, len(self._parents)
        if parent >= 0:
            self._children[parent] += 1
        while first_block < num_keys:
            end_block = first_block + self._unit_blocks
            if end_block >= num_whole:
                end_block = num_keys if first_block + self._unit_blocks >= num_whole else num_whole
            span = first_block, end_block, num_tokens if end_block == num_keys else 0
            cost = costs.get(span)
            if cost is None:
                first_token = first_block * block_tokens
                end_token = min(end_block * block_tokens, num_tokens)
                costs[span] = cost = self._compute_cost(first_token, end_token - first_token)
            key_begin, key_end = begin + first_block, begin + end_block
            self._parents.append(parent)
            self._children.append(1)
            self._costs.append(cost)
            self._num_uses.append(1)
            self._key_begins.append(key_begin)
            self._key_ends.append(key_end)
            self._first_blocks.append(first_block)
            for index in range(key_begin, min(key_end, begin + num_whole)):
                owners[keys[index]] = unit
            if self._policy == "lru":
                self._priorities.append(self._tick)
            elif self._policy == "benefit":
                self._priorities.append(self._clock + cost.benefit)
            else:
                self._priorities.append(-self._next_uses[key_begin])
            self._total_bytes += cost.nbytes
            self._put_bytes += cost.nbytes
            if has_chunks:
                self._add_branch(unit)
            parent, first_block, unit = unit, end_block, unit + 1
        self._children[-1] = 0
        heapq.heappush(self._leaves, (self._priorities[-1], 1 - unit))
        if self._max_bytes is not None and self._total_bytes > self._max_bytes:
            self._evict(self._max_bytes)

    def _add_branch(self, unit: int) -> None:
        """Record a unit after a block; remove the partial block that it continues."""
        parent_key, entry = self._get_branch(unit)
        branches = self._branches.setdefault(parent_key, [])
        place = bisect_left(branches, (entry[0], 0))
        tail_chunk, tail_unit = branches[place - 1] if place else (b"", _NO_UNIT)
        insort(branches, entry)
        if tail_unit >= 0 and not self._children[tail_unit] and entry[0].startswith(tail_chunk):
            tail_key = self._key_begins[tail_unit]
            is_partial_block = self._key_ends[tail_unit] == tail_key + 1 and self._owners[self._keys[tail_key]] < 0
            if is_partial_block:
                self._delete(tail_unit)

    def _get_branch(self, unit: int) -> tuple[int, tuple[bytes, int]]:
        """Return the key before a unit, and its entry in `_branches`."""
        index = self._key_begins[unit]
        parent_key = self._keys[index - 1] if self._first_blocks[unit] else _NO_UNIT
        return parent_key, (self._blocks.chunks[self._keys[index]], unit)

    def _delete(self, unit: int) -> int:
        """Remove a unit; return the unit before it if that is a leaf now."""
        keys, owners, children = self._keys, self._owners, self._children
        for index in range(self._key_begins[unit], self._key_ends[unit]):
            if owners[keys[index]] == unit:  # a partial block at the end has no owner
                owners[keys[index]] = _NO_UNIT
        children[unit] = -1
        self._total_bytes -= self._costs[unit].nbytes
        if self._blocks.chunks:
            parent_key, entry = self._get_branch(unit)
            branches = self._branches[parent_key]
            del branches[bisect_left(branches, entry)]
            if not branches:
                del self._branches[parent_key]
        parent = self._parents[unit]
        if parent < 0:
            return _NO_UNIT
        children[parent] -= 1
        return parent if not children[parent] else _NO_UNIT

    def _evict(self, max_bytes: int) -> None:
        exposed: list[int] = []
        num_batch = 0
        while self._total_bytes > max_bytes:
            entry = heapq.heappop(self._leaves) if self._leaves and num_batch < _LEAVES_PER_BATCH else None
            if entry is None:
                if not exposed and not num_batch:
                    break
                self._push_leaves(exposed)
                exposed, num_batch = [], 0
            elif self._is_current(entry):
                if self._policy == "benefit":  # what is put later must beat what was evicted
                    self._clock = max(self._clock, entry[0])
                parent = self._delete(-entry[1])
                self._evicted_units += 1
                self._evicted_bytes += self._costs[-entry[1]].nbytes
                num_batch += 1
                if parent >= 0:
                    exposed.append(parent)
        self._push_leaves(exposed)

    def _push_leaves(self, units: Sequence[int]) -> None:
        for unit in units:
            if not self._children[unit]:
                heapq.heappush(self._leaves, (self._priorities[unit], -unit))


def _count_common_symbols(first: bytes, second: bytes) -> int:
    """Return the length of the common prefix of two lists of big-endian 32-bit symbols."""
    size = min(len(first), len(second))
    if first[:size] == second[:size]:
        return size // 4
    differing = np.frombuffer(first[:size], np.uint32) != np.frombuffer(second[:size], np.uint32)
    return int(differing.argmax())
