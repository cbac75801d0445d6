"""Numbers out of MLX's quantised groups: code times scale plus bias, in the type of the scales, rounded as MLX does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...dtypes import Bytes, Floats, Words

BITS = (2, 3, 4, 5, 6, 8)


def codes(words: Bytes, bits: int) -> npt.NDArray[np.uint8]:
    """``[row, byte]`` of packed words as ``[row, code]``: codes lie one after the other from the lowest bit on."""
    if bits == 8:
        return words
    if bits == 4:
        return np.stack([words & np.uint8(15), words >> np.uint8(4)], axis=2).reshape(len(words), -1)
    apart = np.unpackbits(words, axis=1, bitorder="little").reshape(len(words), -1, bits)
    return apart @ (1 << np.arange(bits, dtype=np.uint8))


def numbers(packed: Bytes, scales: Words, biases: Words, bits: int) -> Words:
    """``[row, value]`` in the type of the scales: float16, float32, or uint16 words of bf16.

    Parameters
    ----------
    packed
        ``[row, byte]``.
    scales, biases
        ``[row, group]``.
    bits
        Of a code.
    """
    found = codes(packed, bits)
    rows, groups = scales.shape
    apart = found.reshape(rows, groups, -1).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        product = rounded(apart * floats(scales)[:, :, None], scales.dtype)
        made = rounded(floats(product) + floats(biases)[:, :, None], scales.dtype)
    return made.reshape(rows, -1)


def floats(words: Words) -> Floats:
    """Words as float32, which holds all of them."""
    if words.dtype == np.uint16:
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.astype(np.float32)


def rounded(values: Floats, dtype: np.dtype[np.generic]) -> Words:
    """Numbers to the nearest of a type, ties to even."""
    if dtype != np.uint16:
        return values.astype(dtype)
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
