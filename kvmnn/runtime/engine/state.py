"""What the engine's store remembers of one layer index."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..metrics import OperationLatencies
from ..schedule import LayerProgress
from .decode_cache import LayerDecodeCache
from .rows import EngineRowBuffer
from .stored_block import StoredBlock


@dataclass(eq=False)
class EmulatedLayerState:
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
    cache: LayerDecodeCache = field(default_factory=LayerDecodeCache)
    rows: EngineRowBuffer | None = None
    timings: OperationLatencies = field(default_factory=OperationLatencies)

    @property
    def to_progress(self) -> LayerProgress:
        """What the schedule looks at."""
        return LayerProgress(self.updates, self.last_step, self.watermark)

    def list_pending(self, is_store_mode: bool) -> list[StoredBlock]:
        """Blocks that still have to be restored, or decoded once."""
        return [block for block in self.blocks if (block.is_dropped if is_store_mode else not block.is_decoded)]

    def record_scheduled(self, watermark: int, token_step: int) -> None:
        """Note a scheduled block."""
        self.updates += 1
        self.watermark = watermark
        self.last_step = token_step
