"""How much of an array is not used yet, told by few of its words."""

from __future__ import annotations

import numpy as np

from ..dtypes import Bytes

ZERO_WINDOW_ELEMENTS, NUM_ZERO_WINDOWS = 64, 64
"""Words that are looked at together, and how often."""


def estimate_zero_fraction(data: Bytes, itemsize: int) -> float:
    """The share of zeros in an array of words of `itemsize` bytes, from 0 to 1, as far as they lie together."""
    elements = data[: data.size // itemsize * itemsize].view(f"u{itemsize}")
    if elements.size < ZERO_WINDOW_ELEMENTS:
        return float(not elements.any())
    starts = np.linspace(0, elements.size - ZERO_WINDOW_ELEMENTS, NUM_ZERO_WINDOWS).astype(np.intp)
    num_nonzero = np.count_nonzero(elements[starts[:, None] + np.arange(ZERO_WINDOW_ELEMENTS)].any(axis=1))
    return 1 - num_nonzero / NUM_ZERO_WINDOWS
