"""The engine's two caches of decoded blocks: one of each layer, one for all. Bounded in entries, not in bytes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ...dtypes import Words
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
    keys: Words
    values: Words

    def has_sizes_of(self, block: Block) -> bool:
        """Whether raw and compressed bytes agree."""
        return self.raw_bytes == block.raw_bytes and self.compressed_bytes == block.compressed_bytes

    def has_content_of(self, block: Block) -> bool:
        """Whether the sizes and one of the two hashes agree."""
        if not self.has_sizes_of(block):
            return False
        raw = block.raw_hash != 0 and block.raw_hash == self.raw_hash
        return raw or (block.blob_hash != 0 and block.blob_hash == self.blob_hash)

    def is_at(self, stored: StoredBlock) -> bool:
        """Whether it was decoded from the same place."""
        return self.start == stored.start and self.count == stored.count


def decoded_block(stored: StoredBlock, keys: Words, values: Words) -> DecodedBlock:
    """The entry for a block and what it decodes to."""
    block = stored.block
    return DecodedBlock(
        stored.start,
        stored.count,
        block.raw_hash,
        block.blob_hash,
        block.raw_bytes,
        block.compressed_bytes,
        keys,
        values,
    )


@dataclass(eq=False)
class LocalCache:
    """Entries of one layer, the oldest first."""

    entries: deque[DecodedBlock] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, stored: StoredBlock) -> tuple[str, DecodedBlock] | None:
        """How the block was found (``local_pos`` or ``local_hash``) and its entry, which is the newest then."""
        matching = [entry for entry in self.entries if entry.has_content_of(stored.block)]
        for how, found in (
            ("local_pos", [entry for entry in matching if entry.is_at(stored)]),
            ("local_hash", matching),
        ):
            if found:
                self.entries.remove(found[0])
                self.entries.append(found[0])
                return how, found[0]
        return None

    def insert(self, entry: DecodedBlock, stored: StoredBlock, capacity: int) -> None:
        """Put `entry` in as the newest; what stands for the same goes, and the oldest where there are too many."""
        block = stored.block
        kept = [
            old
            for old in self.entries
            if not (old.has_content_of(block) or (old.is_at(stored) and old.has_sizes_of(block)))
        ]
        self.entries = deque([*kept, entry], maxlen=capacity)


@dataclass(eq=False)
class GlobalCache:
    """Entries of all layers, the oldest first. Lives on when a request begins."""

    entries: deque[DecodedBlock] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, stored: StoredBlock) -> DecodedBlock | None:
        """An entry of the same content, which is the newest then."""
        for entry in self.entries:
            if entry.has_content_of(stored.block):
                self.entries.remove(entry)
                self.entries.append(entry)
                return entry
        return None

    def insert(self, entry: DecodedBlock, stored: StoredBlock, capacity: int) -> None:
        """Put `entry` in as the newest; what has the same content goes, and the oldest where there are too many."""
        kept = [old for old in self.entries if not old.has_content_of(stored.block)]
        self.entries = deque([*kept, entry], maxlen=capacity)
