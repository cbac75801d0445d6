"""What the engine reports after a call: sums over the layers in scope, peaks and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..schedule import Scope
from .state import LayerState

MICROSECOND = 1000


@dataclass
class Reported:
    """The engine's shared figures; what a call does not refresh stays as it was."""

    raw_bytes: int = 0
    compressed_bytes: int = 0
    decompressed_bytes: int = 0
    compress_us: int = 0
    decompress_us: int = 0
    fallbacks: int = 0
    skips: int = 0
    queue_depth_peak: int = 0
    async_queue_peak: int = 0
    hits: int = 0
    misses: int = 0
    ratio: float = 1.0
    codec_us: int = 0

    def refresh(self, states: Sequence[LayerState], scope: Scope) -> None:
        """Add up the layers in scope that have been updated; all updated ones where there are none."""
        updated = [index for index, state in enumerate(states) if state.updates > 0]
        chosen = [states[index] for index in updated if scope.covers(index)] or [states[index] for index in updated]
        raw = sum(state.raw_bytes for state in chosen)
        compressed = sum(state.compressed_bytes for state in chosen)
        self.skips = sum(state.skips for state in chosen)
        if raw <= 0 or compressed <= 0:
            return
        self.raw_bytes, self.compressed_bytes = raw, compressed
        self.decompressed_bytes = sum(state.decompressed_bytes for state in chosen)
        self.compress_us = sum(state.compress_ns for state in chosen) // MICROSECOND
        self.decompress_us = sum(state.decompress_ns for state in chosen) // MICROSECOND
        self.fallbacks = sum(state.fallbacks for state in chosen)
        self.ratio = float(np.float32(raw / compressed))

    @property
    def traced(self) -> tuple[int, ...]:
        """The figures of a trace, in its order."""
        return (
            self.raw_bytes,
            self.compressed_bytes,
            self.decompressed_bytes,
            self.fallbacks,
            self.skips,
            self.queue_depth_peak,
            self.async_queue_peak,
            self.hits,
            self.misses,
        )
