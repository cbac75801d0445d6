"""The five 8-bit float types of torch and safetensors: the float32 that each of their 256 codes stands for."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from ...dtypes import Floats


class _Format(NamedTuple):
    """Bits of exponent and fraction, the exponent's bias, and which codes are no numbers.

    Attributes
    ----------
    nan
        ``"ieee"``: infinity and NaN as in IEEE 754; ``"fn"``: no infinity, NaN where all bits but the sign are set;
        ``"fnuz"``: no infinity, no negative zero, whose code is the only NaN.
    """

    exponent_bits: int
    fraction_bits: int
    bias: int
    nan: str


_FORMATS = {
    "float8_e4m3fn": _Format(4, 3, 7, "fn"),
    "float8_e5m2": _Format(5, 2, 15, "ieee"),
    "float8_e4m3fnuz": _Format(4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": _Format(5, 2, 16, "fnuz"),
}
_SCALES = "float8_e8m0fnu"
"""Powers of two from 2^-127 on, without sign, zero or fraction; the last code is NaN."""

NAMES = (*_FORMATS, _SCALES)


@cache
def table(name: str) -> Floats:
    """The 256 values of a type, by code; all of them are exact in float32."""
    values = [_scale(code) if name == _SCALES else _value(code, _FORMATS[name]) for code in range(256)]
    found = np.array(values, np.float32)
    found.flags.writeable = False
    return found


def _scale(code: int) -> float:
    return math.nan if code == 0xFF else math.ldexp(1.0, code - 127)


def _value(code: int, kind: _Format) -> float:
    magnitude = code & 0x7F
    exponent, fraction = magnitude >> kind.fraction_bits, magnitude & ((1 << kind.fraction_bits) - 1)
    if (kind.nan == "fnuz" and code == 0x80) or (kind.nan == "fn" and magnitude == 0x7F):
        return math.nan
    if kind.nan == "ieee" and exponent == (1 << kind.exponent_bits) - 1:
        return math.nan if fraction else math.copysign(math.inf, 0.5 - (code >> 7))
    significand = fraction if exponent == 0 else fraction | 1 << kind.fraction_bits
    value = math.ldexp(significand, max(exponent, 1) - kind.bias - kind.fraction_bits)
    return -value if code >> 7 else value
