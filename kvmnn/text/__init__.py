"""How results are written for people: labels, numbers, rates."""

from .labels import LOSSLESS, LOSSY, UNCHANGED
from .numbers import count, megabytes_per_second, ratio, span
from .suggestion import did_you_mean
from .visible import one_line, visible

__all__ = [
    "LOSSLESS",
    "LOSSY",
    "UNCHANGED",
    "count",
    "did_you_mean",
    "megabytes_per_second",
    "one_line",
    "ratio",
    "span",
    "visible",
]
