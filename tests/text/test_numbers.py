"""Numbers and rates for people."""

from __future__ import annotations

import pytest

from kvmnn.text import at_rate


@pytest.mark.parametrize(
    ("nbytes", "seconds", "text"),
    [(1 << 20, 0.5, ", 2 MB/s"), ((1 << 20) - 1, 0.5, ""), (0, 0, ""), (10**9, 0, ", 1000000000000 MB/s")],
)
def test_rates_of_small_inputs_say_nothing(nbytes, seconds, text):
    assert at_rate(nbytes, seconds) == text
