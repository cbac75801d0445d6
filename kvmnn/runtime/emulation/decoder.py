"""Write stored blocks back into the layer of a call, decoded or from a cache, before the call."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from ...dtypes import KVPair
from ...errors import KvmnnError
from ...frames import fnv1a64
from ..metrics import LatencyHistogram
from .events import CallEvent, RestoreEvent, ScatterEvent
from .layer_state import DecodeCache, EmulatedLayerState, EngineRowBuffer, StoredBlock, build_decoded_block


@dataclass(eq=False)
class BlockDecoder:
    """Looks up blocks in the caches, and decodes those that are in none."""

    #: Entries of each cache; 0 turns them off.
    capacity: int
    #: Whether the hash of the decoded bytes is compared.
    is_strict: bool
    shared_cache: DecodeCache = field(default_factory=lambda: DecodeCache(is_shared=True))
    #: Cache hits and misses.
    hits: int = 0
    misses: int = 0

    def clear_if_disabled(self, state: EmulatedLayerState) -> None:
        """Clear both caches if they are disabled."""
        if self.capacity == 0:
            state.cache.entries.clear()
            self.shared_cache.entries.clear()

    def decode(self, state: EmulatedLayerState, stored_block: StoredBlock) -> tuple[str, KVPair | None]:
        """Return how the block was found (hit kind or ``"miss"``), and its flat K and V; None if it decodes to other
        bytes.
        """
        hit_kind, pair = self._find_cached(state, stored_block)
        if pair is None:
            self.misses += 1
            hit_kind = "miss"
            with suppress(KvmnnError):
                pair = stored_block.block.decode()
        else:
            self.hits += 1
        if pair is None or not self._matches_source(stored_block, pair):
            return hit_kind, None
        if self.capacity:
            entry = build_decoded_block(stored_block, *pair)
            if hit_kind == "miss":
                state.cache.insert(entry, stored_block, self.capacity)
            self.shared_cache.insert(entry, stored_block, self.capacity)
        return hit_kind, pair

    def seed(self, state: EmulatedLayerState, stored_block: StoredBlock, pair: KVPair) -> None:
        """Add the raw rows of a block to its layer's cache."""
        flat_pair = pair[0].ravel(), pair[1].ravel()
        state.cache.insert(build_decoded_block(stored_block, *flat_pair), stored_block, self.capacity)

    def reset_counts(self) -> None:
        """Reset the counts; the shared cache stays."""
        self.hits = self.misses = 0

    def _find_cached(self, state: EmulatedLayerState, stored_block: StoredBlock) -> tuple[str, KVPair | None]:
        if self.capacity == 0:
            return "", None
        hit = state.cache.find(stored_block) or self.shared_cache.find(stored_block)
        if hit is None:
            return "", None
        hit_kind, entry = hit
        if hit_kind == "global":
            state.cache.insert(entry, stored_block, self.capacity)
        return hit_kind, (entry.keys, entry.values)

    def _matches_source(self, stored_block: StoredBlock, pair: KVPair) -> bool:
        block = stored_block.block
        if pair[0].nbytes + pair[1].nbytes != block.raw_bytes:
            return False
        return not self.is_strict or (block.raw_hash != 0 and fnv1a64(pair[1], fnv1a64(pair[0])) == block.raw_hash)


NS_PER_US = 1000

DecodedRange = tuple[int, int, KVPair]
"""Start, count, and K and V, flat."""


def restore_blocks(
    state: EmulatedLayerState,
    rows: EngineRowBuffer,
    decoder: BlockDecoder,
    event: CallEvent,
    latencies: LatencyHistogram,
) -> None:
    """Look up or decode every stored block of `state` and write it into `rows`; the list is empty afterwards.

    A block that cannot be decoded counts as a fallback and stays zero. Adjacent chunks are concatenated, which mixes up
    heads if there are several (docs/runtime.md).
    """
    decoder.clear_if_disabled(state)
    chunks: list[DecodedRange] = []
    for stored_block in state.blocks:
        if not stored_block.is_dropped:
            event.num_erased += 1
            continue
        chunk = _decode_block(state, stored_block, decoder, event, latencies)
        if chunk is not None:
            chunks.append(chunk)
    state.blocks = []
    for start, count, (keys, values) in _merge_adjacent(chunks):
        start_ns = time.perf_counter_ns()
        is_written = rows.scatter(start, count, keys, values)
        state.decompress_ns += max(NS_PER_US, time.perf_counter_ns() - start_ns)
        event.scatters.append(ScatterEvent(start, count, keys.nbytes + values.nbytes, is_written))
        if is_written:
            state.decompressed_bytes += keys.nbytes + values.nbytes
        else:
            state.fallbacks += 1


def _decode_block(
    state: EmulatedLayerState,
    stored_block: StoredBlock,
    decoder: BlockDecoder,
    event: CallEvent,
    latencies: LatencyHistogram,
) -> DecodedRange | None:
    start_ns = time.perf_counter_ns()
    hit_kind, pair = decoder.decode(state, stored_block)
    block = stored_block.block
    event.restores.append(
        RestoreEvent(
            stored_block.start, stored_block.count, block.raw_bytes, block.compressed_bytes, hit_kind, pair is not None
        )
    )
    if pair is None:
        state.fallbacks += 1
        return None
    elapsed = max(NS_PER_US, time.perf_counter_ns() - start_ns)
    state.decompress_ns += elapsed
    state.timings.decompress.add(elapsed)
    latencies.add(elapsed)
    return stored_block.start, stored_block.count, pair


def _merge_adjacent(chunks: list[DecodedRange]) -> list[DecodedRange]:
    ranges: list[DecodedRange] = []
    for start, count, pair in sorted(chunks, key=lambda chunk: chunk[0]):
        if ranges and ranges[-1][0] + ranges[-1][1] == start:
            first, previous_count, (keys, values) = ranges.pop()
            joined_pair = np.concatenate([keys, pair[0]]), np.concatenate([values, pair[1]])
            ranges.append((first, previous_count + count, joined_pair))
        else:
            ranges.append((start, count, pair))
    return ranges
