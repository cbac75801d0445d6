"""One step of a replay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReplayPoint:
    """Figures after a step, sums over the layers.

    Attributes
    ----------
    appended_bytes, live_bytes, held_bytes
        Of all rows so far; of those that are left; of the rows, frames and decoded copies that hold them.
    ratio
        Raw over compressed bytes of everything encoded so far; None before the first block.
    step_us
        How long the step took, attention and model left out.
    """

    step: int
    tokens: int
    appended_bytes: int
    live_bytes: int
    held_bytes: int
    ratio: float | None
    queue_depth_peak: int
    step_us: float

    def __str__(self) -> str:
        share = "-" if self.ratio is None else f"{self.ratio:.3f}"
        sizes = f"{self.live_bytes:>13,} {self.held_bytes:>13,} {share:>7}"
        return f"{self.step:>6,} {self.tokens:>8,} {sizes} {self.queue_depth_peak:>6,} {self.step_us:>9,.0f}"
