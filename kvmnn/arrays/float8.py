"""The five 8-bit float types of torch and safetensors: the float32 that each of their 256 codes stands for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import numpy as np

from .._util.named_tuple import NamedTuple
from ..dtypes import FLOAT8_NAMES, Floats
from ..errors import SourceError
from .array import Chunk, LazyArray, rechunk
from .source import Source


class _Float8Format(NamedTuple):
    """Bits of exponent and fraction, the exponent's bias, and the encoding of NaN."""

    exponent_bits: int
    fraction_bits: int
    bias: int
    #: ``"ieee"``: infinity and NaN as in IEEE 754; ``"fn"``: no infinity, NaN where all bits but the sign are set;
    #: ``"fnuz"``: no infinity, no negative zero, whose code is the only NaN.
    nan_encoding: str


_FLOAT8_FORMATS = {
    "float8_e4m3fn": _Float8Format(4, 3, 7, "fn"),
    "float8_e5m2": _Float8Format(5, 2, 15, "ieee"),
    "float8_e4m3fnuz": _Float8Format(4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": _Float8Format(5, 2, 16, "fnuz"),
}
_SCALE_TYPE = "float8_e8m0fnu"  # powers of two from 2^-127 on, without sign, zero or fraction; the last code is NaN

DECODABLE_NAMES = (*_FLOAT8_FORMATS, _SCALE_TYPE)
assert set(FLOAT8_NAMES) == set(_FLOAT8_FORMATS)


@cache
def build_value_table(name: str) -> Floats:
    """Return the 256 values of a type, by code; all are exact in float32."""
    values = [
        _decode_scale(code) if name == _SCALE_TYPE else _decode_value(code, _FLOAT8_FORMATS[name])
        for code in range(256)
    ]
    values_by_code = np.array(values, np.float32)
    values_by_code.flags.writeable = False
    return values_by_code


@cache
def build_exact_table(name: str) -> Floats:
    """Return the values of a type of `FLOAT8_NAMES` with distinct bits for every code: NaNs keep sign and fraction."""
    # Two arrays of codes are then equal where their float32 words are.
    float8_format = _FLOAT8_FORMATS[name]
    codes = np.arange(256, dtype=np.uint32)
    fraction = codes & np.uint32((1 << float8_format.fraction_bits) - 1)
    nan_bits = (
        codes >> np.uint32(7) << np.uint32(31)
        | np.uint32(0x7F80_0000)
        | fraction << np.uint32(23 - float8_format.fraction_bits)
    )
    if float8_format.nan_encoding == "fnuz":
        nan_bits[0x80] = 0x7FC0_0000  # its one NaN has no fraction
    values = build_value_table(name)
    values_by_code = np.where(np.isnan(values), nan_bits, values.view(np.uint32)).astype("<u4").view("<f4")
    values_by_code.flags.writeable = False
    return values_by_code


def decode_array(array: LazyArray) -> LazyArray:
    """Return an array of float8 codes as fp32, decoded lazily when it is read."""
    return replace(array, dtype="fp32", array_dtype="<f4", reader=partial(_iter_decoded_chunks, array))


def pair_codes(source: Source) -> Source:
    """Return a source with two codes to a word along the last axis, as frames store them: dtype fp16."""
    arrays = [array for array in source.arrays if array.element and array.itemsize == 1]
    if not arrays:
        return source
    for array in arrays:
        if array.order != "C" or array.shape[-1] % 2:
            raise SourceError(
                f"array {array.name!r} {list(array.shape)}: its codes are no pairs along the last axis: expected an "
                "even head_dim in C order"
            )
    names_text = " and ".join(dict.fromkeys(array.element for array in arrays))
    note = f"{names_text} codes are taken as they are, two to a word: lo of even dimensions, hi of odd ones"
    paired_arrays = [
        replace(array, shape=(*array.shape[:-1], array.shape[-1] // 2), array_dtype="<f2", element="")
        if array in arrays
        else array
        for array in source.arrays
    ]
    return replace(source, arrays=paired_arrays, notes=[*source.notes, note])


def _iter_decoded_chunks(array: LazyArray, chunk_bytes: int) -> Iterator[Chunk]:
    values = build_exact_table(array.element)
    blocks = (values[codes].view(np.uint8) for codes in array.reader(max(1, chunk_bytes // 4)))
    return rechunk(blocks, chunk_bytes, 4 * array.nbytes) if chunk_bytes % 4 else blocks


def _decode_scale(code: int) -> float:
    return math.nan if code == 0xFF else math.ldexp(1.0, code - 127)


def _decode_value(code: int, float8_format: _Float8Format) -> float:
    magnitude = code & 0x7F
    exponent, fraction = magnitude >> float8_format.fraction_bits, magnitude & ((1 << float8_format.fraction_bits) - 1)
    encoding = float8_format.nan_encoding
    if (encoding == "fnuz" and code == 0x80) or (encoding == "fn" and magnitude == 0x7F):
        return math.nan
    if encoding == "ieee" and exponent == (1 << float8_format.exponent_bits) - 1:
        return math.nan if fraction else math.copysign(math.inf, 0.5 - (code >> 7))
    significand = fraction if exponent == 0 else fraction | 1 << float8_format.fraction_bits
    value = math.ldexp(significand, max(exponent, 1) - float8_format.bias - float8_format.fraction_bits)
    return -value if code >> 7 else value
