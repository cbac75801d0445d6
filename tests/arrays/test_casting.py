"""Words of one dtype as words of another: every fp16 and bf16 word, and rounding against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmnn.arrays.cast import CastStats, merge_cast_stats

EVERY_WORD = np.arange(1 << 16, dtype="<u2").view(np.uint8)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_cast_stats_widening_is_lossless_for_every_value(dtype):
    up, down = CastStats(dtype, "fp32"), CastStats("fp32", dtype)
    wide = up.cast(EVERY_WORD)
    assert (up.label, up.words, up.changed, up.largest_error) == ("LOSSLESS", 1 << 16, 0, 0.0)
    assert np.array_equal(down.cast(wide), EVERY_WORD)
    assert (down.label, down.changed) == ("LOSSLESS", 0)  # narrower, but these words all fit


@pytest.mark.parametrize(("dtype", "bits", "smallest"), [("fp16", 11, -24), ("bf16", 8, -133)])
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-60000, max_value=60000))
def test_cast_stats_narrowing_rounds_to_nearest_even(dtype, bits, smallest, value):
    down = CastStats("fp32", dtype)
    made = down.cast(np.array([value], "<f4").view(np.uint8))
    back = float(CastStats(dtype, "fp32").cast(made).view("<f4")[0])
    exact = Fraction(value)
    exponent = max(abs(value) and np.frexp(value)[1] - bits, smallest)
    unit = Fraction(2) ** int(exponent)
    assert Fraction(back) == round(exact / unit) * unit  # Python rounds halves to even
    assert down.changed == (back != value)
    assert down.largest_error == abs(back - value)


def test_cast_stats_values_beyond_fp16_are_counted():
    down = CastStats("fp32", "fp16")
    words = np.array([1e6, -1e6, np.inf, np.nan, 1e-9], "<f4")
    made = down.cast(words.view(np.uint8)).view("<f2")
    assert np.array_equal(made, np.array([np.inf, -np.inf, np.inf, np.nan, 0], "<f2"), equal_nan=True)
    assert (down.label, down.changed) == ("LOSSY", 3)
    assert (down.overflowed, down.largest_error) == (2, np.inf)
    assert "3 of 5 words changed, largest error infinite: 2 overflowed, beyond what fp16 can say" in str(down)
    assert (down.to_dict()["overflowed"], down.to_dict()["largest_error"]) == (2, None)  # JSON has no infinity
    few = CastStats("fp32", "fp16")
    few.cast(words[2:].view(np.uint8))
    assert (few.overflowed, few.largest_error) == (0, pytest.approx(1e-9))
    assert merge_cast_stats([few, down]).to_dict() == down.to_dict() | {"words": 8, "changed": 4}
    brain = CastStats("fp32", "bf16").cast(np.array([np.nan, 3.4028235e38], "<f4").view(np.uint8)).view("<u2")
    assert brain[0] & 0x7F80 == 0x7F80
    assert brain[0] & 0x7F != 0
    assert brain[1] == 0x7F80
    assert CastStats("fp16", "bf16").cast(np.array([1.5], "<f2").view(np.uint8)).view("<u2")[0] == 0x3FC0


def test_cast_stats_same_dtype_returns_input():
    cast = CastStats("bf16", "bf16")
    assert cast.cast(EVERY_WORD) is EVERY_WORD
    assert (cast.label, cast.words) == ("LOSSLESS", 1 << 16)
