"""How many tokens may stay: a number, or a share of a number that is known later."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

from ..checks import validate_count, validate_fraction
from ..errors import KvmnnError


@dataclass(frozen=True)
class Budget:
    """A number of tokens, or a share of one; exactly one of them is given.

    Parameters
    ----------
    tokens
        At least 0.
    share
        1.0 is all. Taken as the decimal number that it is written as: 0.29 of 100 is 29.

    Raises
    ------
    KvmnnError
        For none of them or both, and for values out of range.

    Examples
    --------
    >>> Budget.parse("256").resolve(1000), Budget.parse("25%").resolve(1000)
    (256, 250)
    """

    tokens: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.share is None):
            raise KvmnnError("a budget is a number of tokens or a share of them: expected one of the two")
        if self.tokens is not None:
            validate_count("budget", self.tokens)
        if self.share is not None:
            validate_fraction("budget", self.share)

    @classmethod
    def parse(cls, text: str) -> Self:
        """A budget from ``"256"`` or ``"25%"``.

        Raises
        ------
        KvmnnError
            For other texts.
        """
        if re.fullmatch(r"\d{1,9}", text):
            return cls(tokens=int(text))
        match = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)%", text)
        if match is None:
            raise KvmnnError(f"{text!r} is not a whole number of tokens or a share such as 25%")
        return cls(share=float(Fraction(match[1]) / 100))

    def resolve(self, tokens: int) -> int:
        """The number of tokens; of a share of `tokens`, rounded down."""
        if self.tokens is not None:
            return self.tokens
        return int(Fraction(str(self.share)) * tokens)
