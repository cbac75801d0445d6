"""Float8 codes: every one of 256 of four types against arithmetic from the types' definitions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import kvmnn
from kvmnn.arrays.array import LazyArray
from kvmnn.arrays.float8 import build_exact_table, decode_array
from kvmnn.dtypes import FLOAT8_NAMES

# Exponent bits, fraction bits, bias: of OCP's OFP8 (e4m3fn and e5m2), and of "8-bit Numerical Formats for Deep Neural
# Networks" (Noune et al.) for fnuz, which have no infinity, and one NaN at the code of negative zero.
DEFINITIONS = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2": (5, 2, 15),
    "float8_e5m2fnuz": (5, 2, 16),
}


def value_of(name: str, code: int) -> Fraction | str:
    """The number of a code as an exact fraction, or what it is instead; -0 is "-0"."""
    exponent_bits, fraction_bits, bias = DEFINITIONS[name]
    bits = f"{code:08b}"
    sign, exponent, fraction = bits[0], int(bits[1 : 1 + exponent_bits], 2), int(bits[1 + exponent_bits :], 2)
    if name.endswith("fnuz"):
        if bits == "10000000":
            return "nan"
    elif name == "float8_e4m3fn":
        if bits[1:] == "1111111":
            return "nan"
    elif bits[1:6] == "11111":
        return "nan" if fraction else sign.replace("0", "inf").replace("1", "-inf")
    if exponent == 0:
        magnitude = Fraction(fraction, 2**fraction_bits) * Fraction(2) ** (1 - bias)
    else:
        magnitude = (1 + Fraction(fraction, 2**fraction_bits)) * Fraction(2) ** (exponent - bias)
    if sign == "1" and magnitude == 0:
        return "-0"
    return -magnitude if sign == "1" else magnitude


def float32_value(bits: int) -> Fraction | str:
    """The same of float32 bits, from IEEE 754's definition."""
    exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF:
        return "nan" if fraction else "-inf" if bits >> 31 else "inf"
    if exponent == 0:
        magnitude = Fraction(fraction, 2**23) * Fraction(2) ** -126
    else:
        magnitude = (1 + Fraction(fraction, 2**23)) * Fraction(2) ** (exponent - 127)
    if bits >> 31 and magnitude == 0:
        return "-0"
    return -magnitude if bits >> 31 else magnitude


@pytest.mark.parametrize("name", FLOAT8_NAMES)
def test_build_exact_table_every_code_is_exact(name: str) -> None:
    table = build_exact_table(name)
    assert table.dtype == np.float32
    bits = [int(each) for each in np.frombuffer(table.tobytes(), "<u4")]
    assert [float32_value(each) for each in bits] == [value_of(name, code) for code in range(256)]
    assert len(set(bits)) == 256  # so that arrays of codes are equal where the words are


@pytest.mark.parametrize(
    ("name", "largest", "smallest", "nans", "infinities"),
    [
        ("float8_e4m3fn", 448.0, 2.0**-9, 2, 0),
        ("float8_e4m3fnuz", 240.0, 2.0**-10, 1, 0),
        ("float8_e5m2", 57344.0, 2.0**-16, 6, 2),
        ("float8_e5m2fnuz", 57344.0, 2.0**-17, 1, 0),
    ],
)
def test_build_exact_table_has_published_limits(
    name: str, largest: float, smallest: float, nans: int, infinities: int
) -> None:
    table = build_exact_table(name)
    finite = table[np.isfinite(table)]
    assert (finite.max(), finite[finite > 0].min()) == (largest, smallest)
    assert (np.isnan(table).sum(), np.isinf(table).sum()) == (nans, infinities)


@pytest.mark.parametrize("name", FLOAT8_NAMES)
@pytest.mark.parametrize("limit", [0, 4, 5, 7, 12, 1000])
def test_decode_float8_array_does_not_depend_on_chunks(name: str, limit: int) -> None:
    codes = np.random.default_rng(1).integers(0, 256, (3, 7, 11), dtype=np.uint8)
    array = LazyArray(
        name="x",
        dtype="fp16",
        shape=codes.shape,
        array_dtype="|u1",
        element=name,
        reader=lambda step: (codes.reshape(-1)[at : at + step] for at in range(0, codes.size, step)),
    )
    expected = build_exact_table(name)[codes]
    found = decode_array(array)
    assert (found.dtype, found.shape, found.nbytes) == ("fp32", codes.shape, 4 * codes.size)
    assert b"".join(piece.tobytes() for piece in found.iter_chunks(limit)) == expected.tobytes()
    assert found.to_numpy().tobytes() == expected.tobytes()


def test_encode_float8_dtype_is_refused() -> None:
    with pytest.raises(kvmnn.KvmnnError, match="float8_e4m3fn is for bytes of files and arrays"):
        kvmnn.encode(b"1234", dtype="float8_e4m3fn")
