"""Decoded blocks, from a cache or from their frames."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...dtypes import KVPair
from ...errors import KvmnnError
from ...frames import fnv1a64
from .decode_cache import GlobalCache, decoded_block
from .state import LayerState
from .stored_block import StoredBlock


@dataclass(eq=False)
class Decoder:
    """Looks blocks up and decodes those that no cache has.

    Attributes
    ----------
    capacity
        Entries of each cache; 0 turns them off.
    strict
        Compare the hash of what came out.
    hits, misses
        Blocks found, and not found, in a cache.
    """

    capacity: int
    strict: bool
    shared: GlobalCache = field(default_factory=GlobalCache)
    hits: int = 0
    misses: int = 0

    def clear_if_off(self, state: LayerState) -> None:
        """Empty both caches where they are turned off."""
        if self.capacity == 0:
            state.cache.entries.clear()
            self.shared.entries.clear()

    def decode(self, state: LayerState, stored: StoredBlock) -> tuple[str, KVPair | None]:
        """How the block was found and its K and V, flat; None where it does not decode to what it should."""
        how, pair = self._found(state, stored)
        if pair is None:
            self.misses += 1
            how, pair = "miss", _from_frames(stored)
        else:
            self.hits += 1
        if pair is None or not self._is_right(stored, pair):
            return how, None
        if self.capacity:
            entry = decoded_block(stored, *pair)
            if how == "miss":
                state.cache.insert(entry, stored, self.capacity)
            self.shared.insert(entry, stored, self.capacity)
        return how, pair

    def seed(self, state: LayerState, stored: StoredBlock, pair: KVPair) -> None:
        """Put the raw rows of a block into its layer's cache."""
        flat = pair[0].ravel(), pair[1].ravel()
        state.cache.insert(decoded_block(stored, *flat), stored, self.capacity)

    def reset(self) -> None:
        """Begin to count anew; the shared cache stays."""
        self.hits = self.misses = 0

    def _found(self, state: LayerState, stored: StoredBlock) -> tuple[str, KVPair | None]:
        if self.capacity == 0:
            return "", None
        local = state.cache.find(stored)
        if local is not None:
            return local[0], (local[1].keys, local[1].values)
        shared = self.shared.find(stored)
        if shared is None:
            return "", None
        state.cache.insert(shared, stored, self.capacity)
        return "global", (shared.keys, shared.values)

    def _is_right(self, stored: StoredBlock, pair: KVPair) -> bool:
        block = stored.block
        if pair[0].nbytes + pair[1].nbytes != block.raw_bytes:
            return False
        if not self.strict:
            return True
        return block.raw_hash != 0 and fnv1a64(pair[1], fnv1a64(pair[0])) == block.raw_hash


def _from_frames(stored: StoredBlock) -> KVPair | None:
    try:
        return stored.block.decode()
    except KvmnnError:
        return None
