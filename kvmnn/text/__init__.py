"""How results are written for people: labels, numbers, rates."""

from .cells import escape_cell, escape_csv, escape_markdown, unescape_csv
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
    "escape_cell",
    "escape_csv",
    "escape_markdown",
    "one_line",
    "rate",
    "ratio",
    "short_names",
    "span",
    "unescape_csv",
    "visible",
]
