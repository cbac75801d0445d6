"""Decoded blocks, from a cache or from their frames."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...dtypes import KVPair
from ...errors import KvmnnError
from ...frames import fnv1a64
from .decode_cache import SharedDecodeCache, build_decoded_block
from .state import EmulatedLayerState
from .stored_block import StoredBlock


@dataclass(eq=False)
class BlockDecoder:
    """Looks blocks up and decodes those that no cache has.

    Attributes
    ----------
    capacity
        Entries of each cache; 0 turns them off.
    is_strict
        Compare the hash of what came out.
    hits, misses
        Blocks found, and not found, in a cache.
    """

    capacity: int
    is_strict: bool
    shared_cache: SharedDecodeCache = field(default_factory=SharedDecodeCache)
    hits: int = 0
    misses: int = 0

    def clear_if_disabled(self, state: EmulatedLayerState) -> None:
        """Empty both caches where they are turned off."""
        if self.capacity == 0:
            state.cache.entries.clear()
            self.shared_cache.entries.clear()

    def decode(self, state: EmulatedLayerState, stored_block: StoredBlock) -> tuple[str, KVPair | None]:
        """How the block was found and its K and V, flat; None where it does not decode to what it should."""
        hit_kind, pair = self._find_cached(state, stored_block)
        if pair is None:
            self.misses += 1
            hit_kind, pair = "miss", _decode_frames(stored_block)
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
        """Put the raw rows of a block into its layer's cache."""
        flat_pair = pair[0].ravel(), pair[1].ravel()
        state.cache.insert(build_decoded_block(stored_block, *flat_pair), stored_block, self.capacity)

    def reset_counts(self) -> None:
        """Begin to count anew; the shared cache stays."""
        self.hits = self.misses = 0

    def _find_cached(self, state: EmulatedLayerState, stored_block: StoredBlock) -> tuple[str, KVPair | None]:
        if self.capacity == 0:
            return "", None
        local_hit = state.cache.find(stored_block)
        if local_hit is not None:
            return local_hit[0], (local_hit[1].keys, local_hit[1].values)
        shared_hit = self.shared_cache.find(stored_block)
        if shared_hit is None:
            return "", None
        state.cache.insert(shared_hit, stored_block, self.capacity)
        return "global", (shared_hit.keys, shared_hit.values)

    def _matches_source(self, stored_block: StoredBlock, pair: KVPair) -> bool:
        block = stored_block.block
        if pair[0].nbytes + pair[1].nbytes != block.raw_bytes:
            return False
        if not self.is_strict:
            return True
        return block.raw_hash != 0 and fnv1a64(pair[1], fnv1a64(pair[0])) == block.raw_hash


def _decode_frames(stored_block: StoredBlock) -> KVPair | None:
    try:
        return stored_block.block.decode()
    except KvmnnError:
        return None
