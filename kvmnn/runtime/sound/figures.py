"""What is counted for each layer of a sound runtime, and what is reported of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..metrics import LayerMetrics, Timings
from ..ratios import Ratios
from .layer_rows import LayerRows

MICROSECOND = 1000


@dataclass
class LayerFigures:
    """Counters of one layer since the request began."""

    raw_bytes: int = 0
    compressed_bytes: int = 0
    decompressed_bytes: int = 0
    updates: int = 0
    fallbacks: int = 0
    skips: int = 0
    appended_bytes: int = 0
    evicted_tokens: int = 0
    timings: Timings = field(default_factory=Timings)

    def metrics(self, layer: int, rows: LayerRows) -> LayerMetrics:
        """The public form, with what the layer holds now."""
        stored = [piece for piece in rows.pieces if piece.state == "stored" and piece.frames is not None]
        token_bytes = rows.raw_bytes // rows.tokens if rows.tokens else 0
        return LayerMetrics(
            layer=layer,
            tokens=rows.tokens,
            raw_bytes=self.raw_bytes,
            compressed_bytes=self.compressed_bytes,
            decompressed_bytes=self.decompressed_bytes,
            compress_us=self.timings.compress.total_ns // MICROSECOND,
            decompress_us=self.timings.decompress.total_ns // MICROSECOND,
            updates=self.updates,
            fallbacks=self.fallbacks,
            skips=self.skips,
            blocks=len(stored),
            stored_raw_bytes=sum(piece.count for piece in stored) * token_bytes,
            stored_bytes=sum(piece.held_bytes for piece in stored),
            held_bytes=rows.held_bytes,
            **self.timings.summaries(),
        )


def ratios(layers: Sequence[LayerRows], figures: Sequence[LayerFigures], cached_bytes: int) -> Ratios:
    """The ratios of all layers together; decoded copies are held, too."""
    return Ratios(
        sum(one.appended_bytes for one in figures),
        sum(rows.raw_bytes for rows in layers),
        sum(rows.held_bytes for rows in layers) + cached_bytes,
    )
