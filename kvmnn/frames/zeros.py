"""How much of an array is not used yet, told by few of its words."""

from __future__ import annotations

import numpy as np

from ..dtypes import Bytes

WINDOW, WINDOWS = 64, 64
"""Words that are looked at together, and how often."""


def zero_share(data: Bytes, stride: int) -> float:
    """The share of zeros in an array of words of `stride` bytes, from 0 to 1, as far as they lie together."""
    words = data[: data.size // stride * stride].view(f"u{stride}")
    if words.size < WINDOW:
        return float(not words.any())
    begins = np.linspace(0, words.size - WINDOW, WINDOWS).astype(np.intp)
    used = np.count_nonzero(words[begins[:, None] + np.arange(WINDOW)].any(axis=1))
    return 1 - used / WINDOWS
