"""How results are written for people: labels, numbers, rates."""

from .labels import LOSSLESS, LOSSY, SIMULATED, UNCHANGED
from .names import short_names
from .numbers import at_rate, count, rate, ratio, span
from .suggestion import did_you_mean
from .visible import one_line, visible

__all__ = [
    "LOSSLESS",
    "LOSSY",
    "SIMULATED",
    "UNCHANGED",
    "at_rate",
    "count",
    "did_you_mean",
    "one_line",
    "rate",
    "ratio",
    "short_names",
    "span",
    "visible",
]
