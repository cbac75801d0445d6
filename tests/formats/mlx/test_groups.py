"""Numbers of MLX's groups at every SIMD level against plain numpy: all bits and types, all scales, any group."""

from __future__ import annotations

import numpy as np
import pytest

from kvmnn.formats.mlx import _groups
from kvmnn.formats.mlx.states import SUPPORTED_BITS, dequantize

TYPES = ("float16", "uint16", "float32")


def floats(words: np.ndarray) -> np.ndarray:
    """As float32; uint16 words are bf16."""
    if words.dtype == np.uint16:
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.astype(np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """To the nearest, ties to even."""
    if dtype != "uint16":
        return values.astype(dtype)
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def expected(codes: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """``[row, value]`` of codes one a byte."""
    apart = codes.reshape(*scales.shape, -1).astype(np.float32)
    with np.errstate(all="ignore"):
        product = rounded(apart * floats(scales)[:, :, None], scales.dtype.name)
        return rounded(floats(product) + floats(biases)[:, :, None], scales.dtype.name).reshape(len(codes), -1)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes one after the other, from the lowest bit on."""
    apart = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    return np.packbits(apart.reshape(len(codes), -1), axis=1, bitorder="little")


def same(found: np.ndarray, other: np.ndarray) -> bool:
    """Bit by bit, but for NaN."""
    no_numbers = np.isnan(floats(found)) & np.isnan(floats(other))
    size = f"u{found.itemsize}"
    return bool(((found.view(size) == other.view(size)) | no_numbers).all())


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("groups", "size"), [(1, 32), (4, 64), (3, 128), (96, 1), (8, 12), (2, 320)])
def test_dequantize_mlx_groups_equal_the_model(level: str, dtype: str, bits: int, groups: int, size: int) -> None:
    assert _groups.get_level() == level
    draws = np.random.default_rng(groups * size + bits)
    codes = draws.integers(0, 1 << bits, (5, groups * size), np.uint8)
    words = [draws.normal(0, 0.5, (5, groups)).astype(np.float32) for _ in range(2)]
    scales, biases = (rounded(each, dtype) for each in words)
    found = dequantize(packed(codes, bits), scales, biases, bits)
    assert found.dtype == dtype
    assert np.array_equal(found, expected(codes, scales, biases))


@pytest.mark.parametrize("dtype", TYPES[:2])
def test_dequantize_every_16_bit_scale(level: str, dtype: str) -> None:
    """All 65,536 words: subnormal ones, infinities, no numbers; products and sums that overflow and that vanish."""
    scales = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(-1, 1)
    draws = np.random.default_rng(1)
    codes = draws.integers(0, 256, (1 << 16, 16), np.uint8)
    for biases in (draws.permutation(scales), np.zeros_like(scales)):
        assert same(dequantize(codes, scales, biases, 8), expected(codes, scales, biases))


def test_dequantize_mismatched_buffers_are_refused() -> None:
    def made(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.uint8)

    for kind, bits, shapes in (
        (3, 8, ((1, 8), (1, 2), (1, 2), (1, 16))),
        (0, 7, ((1, 7), (1, 2), (1, 2), (1, 16))),
        (0, 8, ((1, 8), (2, 2), (1, 2), (1, 16))),
        (0, 8, ((1, 8), (1, 2), (1, 4), (1, 16))),
        (0, 8, ((1, 8), (1, 2), (1, 2), (1, 18))),
        (0, 4, ((1, 2), (1, 2), (1, 2), (1, 8))),
        (0, 8, ((1, 8), (1, 6), (1, 6), (1, 16))),
        (0, 8, ((1, 8), (1, 0), (1, 0), (1, 16))),
    ):
        with pytest.raises(ValueError):
            _groups.dequantize(kind, bits, *(made(*shape) for shape in shapes))
    _groups.dequantize(0, 8, made(0, 8), made(0, 2), made(0, 2), made(0, 16))
