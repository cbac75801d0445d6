"""What a run saved: lossy, lossless and in total."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratios:
    """Lossy, lossless and total ratio of one run: bytes of all rows over those that stay, and over those held."""

    appended_bytes: int
    live_bytes: int
    held_bytes: int

    @property
    def lossy(self) -> float:
        """All rows ever appended over those that were not evicted."""
        return _share(self.appended_bytes, self.live_bytes)

    @property
    def lossless(self) -> float:
        """Those rows over what holds them now, hot rows and room included."""
        return _share(self.live_bytes, self.held_bytes)

    @property
    def total(self) -> float:
        """The product: all rows over what is held."""
        return _share(self.appended_bytes, self.held_bytes)


def float32_ratio(raw: int, compressed: int) -> float:
    """As the engine keeps a ratio; 1 where nothing was encoded."""
    return float(np.float32(raw / compressed)) if compressed else 1.0


def _share(before: int, after: int) -> float:
    return before / after if after else 1.0
