"""MNN's TQ3 and TQ4 (``attention_mode`` 11 to 14): codes of 3 or 4 bits for 32 numbers and their scale, bit for bit.

A block of 32 numbers is divided by its root mean square, half of its signs are flipped, and the Walsh-Hadamard
transform turns it. Its numbers are then nearly normally distributed whatever they were, and become the nearest of 8 or
16 levels. A block is stored as the root mean square in fp16 and the codes, the lowest bits first. All arithmetic is in
float32, in the order of the engine's scalar functions: `tq3_quantize_block` and `tq3_dequantize_block` of MNN 3.6.1.
"""

from __future__ import annotations

from dataclasses import field
from typing import Final

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from ..dtypes import Bytes, Floats

BLOCK_VALUES: Final = 32
_SCALE_BYTES: Final = 2
_MIN_SCALE: Final = np.float32(1e-10)
_NORM: Final = np.float32(1) / np.sqrt(np.float32(BLOCK_VALUES))
# The sign of place i is the highest bit of i times 2^32 over the golden ratio.
_SIGNS: Final = np.where(np.arange(BLOCK_VALUES, dtype=np.uint64) * 0x9E3779B9 >> 31 & 1, np.float32(-1), np.float32(1))


def _mirror(positive: tuple[float, ...], *, has_zero: bool) -> Floats:
    upper = np.array(positive, np.float32)
    return np.concatenate([-upper[::-1], np.zeros(int(has_zero), np.float32), upper])


@dataclass(frozen=True, eq=False)
class RotatedFormat:
    """A block format that rotates: its bits, its levels, and the bounds between them, as the engine rounds them."""

    name: str
    bits: int
    positive_levels: tuple[float, ...]
    positive_bounds: tuple[float, ...]
    #: float32, ascending.
    levels: Floats = field(init=False)
    bounds: Floats = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", _mirror(self.positive_levels, has_zero=False))
        object.__setattr__(self, "bounds", _mirror(self.positive_bounds, has_zero=True))

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.bits * BLOCK_VALUES // 8 + _SCALE_BYTES

    def quantize(self, values: Floats) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
        """Quantise blocks, float32 ``[block, 32]``: codes of the same shape, and scales ``[block, 1]``."""
        columns = np.ascontiguousarray(values.T)
        squares = np.zeros(columns.shape[1], np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for column in columns:
                squares += column * column
            scales = np.sqrt(squares / np.float32(BLOCK_VALUES))
            scales[scales < _MIN_SCALE] = _MIN_SCALE
            rotated = _transform(columns * (np.float32(1) / scales) * _SIGNS[:, None]) * _NORM
            codes = np.zeros(rotated.shape, np.uint8)
            for bound in self.bounds:
                codes += rotated > bound
        return np.ascontiguousarray(codes.T), _truncate_to_half(scales)[:, None]

    def dequantize(self, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float16]) -> Floats:
        """Return what the engine reads, float32 ``[block, 32]``."""
        columns = _transform(self.levels[codes.T])
        columns *= (_NORM * _SIGNS)[:, None]
        with np.errstate(invalid="ignore"):  # a scale may be infinite
            columns *= scales[:, 0].astype(np.float32)
        return np.ascontiguousarray(columns.T)

    def pack(self, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float16]) -> Bytes:
        """Return blocks as the engine stores them, ``[block, nbytes]``."""
        bits = np.unpackbits(codes[:, :, None], axis=2, count=self.bits, bitorder="little")
        packed = np.packbits(bits.reshape(len(codes), -1), axis=1, bitorder="little")
        return np.concatenate([np.ascontiguousarray(scales, "<f2").view(np.uint8), packed], axis=1)

    def unpack(self, blocks: Bytes) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
        """Return codes and scales of blocks ``[block, nbytes]``: the inverse of `pack`."""
        bits = np.unpackbits(blocks[:, _SCALE_BYTES:], axis=1, bitorder="little")
        codes = np.packbits(bits.reshape(len(blocks), BLOCK_VALUES, self.bits), axis=2, bitorder="little")[:, :, 0]
        return codes, np.ascontiguousarray(blocks[:, :_SCALE_BYTES]).view("<f2")


TQ3: Final = RotatedFormat("tq3", 3, (0.2451, 0.7560, 1.3439, 2.1519), (0.5005, 1.0500, 1.7479))
TQ4: Final = RotatedFormat(
    "tq4",
    4,
    (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
    (0.2582, 0.5224, 0.7995, 1.0993, 1.4371, 1.8435, 2.4008),
)


def _transform(columns: Floats) -> Floats:
    """Return the Walsh-Hadamard transform along the first axis, ``[32, block]``, which it multiplies by sqrt(32)."""
    step = 1
    while step < BLOCK_VALUES:
        pairs = columns.reshape(-1, 2, step, columns.shape[1])
        first, second = pairs[:, 0], pairs[:, 1]
        columns = np.stack([first + second, first - second], axis=1).reshape(columns.shape)
        step *= 2
    return columns


def _truncate_to_half(values: Floats) -> npt.NDArray[np.float16]:
    """Return values in fp16 as the engine does: bits are cut off, subnormal numbers become 0."""
    words = values.view(np.uint32)
    exponents = (words >> 23 & 0xFF).astype(np.int32) - 112
    halves = np.where(exponents >= 31, 31 << 10, exponents << 10 | (words >> 13 & 0x3FF).astype(np.int32))
    halves = np.where(exponents <= 0, 0, halves) | (words >> 16 & 0x8000).astype(np.int32)
    return halves.astype(np.uint16).view(np.float16)
