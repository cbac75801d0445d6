"""What figures share: why one is not drawn, what its bars mean, and axes with plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .rows import Row
from .series import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Measure = Callable[[Row, float], Point]


def interval_text(rows: Sequence[Row], mark: str = "Bars") -> str:
    """What `mark` in a figure of these rows is: intervals, and over how many documents; empty where there are none."""
    over = [
        row.versus_full.documents for row in rows if row.versus_full is not None and row.versus_full.low is not None
    ]
    if not over:
        return ""
    return f"{mark}: 95 % interval of the difference to the full cache, paired over {over[0]:,} documents."


def uncut_text(rows: Sequence[Row], mark: str = "Hollow") -> str:
    """Return what `mark` in a figure of these rows is; empty where every policy evicted something."""
    return f"{mark}: evicted nothing in these texts." if any(row.is_uncut for row in rows) else ""


def sentences(*said: str) -> str:
    """Return those that say something as one line."""
    return " ".join(each for each in said if each)


_ENOUGH, _MOST = 5, 12
_STEPS = (
    (1.0, 2.0, 5.0),
    (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0),
)
"""What ticks of a logarithmic axis are powers of ten times."""


class NothingToShowError(Exception):
    """The results hold nothing for a plot; the text is the reason."""


def scale(axes: Axes, name: str, values: Sequence[float]) -> None:
    """An axis (``"x"`` or ``"y"``) of plain numbers, logarithmic where the values are far apart."""
    if max(values) <= 3 * min(values):
        return
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    (axes.set_xscale if name == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if name == "x" else axes.yaxis
    low, high = min(values), max(values)
    room = (high / low) ** 0.1
    axis.set_major_locator(FixedLocator(log_ticks(low / room, high * room)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, at least five where there are as many."""
    found: list[float] = []
    for steps in _STEPS:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(found) >= _ENOUGH:
            break
    return found[:: max(1, -(-len(found) // _MOST))]


def apart(ticks: Sequence[int], factor: float) -> list[int]:
    """Ascending ticks without those that would touch the one before."""
    found: list[int] = []
    for tick in ticks:
        if not found or tick > factor * found[-1]:
            found.append(tick)
    return found


def dodge(index: int, count: int) -> float:
    """How far (in octaves) to the side a line is drawn, so that error bars do not cover each other."""
    step = min(0.045, 0.3 / count)
    return step * (index - (count - 1) / 2)
