"""Element types of ggml that a KV cache may have, and how blocks of them become numbers.

A block holds `values_per_block` numbers in `nbytes` bytes: fields one after the other, the first of them fp16 scales.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...dtypes import Bytes, Floats
from . import _blocks

BLOCK_VALUES = 32
_KERNEL_NAMES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl")
"""In the order of the compiled loops."""


@dataclass(frozen=True)
class GgmlType:
    """An element type."""

    #: As ggml has them.
    number: int
    name: str
    #: The dtype of the words; ``"fp32"``, that of the numbers, for blocks.
    dtype: str
    #: Of a block; 1 and the size of a word for types without blocks.
    values_per_block: int
    nbytes: int
    #: Bytes of block_type field of a block, in order; none for types without blocks.
    fields: tuple[tuple[str, int], ...] = ()

    @property
    def is_block(self) -> bool:
        """Whether numbers are stored in blocks."""
        return bool(self.fields)


def dequantize(ggml_type: GgmlType, blocks: Bytes, out: Floats) -> None:
    """The numbers that blocks stand for, as ggml computes them in float32.

    Parameters
    ----------
    blocks
        ``[row, block, byte]``; the bytes of a row lie together.
    out
        ``[row, value]``, contiguous.
    """
    _blocks.dequantize(_KERNEL_NAMES.index(ggml_type.name), blocks, out)


def _make_block_type(number: int, name: str, *fields: tuple[str, int]) -> GgmlType:
    return GgmlType(number, name, "fp32", BLOCK_VALUES, sum(size for _, size in fields), fields)


_SCALE_FIELD, _SCALE_AND_MIN_FIELD = ("scales", 2), ("scales", 4)
_NIBBLES_FIELD, _FIFTH_BITS_FIELD = ("codes", 16), ("bits", 4)

GGML_TYPES = {
    block_type.number: block_type
    for block_type in (
        GgmlType(0, "f32", "fp32", 1, 4),
        GgmlType(1, "f16", "fp16", 1, 2),
        GgmlType(30, "bf16", "bf16", 1, 2),
        _make_block_type(2, "q4_0", _SCALE_FIELD, _NIBBLES_FIELD),
        _make_block_type(3, "q4_1", _SCALE_AND_MIN_FIELD, _NIBBLES_FIELD),
        _make_block_type(6, "q5_0", _SCALE_FIELD, _FIFTH_BITS_FIELD, _NIBBLES_FIELD),
        _make_block_type(7, "q5_1", _SCALE_AND_MIN_FIELD, _FIFTH_BITS_FIELD, _NIBBLES_FIELD),
        _make_block_type(8, "q8_0", _SCALE_FIELD, ("codes", 32)),
        _make_block_type(20, "iq4_nl", _SCALE_FIELD, _NIBBLES_FIELD),
    )
}
"""By ggml's number."""

UNSUPPORTED_TYPES = {
    9: "q8_1",
    10: "q2_K",
    11: "q3_K",
    12: "q4_K",
    13: "q5_K",
    14: "q6_K",
    15: "q8_K",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    28: "f64",
    29: "iq1_m",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
}
"""Names of types that llama.cpp offers for no KV cache, by ggml's number."""
