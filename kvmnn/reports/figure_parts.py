"""What figures share: why one is not drawn, what its bars mean, and axes with plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .rows import ResultRow
from .series import MeasuredPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Measure = Callable[[ResultRow, float], MeasuredPoint]


def format_interval_note(rows: Sequence[ResultRow], mark: str = "Bars") -> str:
    """What `mark` in a figure of these rows is: intervals, and over how many documents; empty where there are none."""
    num_documents = [
        row.versus_full.documents for row in rows if row.versus_full is not None and row.versus_full.low is not None
    ]
    if not num_documents:
        return ""
    return f"{mark}: 95 % interval of the difference to the full cache, paired over {num_documents[0]:,} documents."


def format_no_eviction_note(rows: Sequence[ResultRow], mark: str = "Hollow") -> str:
    """Return what `mark` in a figure of these rows is; empty where every policy evicted something."""
    return f"{mark}: evicted nothing in these texts." if any(row.has_no_eviction for row in rows) else ""


def join_sentences(*texts: str) -> str:
    """Return those that say something as one line."""
    return " ".join(text for text in texts if text)


_MIN_TICKS, _MAX_TICKS = 5, 12
_TICK_STEPS = (
    (1.0, 2.0, 5.0),
    (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0),
)
"""What ticks of a logarithmic axis are powers of ten times."""


class NothingToShowError(Exception):
    """The results hold nothing for a plot; the text is the reason."""


def scale_axis(axes: Axes, name: str, values: Sequence[float]) -> None:
    """An axis (``"x"`` or ``"y"``) of plain numbers, logarithmic where the values are far apart."""
    if max(values) <= 3 * min(values):
        return
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    (axes.set_xscale if name == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if name == "x" else axes.yaxis
    low, high = min(values), max(values)
    margin_factor = (high / low) ** 0.1
    axis.set_major_locator(FixedLocator(compute_log_ticks(low / margin_factor, high * margin_factor)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def compute_log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, at least five where there are as many."""
    ticks: list[float] = []
    for steps in _TICK_STEPS:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) >= _MIN_TICKS:
            break
    return ticks[:: max(1, -(-len(ticks) // _MAX_TICKS))]


def thin_ticks(ticks: Sequence[int], factor: float) -> list[int]:
    """Ascending ticks without those that would touch the one before."""
    kept_ticks: list[int] = []
    for tick in ticks:
        if not kept_ticks or tick > factor * kept_ticks[-1]:
            kept_ticks.append(tick)
    return kept_ticks


def compute_dodge(index: int, count: int) -> float:
    """How far (in octaves) to the side a line is drawn, so that error bars do not cover each other."""
    step = min(0.045, 0.3 / count)
    return step * (index - (count - 1) / 2)
