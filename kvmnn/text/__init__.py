"""How results are written for people: labels, numbers, rates."""

from .labels import LOSSLESS, LOSSY, UNCHANGED
from .numbers import count, megabytes_per_second, ratio, span

__all__ = ["LOSSLESS", "LOSSY", "UNCHANGED", "count", "megabytes_per_second", "ratio", "span"]
