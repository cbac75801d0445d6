"""What the engine's store remembers of one layer index."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..metrics import Timings
from ..schedule import Progress
from .decode_cache import LocalCache
from .rows import Rows
from .stored_block import StoredBlock


@dataclass(eq=False)
class LayerState:
    """Schedule, figures, blocks and decoded blocks of one layer index.

    Attributes
    ----------
    rows
        The rows of the layer that was last called under this index.
    """

    last_step: int = 0
    watermark: int = 0
    updates: int = 0
    raw_bytes: int = 0
    compressed_bytes: int = 0
    decompressed_bytes: int = 0
    compress_ns: int = 0
    decompress_ns: int = 0
    fallbacks: int = 0
    skips: int = 0
    blocks: list[StoredBlock] = field(default_factory=list)
    cache: LocalCache = field(default_factory=LocalCache)
    rows: Rows | None = None
    timings: Timings = field(default_factory=Timings)

    @property
    def progress(self) -> Progress:
        """What the schedule looks at."""
        return Progress(self.updates, self.last_step, self.watermark)

    def pending(self, store: bool) -> list[StoredBlock]:
        """Blocks that still have to be restored, or decoded once."""
        return [block for block in self.blocks if (block.dropped if store else not block.decoded)]

    def advance(self, watermark: int, token_step: int) -> None:
        """Note a scheduled block."""
        self.updates += 1
        self.watermark = watermark
        self.last_step = token_step
