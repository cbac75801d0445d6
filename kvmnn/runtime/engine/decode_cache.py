"""The engine's two caches of decoded blocks: one of each layer, one for all. Bounded in entries, not in bytes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ...dtypes import Elements
from ...frames import Block
from .stored_block import StoredBlock


@dataclass(frozen=True, eq=False)
class DecodedBlock:
    """K and V of a block, flat, and what it is recognised by."""

    start: int
    count: int
    raw_hash: int
    blob_hash: int
    raw_bytes: int
    compressed_bytes: int
    keys: Elements
    values: Elements

    def matches_sizes(self, block: Block) -> bool:
        """Whether raw and compressed bytes agree."""
        return self.raw_bytes == block.raw_bytes and self.compressed_bytes == block.compressed_bytes

    def matches_content(self, block: Block) -> bool:
        """Whether the sizes and one of the two hashes agree."""
        if not self.matches_sizes(block):
            return False
        matches_raw = block.raw_hash != 0 and block.raw_hash == self.raw_hash
        return matches_raw or (block.blob_hash != 0 and block.blob_hash == self.blob_hash)

    def is_same_range(self, stored_block: StoredBlock) -> bool:
        """Whether it was decoded from the same place."""
        return self.start == stored_block.start and self.count == stored_block.count


def build_decoded_block(stored_block: StoredBlock, keys: Elements, values: Elements) -> DecodedBlock:
    """The entry for a block and what it decodes to."""
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
class LayerDecodeCache:
    """Entries of one layer, the oldest first."""

    entries: deque[DecodedBlock] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, stored_block: StoredBlock) -> tuple[str, DecodedBlock] | None:
        """How the block was found (``local_pos`` or ``local_hash``) and its entry, which is the newest then."""
        matches = [entry for entry in self.entries if entry.matches_content(stored_block.block)]
        for hit_kind, candidates in (
            ("local_pos", [entry for entry in matches if entry.is_same_range(stored_block)]),
            ("local_hash", matches),
        ):
            if candidates:
                self.entries.remove(candidates[0])
                self.entries.append(candidates[0])
                return hit_kind, candidates[0]
        return None

    def insert(self, entry: DecodedBlock, stored_block: StoredBlock, capacity: int) -> None:
        """Put `entry` in as the newest; what stands for the same goes, and the oldest where there are too many."""
        block = stored_block.block
        remaining = [
            old
            for old in self.entries
            if not (old.matches_content(block) or (old.is_same_range(stored_block) and old.matches_sizes(block)))
        ]
        self.entries = deque([*remaining, entry], maxlen=capacity)


@dataclass(eq=False)
class SharedDecodeCache:
    """Entries of all layers, the oldest first. Lives on when a request begins."""

    entries: deque[DecodedBlock] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, stored_block: StoredBlock) -> DecodedBlock | None:
        """An entry of the same content, which is the newest then."""
        for entry in self.entries:
            if entry.matches_content(stored_block.block):
                self.entries.remove(entry)
                self.entries.append(entry)
                return entry
        return None

    def insert(self, entry: DecodedBlock, stored_block: StoredBlock, capacity: int) -> None:
        """Put `entry` in as the newest; what has the same content goes, and the oldest where there are too many."""
        remaining = [old for old in self.entries if not old.matches_content(stored_block.block)]
        self.entries = deque([*remaining, entry], maxlen=capacity)
