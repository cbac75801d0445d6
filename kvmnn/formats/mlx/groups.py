"""Numbers out of MLX's quantised groups: code times scale plus bias, in the type of the scales, rounded as MLX does."""

from __future__ import annotations

import numpy as np

from ...dtypes import Bytes, Elements
from . import _groups

SUPPORTED_BITS = (2, 3, 4, 5, 6, 8)
_KERNEL_DTYPE_NAMES = ("float16", "uint16", "float32")
"""In the order of the compiled loops."""


def dequantize(packed_codes: Bytes, scales: Elements, biases: Elements, bits: int) -> Elements:
    """``[row, value]`` in the type of the scales: float16, float32, or uint16 words of bf16.

    Parameters
    ----------
    packed_codes
        ``[row, byte]``; codes lie one after the other from the lowest bit on.
    scales, biases
        ``[row, group]``.
    bits
        Of a code.
    """
    values = np.empty((len(packed_codes), packed_codes.shape[1] * 8 // bits), scales.dtype)
    code_bytes, scale_bytes, bias_bytes = (
        np.ascontiguousarray(array).view(np.uint8) for array in (packed_codes, scales, biases)
    )
    _groups.dequantize(
        _KERNEL_DTYPE_NAMES.index(scales.dtype.name), bits, code_bytes, scale_bytes, bias_bytes, values.view(np.uint8)
    )
    return values
