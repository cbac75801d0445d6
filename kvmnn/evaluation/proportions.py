"""Intervals of proportions: of one, and of the difference between two over the same items."""

from __future__ import annotations

import math

_Z = 1.959963984540054
"""97.5 % quantile of the normal distribution, for intervals of 95 %."""


def compute_wilson_interval(num_right: int, num_items: int) -> tuple[float, float]:
    """Compute the 95 % score interval of a proportion (Wilson 1927); 0 to 1 for no items."""
    if num_items == 0:
        return 0.0, 1.0
    share, z2 = num_right / num_items, _Z * _Z
    center = (share + z2 / (2 * num_items)) / (1 + z2 / num_items)
    half = _Z / (1 + z2 / num_items) * math.sqrt(share * (1 - share) / num_items + z2 / (4 * num_items**2))
    return max(0.0, center - half), min(1.0, center + half)


def compute_paired_drop(num_both: int, num_lost: int, num_gained: int, num_neither: int) -> tuple[float, float, float]:
    """Compute how much lower the second of two paired proportions is, and its 95 % interval.

    Parameters
    ----------
    num_both, num_lost, num_gained, num_neither
        Items that are right on both sides, only on the first, only on the second, on neither.

    Returns
    -------
    drop, low, high : float
        The interval is method 10 of Newcombe (Statistics in Medicine 17, 1998): two score intervals and the
        correlation of the pairs. It is not empty where no item differs.
    """
    num_items = num_both + num_lost + num_gained + num_neither
    if num_items == 0:
        return 0.0, -1.0, 1.0
    first, second = (num_both + num_lost) / num_items, (num_both + num_gained) / num_items
    first_low, first_high = compute_wilson_interval(num_both + num_lost, num_items)
    second_low, second_high = compute_wilson_interval(num_both + num_gained, num_items)
    correlation = _estimate_correlation(num_both, num_lost, num_gained, num_neither)

    def combine(left: float, right: float) -> float:
        return math.sqrt(max(0.0, left * left - 2 * correlation * left * right + right * right))

    drop = first - second
    low = drop - combine(first - first_low, second_high - second)
    high = drop + combine(first_high - first, second - second_low)
    return drop, low, high


def _estimate_correlation(num_both: int, num_lost: int, num_gained: int, num_neither: int) -> float:
    """Estimate the correlation of two paired outcomes, corrected for continuity; 0 where one side never varies."""
    margins = (num_both + num_lost) * (num_gained + num_neither) * (num_both + num_gained) * (num_lost + num_neither)
    if margins == 0:
        return 0.0
    excess = float(num_both * num_neither - num_lost * num_gained)
    if excess > 0:
        excess = max(0.0, excess - (num_both + num_lost + num_gained + num_neither) / 2)
    return excess / math.sqrt(margins)
