"""What the engine reports after a call: sums over the layers in scope, peaks and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..schedule import CompressionScope
from .state import EmulatedLayerState

NS_PER_US = 1000


@dataclass
class EmulationReport:
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

    def refresh(self, states: Sequence[EmulatedLayerState], scope: CompressionScope) -> None:
        """Add up the layers in scope that have been updated; all updated ones where there are none."""
        updated_layers = [index for index, state in enumerate(states) if state.updates > 0]
        reported_states = [states[index] for index in updated_layers if scope.covers(index)] or [
            states[index] for index in updated_layers
        ]
        raw_bytes = sum(state.raw_bytes for state in reported_states)
        compressed_bytes = sum(state.compressed_bytes for state in reported_states)
        self.skips = sum(state.skips for state in reported_states)
        if raw_bytes <= 0 or compressed_bytes <= 0:
            return
        self.raw_bytes, self.compressed_bytes = raw_bytes, compressed_bytes
        self.decompressed_bytes = sum(state.decompressed_bytes for state in reported_states)
        self.compress_us = sum(state.compress_ns for state in reported_states) // NS_PER_US
        self.decompress_us = sum(state.decompress_ns for state in reported_states) // NS_PER_US
        self.fallbacks = sum(state.fallbacks for state in reported_states)
        self.ratio = float(np.float32(raw_bytes / compressed_bytes))

    @property
    def trace_values(self) -> tuple[int, ...]:
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
