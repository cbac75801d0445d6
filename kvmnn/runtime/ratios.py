"""What a run saved: lossy, lossless and in total."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CompressionRatios:
    """Lossy, lossless and total ratio of one run: bytes of all rows over those that stay, and over those held."""

    appended_bytes: int
    live_bytes: int
    resident_bytes: int

    @property
    def lossy_ratio(self) -> float:
        """All rows ever appended over those that were not evicted."""
        return _compute_byte_ratio(self.appended_bytes, self.live_bytes)

    @property
    def lossless_ratio(self) -> float:
        """Those rows over what holds them now, hot rows and room included."""
        return _compute_byte_ratio(self.live_bytes, self.resident_bytes)

    @property
    def total_ratio(self) -> float:
        """The product: all rows over what is held."""
        return _compute_byte_ratio(self.appended_bytes, self.resident_bytes)


def compute_float32_ratio(raw_bytes: int, compressed_bytes: int) -> float:
    """As the engine keeps a ratio; 1 where nothing was encoded."""
    return float(np.float32(raw_bytes / compressed_bytes)) if compressed_bytes else 1.0


def _compute_byte_ratio(bytes_before: int, bytes_after: int) -> float:
    return bytes_before / bytes_after if bytes_after else 1.0
