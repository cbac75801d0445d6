"""Words of fp16, bf16 and fp32 as float32, and float32 as such words."""

from __future__ import annotations

import numpy as np

from ...dtypes import FP16, FP32, DType, Elements, Floats


def to_float32(elements: Elements) -> Floats:
    """float16, float32 or bf16 (uint16) words as float32: exact, and a view where they are float32 already."""
    if elements.dtype.kind == "u":
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return elements.astype(np.float32, copy=False)


def round_float32(floats: Floats, dtype: DType) -> Elements:
    """float32 to words of `dtype`; NaN stays NaN, with a payload that nothing promises."""
    if dtype == FP32:
        return floats.astype(dtype.numpy_dtype, copy=False)
    if dtype == FP16:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return floats.astype(dtype.numpy_dtype)
    bits = np.ascontiguousarray(floats).view(np.uint32)
    halves = bits >> np.uint32(16)
    halves &= np.uint32(1)
    halves += bits
    halves += np.uint32(0x7FFF)
    halves >>= np.uint32(16)
    elements = halves.astype(dtype.numpy_dtype)
    elements[np.isnan(floats)] = 0x7FC0
    return elements
