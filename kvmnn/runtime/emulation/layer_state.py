"""The state of one layer in the engine: rows in one buffer, stored blocks, and caches of decoded blocks."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import field

import numpy as np

from ..._util.dataclass import dataclass
from ...dtypes import DType, Elements, KVPair
from ...frames import Block
from ...packed.compaction import ReservePair, simulate_fork_realloc
from ..metrics import OperationLatencies
from ..positions import PositionRuns

GROWTH_TOKENS = 64
"""Room beyond the need at each allocation."""


class EngineRowBuffer:
    """The buffer for rows ``[kv_head, token, head_dim]`` of a layer, of which the first tokens are live."""

    def __init__(self, kv_heads: int, head_dim: int, dtype: DType) -> None:
        self._shape = (2, kv_heads, 0, head_dim)
        self._dtype = dtype.numpy_dtype
        self._buffer: Elements = np.zeros(self._shape, self._dtype)
        self.tokens = 0
        self.positions = PositionRuns()

    @property
    def capacity(self) -> int:
        """The number of tokens that fit in the buffer."""
        return int(self._buffer.shape[2])

    @property
    def resident_bytes(self) -> int:
        """Size of the buffer in bytes; clearing a range does not reduce it."""
        return int(self._buffer.nbytes)

    @property
    def live_rows(self) -> KVPair:
        """K and V of all tokens, as views."""
        return self._buffer[0, :, : self.tokens], self._buffer[1, :, : self.tokens]

    def clear(self, num_new: int) -> None:
        """Drop everything and allocate capacity for `num_new` tokens."""
        heads, head_dim = self._shape[1], self._shape[3]
        self._buffer = np.zeros((2, heads, num_new + GROWTH_TOKENS, head_dim), self._dtype)
        self.tokens = 0
        self.positions = PositionRuns()

    def apply_edit(self, remove: int, pairs: tuple[ReservePair, ...], num_new: int) -> None:
        """Drop the last `remove` tokens except `pairs` of them, and reserve capacity for `num_new` more."""
        outcome = simulate_fork_realloc(self.tokens, remove, pairs, num_new, False)
        if outcome.min_capacity > self.capacity:
            self._grow(outcome.min_capacity + GROWTH_TOKENS)
        for source, target, count in outcome.moves:
            self._buffer[:, :, target : target + count] = self._buffer[:, :, source : source + count].copy()
        start = self.tokens - remove
        retained_runs = [(source, count) for source, _, count in outcome.moves]
        self.positions = self.positions.select([(0, start), *retained_runs] if start > 0 else retained_runs)
        self.tokens = outcome.past_length

    def append(self, keys: Elements, values: Elements, position: int) -> None:
        """Append tokens, the first at text position `position`; there must be capacity."""
        end = self.tokens + keys.shape[1]
        self._buffer[0, :, self.tokens : end] = keys
        self._buffer[1, :, self.tokens : end] = values
        self.tokens = end
        self.positions.append(position, keys.shape[1])

    def contains_range(self, start: int, count: int) -> bool:
        """Return whether the range is inside the live tokens."""
        return count > 0 and start >= 0 and start + count <= self.tokens

    def gather(self, start: int, count: int) -> KVPair | None:
        """Return copies of a range; None if it is not inside the live tokens."""
        if not self.contains_range(start, count):
            return None
        rows = np.ascontiguousarray(self._buffer[:, :, start : start + count])
        return rows[0], rows[1]

    def zero(self, start: int, count: int) -> bool:
        """Clear a range; return False and do nothing if it is not inside the live tokens."""
        if not self.contains_range(start, count):
            return False
        self._buffer[:, :, start : start + count] = 0
        return True

    def scatter(self, start: int, count: int, keys: Elements, values: Elements) -> bool:
        """Write a range of flat elements, ordered ``[kv_head, token, head_dim]``; return False if it does not fit."""
        shape = (self._shape[1], count, self._shape[3])
        if not self.contains_range(start, count) or not keys.size == values.size == math.prod(shape):
            return False
        self._buffer[0, :, start : start + count] = keys.reshape(shape)
        self._buffer[1, :, start : start + count] = values.reshape(shape)
        return True

    def _grow(self, capacity: int) -> None:
        grown_buffer = np.zeros((2, self._shape[1], capacity, self._shape[3]), self._dtype)
        grown_buffer[:, :, : self.capacity] = self._buffer
        self._buffer = grown_buffer


@dataclass(eq=False)
class StoredBlock:
    """Frames of one token range of one layer."""

    #: First token, and number of tokens.
    start: int
    count: int
    #: Frames, sizes and hashes.
    block: Block
    #: Probe and full: whether the block was decoded once; store: always.
    is_decoded: bool
    #: Whether its rows were cleared.
    is_dropped: bool = False

    @property
    def end(self) -> int:
        """The token after the last one."""
        return self.start + self.count


@dataclass(frozen=True, eq=False)
class DecodedBlock:
    """The decoded K and V of a block, flat, with the sizes and hashes that identify it."""

    start: int
    count: int
    raw_hash: int
    blob_hash: int
    raw_bytes: int
    compressed_bytes: int
    keys: Elements
    values: Elements

    def matches_sizes(self, block: Block) -> bool:
        """Return whether raw and compressed sizes are equal."""
        return self.raw_bytes == block.raw_bytes and self.compressed_bytes == block.compressed_bytes

    def matches_content(self, block: Block) -> bool:
        """Return whether the sizes and at least one of the two hashes are equal."""
        if not self.matches_sizes(block):
            return False
        matches_raw = block.raw_hash != 0 and block.raw_hash == self.raw_hash
        return matches_raw or (block.blob_hash != 0 and block.blob_hash == self.blob_hash)

    def is_same_range(self, stored_block: StoredBlock) -> bool:
        """Return whether the stored block has the same tokens."""
        return self.start == stored_block.start and self.count == stored_block.count


def build_decoded_block(stored_block: StoredBlock, keys: Elements, values: Elements) -> DecodedBlock:
    """Build the cache entry of a block and its decoded rows."""
    block = stored_block.block
    return DecodedBlock(
        stored_block.start,
        stored_block.count,
        block.raw_hash,
        block.blob_hash,
        block.raw_bytes,
        block.compressed_bytes,
        keys,
        values,
    )


@dataclass(eq=False)
class DecodeCache:
    """A cache of decoded blocks, oldest first: of one layer, or shared by all layers."""

    #: The shared cache finds blocks by content only, and survives a new request.
    is_shared: bool = False
    entries: deque[DecodedBlock] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, stored_block: StoredBlock) -> tuple[str, DecodedBlock] | None:
        """Return how a block was found, and its entry, which becomes the newest; None if it is not in the cache."""
        matches = [entry for entry in self.entries if entry.matches_content(stored_block.block)]
        if not matches:
            return None
        same_range = () if self.is_shared else [entry for entry in matches if entry.is_same_range(stored_block)]
        entry = next(iter(same_range), matches[0])
        self.entries.remove(entry)
        self.entries.append(entry)
        return "global" if self.is_shared else "local_pos" if same_range else "local_hash", entry

    def insert(self, entry: DecodedBlock, stored_block: StoredBlock, capacity: int) -> None:
        """Insert an entry; remove older ones of the same block, and the oldest beyond the capacity."""

        def is_replaced(old: DecodedBlock) -> bool:
            is_same_place = not self.is_shared and old.is_same_range(stored_block)
            return old.matches_content(stored_block.block) or (is_same_place and old.matches_sizes(stored_block.block))

        self.entries = deque([*(old for old in self.entries if not is_replaced(old)), entry], maxlen=capacity)


@dataclass(eq=False)
class EmulatedLayerState:
    """The schedule, counters, blocks and decoded blocks of one layer index."""

    last_step: int = 0
    watermark: int = 0
    updates: int = 0
    raw_bytes: int = 0
    compressed_bytes: int = 0
    decompressed_bytes: int = 0
    compress_ns: int = 0
    decompress_ns: int = 0
    fallbacks: int = 0
    num_backpressure_skips: int = 0
    blocks: list[StoredBlock] = field(default_factory=list)
    cache: DecodeCache = field(default_factory=DecodeCache)
    #: Rows of the layer that was last called with this index.
    rows: EngineRowBuffer | None = None
    timings: OperationLatencies = field(default_factory=OperationLatencies)

    def list_pending(self, is_store_mode: bool) -> list[StoredBlock]:
        """List the blocks that are still to be restored, or to be decoded once."""
        return [block for block in self.blocks if (block.is_dropped if is_store_mode else not block.is_decoded)]

    def record_scheduled(self, watermark: int, token_step: int) -> None:
        """Record a scheduled block."""
        self.updates += 1
        self.watermark = watermark
        self.last_step = token_step
