"""How much of an array is not used yet."""

import numpy as np
import pytest

from kvmnn.frames.sampling import estimate_zero_fraction


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("words", [64, 10_000, 1_000_000])
def test_estimate_zero_fraction_is_close(words: int, stride: int) -> None:
    data = np.zeros(words * stride + 1, np.uint8)
    assert estimate_zero_fraction(data, stride) == 1
    for used in (0.25, 0.75, 1):
        data[: int(words * used) * stride] = 1
        assert abs(estimate_zero_fraction(data, stride) - (1 - used)) < (0.02 if words > 64 else 1)
    data[:stride] = data[-1 - stride :] = 0
    assert estimate_zero_fraction(data, stride) == 0


@pytest.mark.parametrize("stride", [2, 4])
def test_estimate_zero_fraction_small_input_is_exact(stride: int) -> None:
    for words in (0, 1, 63):
        data = np.zeros(words * stride + 1, np.uint8)
        assert estimate_zero_fraction(data, stride) == 1
        data[words * stride // 2] = 1
        assert estimate_zero_fraction(data, stride) == (words == 0)
