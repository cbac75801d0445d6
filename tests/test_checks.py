"""Checks of numbers that callers give."""

from __future__ import annotations

import numpy as np
import pytest

from kvmnn._util.validation import repr_short, validate_count, validate_fraction, validate_int
from kvmnn.errors import KvmnnError


def test_validate_int_bounds_are_inclusive() -> None:
    assert [validate_int(number, "n", 3, 5) for number in (3, 4, np.int8(5))] == [3, 4, 5]
    for number, message in ((2, "n is 2: expected at least 3"), (6, "n is 6: expected at most 5")):
        with pytest.raises(KvmnnError, match=message):
            validate_int(number, "n", 3, 5)
    assert validate_int(6, "n", 3) == 6


@pytest.mark.parametrize("value", [True, 1.0, "1", None, np.float32(1)])
def test_validate_int_other_types_are_refused(value: object) -> None:
    for check in (lambda: validate_int(value, "n", 0), lambda: validate_count("n", value)):
        with pytest.raises(TypeError, match="n must be an integer"):
            check()


def test_validate_count_and_share_out_of_range_are_refused() -> None:
    validate_count("n", 0)
    with pytest.raises(KvmnnError, match="n is -1: expected at least 0"):
        validate_count("n", -1)
    for share in (0, 0.0, 1e9, np.float32(0.5)):
        validate_fraction("s", share)
    for share in (-1e-9, 1.1e9, float("nan"), float("inf")):
        with pytest.raises(KvmnnError, match="expected a share from 0 on"):
            validate_fraction("s", share)
    for value in (True, "1", None):
        with pytest.raises(TypeError, match="s must be a number"):
            validate_fraction("s", value)


def test_validate_int_message_is_short() -> None:
    """Python writes no integer of more than 4300 digits; a message of fewer would still fill a screen."""
    for check in (lambda: validate_int(10**5000, "n", 0, 5), lambda: validate_count("n", -(10**400))):
        with pytest.raises(KvmnnError, match=r"n is an integer of [0-9,]+ bits: expected"):
            check()
    assert repr_short(2**200) == str(2**200)
    assert (repr_short("a" * 78), repr_short("a" * 79)) == (repr("a" * 78), "'" + "a" * 76 + "...")
    assert repr_short(np.int64(-3)) == "-3"
