"""A budget is a number of tokens or a share of them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmnn.errors import KvmnnError
from kvmnn.policies.policy import Budget


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("0", 0), ("256", 256), ("25%", 250), ("62.5%", 625), ("100%", 1000), ("150%", 1500), ("0%", 0)],
)
def test_budget_parse_resolves_tokens_and_percent(text: str, tokens: int) -> None:
    assert Budget.parse(text).resolve(1000) == tokens


@pytest.mark.parametrize("text", ["", "a", "-1", "1e3", "0.25", "%", "25 %", "1000%", "1.%", "1234567890"])
def test_budget_parse_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(KvmnnError, match="is not a whole number of tokens or a share"):
        Budget.parse(text)


@given(st.decimals(0, 100, places=2), st.integers(0, 1 << 20))
def test_budget_share_is_exact_and_rounded_down(percent: object, tokens: int) -> None:
    assert Budget.parse(f"{percent}%").resolve(tokens) == int(Fraction(str(percent)) * tokens / 100)


def test_budget_is_tokens_or_share() -> None:
    assert Budget(tokens=7).resolve(3) == 7
    assert Budget(share=0.29).resolve(100) == 29
    for wrong in ({}, {"tokens": 1, "share": 0.5}, {"tokens": -1}, {"share": -0.1}, {"share": float("nan")}):
        with pytest.raises(KvmnnError):
            Budget(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Budget(tokens=1.5)  # type: ignore[arg-type]
