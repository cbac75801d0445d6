"""Element types of ggml that a KV cache may have, and how blocks of them become numbers.

A block holds `values` numbers in `nbytes` bytes: fields one after the other, the first of them fp16 scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...dtypes import Bytes, Floats

BLOCK_VALUES = 32

_Halves = npt.NDArray[np.float32]


@dataclass(frozen=True)
class GgmlType:
    """An element type.

    Parameters
    ----------
    number, name
        As ggml has them.
    dtype
        The dtype of the words; ``"fp32"``, that of the numbers, for blocks.
    values, nbytes
        Of a block; 1 and the size of a word for types without blocks.
    fields
        Bytes of each field of a block, in order.
    numbers
        ``[block, byte]`` to float32 ``[block, value]``; None for types without blocks.
    """

    number: int
    name: str
    dtype: str
    values: int
    nbytes: int
    fields: tuple[tuple[str, int], ...] = ()
    numbers: Callable[[Bytes], Floats] | None = None

    @property
    def is_block(self) -> bool:
        """Whether numbers are stored in blocks."""
        return self.numbers is not None


def _scale(blocks: Bytes, field: int = 0) -> Floats:
    """The fp16 numbers at byte `field` of every block, as a column of float32."""
    words = np.ascontiguousarray(blocks[:, field : field + 2]).view("<f2")
    with np.errstate(invalid="ignore"):
        return words.astype(np.float32)


def _nibbles(codes: Bytes) -> Bytes:
    """``[block, 16]`` bytes as the 32 codes that they hold: the low halves first."""
    return np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=1)


def _fifth_bits(words: Bytes) -> Bytes:
    """The 32 bits of each block's word, from the lowest on, as 16 or 0."""
    return np.unpackbits(words, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    return (_nibbles(blocks[:, 2:]).astype(np.float32) - 8) * _scale(blocks)


def _q4_1(blocks: Bytes) -> Floats:
    return _nibbles(blocks[:, 4:]).astype(np.float32) * _scale(blocks) + _scale(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return (codes.astype(np.float32) - 16) * _scale(blocks)


def _q5_1(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes.astype(np.float32) * _scale(blocks) + _scale(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _scale(blocks)


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""What the 16 codes of iq4_nl stand for: ggml's table."""


def _iq4_nl(blocks: Bytes) -> Floats:
    return _IQ4[_nibbles(blocks[:, 2:])] * _scale(blocks)


def _blocks(number: int, name: str, numbers: Callable[[Bytes], Floats], *fields: tuple[str, int]) -> GgmlType:
    return GgmlType(number, name, "fp32", BLOCK_VALUES, sum(size for _, size in fields), fields, numbers)


_SCALES, _MINIMA = ("scales", 2), ("scales", 4)
_NIBBLES, _FIFTHS = ("codes", 16), ("bits", 4)

TYPES = {
    each.number: each
    for each in (
        GgmlType(0, "f32", "fp32", 1, 4),
        GgmlType(1, "f16", "fp16", 1, 2),
        GgmlType(30, "bf16", "bf16", 1, 2),
        _blocks(2, "q4_0", _q4_0, _SCALES, _NIBBLES),
        _blocks(3, "q4_1", _q4_1, _MINIMA, _NIBBLES),
        _blocks(6, "q5_0", _q5_0, _SCALES, _FIFTHS, _NIBBLES),
        _blocks(7, "q5_1", _q5_1, _MINIMA, _FIFTHS, _NIBBLES),
        _blocks(8, "q8_0", _q8_0, _SCALES, ("codes", 32)),
        _blocks(20, "iq4_nl", _iq4_nl, _SCALES, _NIBBLES),
    )
}
"""By ggml's number."""
