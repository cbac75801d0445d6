"""Numbers and rates for people."""

from __future__ import annotations

import pytest

from kvmnn._util.text import format_rate, pluralize


@pytest.mark.parametrize(
    ("nbytes", "seconds", "text"),
    [(1 << 20, 0.5, ", 2 MB/s"), ((1 << 20) - 1, 0.5, ""), (0, 0, ""), (10**9, 0, ", 1000000000000 MB/s")],
)
def test_format_rate_small_input_has_no_rate(nbytes, seconds, text):
    assert format_rate(nbytes, seconds) == text


def test_pluralize_counts_other_than_one_are_plural() -> None:
    found = [pluralize(number, "byte") for number in (0, 1, 2, 1001)]
    assert found == ["0 bytes", "1 byte", "2 bytes", "1,001 bytes"]
