"""Numbers out of MLX's quantised groups: code times scale plus bias, in the type of the scales, rounded as MLX does."""

from __future__ import annotations

import numpy as np

from ...dtypes import Bytes, Words
from . import _groups

BITS = (2, 3, 4, 5, 6, 8)
_TYPES = ("float16", "uint16", "float32")
"""In the order of the compiled loops."""


def numbers(packed: Bytes, scales: Words, biases: Words, bits: int) -> Words:
    """``[row, value]`` in the type of the scales: float16, float32, or uint16 words of bf16.

    Parameters
    ----------
    packed
        ``[row, byte]``; codes lie one after the other from the lowest bit on.
    scales, biases
        ``[row, group]``.
    bits
        Of a code.
    """
    made = np.empty((len(packed), packed.shape[1] * 8 // bits), scales.dtype)
    codes, first, second = (np.ascontiguousarray(each).view(np.uint8) for each in (packed, scales, biases))
    _groups.numbers(_TYPES.index(scales.dtype.name), bits, codes, first, second, made.view(np.uint8))
    return made
