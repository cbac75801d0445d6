"""What is counted for each layer of a sound runtime, and what is reported of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..metrics import OperationLatencies, RuntimeLayerMetrics
from ..ratios import CompressionRatios
from .layer_rows import LayerStorage

NS_PER_US = 1000


@dataclass
class RuntimeLayerCounters:
    """Counters of one layer since the request began."""

    raw_bytes: int = 0
    compressed_bytes: int = 0
    decompressed_bytes: int = 0
    updates: int = 0
    fallbacks: int = 0
    skips: int = 0
    appended_bytes: int = 0
    evicted_tokens: int = 0
    timings: OperationLatencies = field(default_factory=OperationLatencies)

    def to_metrics(self, layer: int, rows: LayerStorage) -> RuntimeLayerMetrics:
        """The public form, with what the layer holds now."""
        stored_segments = [
            segment for segment in rows.segments if segment.state == "stored" and segment.frames is not None
        ]
        token_bytes = rows.raw_bytes // rows.tokens if rows.tokens else 0
        return RuntimeLayerMetrics(
            layer=layer,
            tokens=rows.tokens,
            raw_bytes=self.raw_bytes,
            compressed_bytes=self.compressed_bytes,
            decompressed_bytes=self.decompressed_bytes,
            compress_us=self.timings.compress.total_ns // NS_PER_US,
            decompress_us=self.timings.decompress.total_ns // NS_PER_US,
            updates=self.updates,
            fallbacks=self.fallbacks,
            skips=self.skips,
            blocks=len(stored_segments),
            stored_raw_bytes=sum(segment.count for segment in stored_segments) * token_bytes,
            stored_bytes=sum(segment.resident_bytes for segment in stored_segments),
            held_bytes=rows.resident_bytes,
            **self.timings.summarize(),
        )


def compute_ratios(
    layers: Sequence[LayerStorage], counters: Sequence[RuntimeLayerCounters], cached_bytes: int
) -> CompressionRatios:
    """The ratios of all layers together; decoded copies are held, too."""
    return CompressionRatios(
        sum(layer_counters.appended_bytes for layer_counters in counters),
        sum(rows.raw_bytes for rows in layers),
        sum(rows.resident_bytes for rows in layers) + cached_bytes,
    )
