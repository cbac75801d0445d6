"""Blocks of 256 weights (K-quants, IQ4_XS) and of 32 (MXFP4) as float32, computed as ggml computes them.

The element types that a KV cache may have are in `state`, with compiled loops. Those here occur in the weights of
models only, which are read once, so that numpy is fast enough. Layouts and formulas are those of ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from ..._util.dataclass import dataclass
from ...dtypes import Bytes, Floats

_SUPER_BLOCK_VALUES: Final = 256
_IQ4_VALUES: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_MXFP4_VALUES: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


@dataclass(frozen=True)
class WeightBlockType:
    """A block type that only weights have."""

    name: str
    values_per_block: int
    nbytes: int
    #: Blocks, uint8 ``[block, byte]``, to float32 ``[block, value]``.
    dequantize: Callable[[Bytes], Floats]


def _read_fp16(blocks: Bytes, offset: int) -> Floats:
    """An fp16 field of every block, as float32 ``[block, 1]``."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def _unpack_6bit_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight 6-bit scales and eight 6-bit minimums out of 12 bytes, each float32 ``[block, 8]``."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _split_nibbles(codes: Bytes, run: int) -> Bytes:
    """Codes ``[block, run, value]`` of bytes whose low halves are one run of values and whose high halves the next."""
    rows = codes.reshape(len(codes), -1, 1, run)
    return np.concatenate([rows & 15, rows >> 4], axis=2).reshape(len(codes), -1, run)


def _dequantize_q2_k(blocks: Bytes) -> Floats:
    packed, codes = blocks[:, :16], blocks[:, 16:80].reshape(-1, 2, 1, 32)
    d, d_min = _read_fp16(blocks, 80), _read_fp16(blocks, 82)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    values = ((codes >> shifts) & 3).reshape(-1, 16, 16).astype(np.float32)
    scales = d * (packed & 15).astype(np.float32)
    minimums = d_min * (packed >> 4).astype(np.float32)
    return (scales[:, :, None] * values - minimums[:, :, None]).reshape(-1, _SUPER_BLOCK_VALUES)


def _dequantize_q3_k(blocks: Bytes) -> Floats:
    high_bits, codes, packed = blocks[:, :32], blocks[:, 32:96].reshape(-1, 2, 1, 32), blocks[:, 96:108]
    d = _read_fp16(blocks, 108)
    low, high = packed[:, :8], packed[:, 8:12]
    scales = np.concatenate([low & 15, low >> 4], axis=1) | (
        np.concatenate([high & 3, (high >> 2) & 3, (high >> 4) & 3, (high >> 6) & 3], axis=1) << 4
    )
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    values = ((codes >> shifts) & 3).reshape(-1, 8, 32).astype(np.int8)
    is_set = (high_bits[:, None, :] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    centered = (values - np.where(is_set, 0, 4).astype(np.int8)).reshape(-1, 16, 16).astype(np.float32)
    factors: Floats = d * (scales.astype(np.float32) - 32)
    return (factors[:, :, None] * centered).reshape(-1, _SUPER_BLOCK_VALUES)


def _dequantize_q4_k(blocks: Bytes) -> Floats:
    scales, minimums = _unpack_6bit_scales(blocks[:, 4:16])
    values = _split_nibbles(blocks[:, 16:144], 32).astype(np.float32)
    return _scale_and_shift(blocks, scales, minimums, values)


def _dequantize_q5_k(blocks: Bytes) -> Floats:
    scales, minimums = _unpack_6bit_scales(blocks[:, 4:16])
    fifth_bits = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    values = (_split_nibbles(blocks[:, 48:176], 32) | (fifth_bits << 4)).astype(np.float32)
    return _scale_and_shift(blocks, scales, minimums, values)


def _scale_and_shift(blocks: Bytes, scales: Floats, minimums: Floats, values: Floats) -> Floats:
    factors, offsets = _read_fp16(blocks, 0) * scales, _read_fp16(blocks, 2) * minimums
    return (factors[:, :, None] * values - offsets[:, :, None]).reshape(-1, _SUPER_BLOCK_VALUES)


def _dequantize_q6_k(blocks: Bytes) -> Floats:
    low_codes, high_codes = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([low_codes & 15, low_codes >> 4], axis=2).reshape(-1, 8, 32)
    high = ((high_codes >> np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)) & 3).reshape(-1, 8, 32)
    values: Floats = ((low | (high << 4)).astype(np.int8) - np.int8(32)).reshape(-1, 16, 16).astype(np.float32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    factors: Floats = _read_fp16(blocks, 208) * scales
    return (factors[:, :, None] * values).reshape(-1, _SUPER_BLOCK_VALUES)


def _dequantize_iq4_xs(blocks: Bytes) -> Floats:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2").astype(np.int32)
    low = blocks[:, 4:8].astype(np.int32)
    scales = np.stack([low & 15, low >> 4], axis=2).reshape(-1, 8)
    scales |= ((high >> np.arange(0, 16, 2)) & 3) << 4
    factors = _read_fp16(blocks, 0) * (scales - 32).astype(np.float32)
    values = _IQ4_VALUES[_split_nibbles(blocks[:, 8:136], 16)].reshape(-1, 8, 32)
    return (factors[:, :, None] * values).reshape(-1, _SUPER_BLOCK_VALUES)


def _dequantize_mxfp4(blocks: Bytes) -> Floats:
    exponents = blocks[:, :1].astype(np.int32)
    factors = np.ldexp(np.float32(1), exponents - 128)  # half of E8M0's: the table holds doubled values
    return factors * _MXFP4_VALUES[_split_nibbles(blocks[:, 1:17], 16)].reshape(-1, 32)


WEIGHT_BLOCK_TYPES: Final[Mapping[int, WeightBlockType]] = {
    10: WeightBlockType("q2_K", _SUPER_BLOCK_VALUES, 84, _dequantize_q2_k),
    11: WeightBlockType("q3_K", _SUPER_BLOCK_VALUES, 110, _dequantize_q3_k),
    12: WeightBlockType("q4_K", _SUPER_BLOCK_VALUES, 144, _dequantize_q4_k),
    13: WeightBlockType("q5_K", _SUPER_BLOCK_VALUES, 176, _dequantize_q5_k),
    14: WeightBlockType("q6_K", _SUPER_BLOCK_VALUES, 210, _dequantize_q6_k),
    23: WeightBlockType("iq4_xs", _SUPER_BLOCK_VALUES, 136, _dequantize_iq4_xs),
    39: WeightBlockType("mxfp4", 32, 17, _dequantize_mxfp4),
}
"""By ggml's number."""
