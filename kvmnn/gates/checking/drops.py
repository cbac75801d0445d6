"""The share of the decode speed that is lost: of pairs of speeds, the ratio of their means with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ...text import count
from .verdicts import FAIL, NOT_MEASURED, PASS, UNCLEAR, Gate, Verdict, apart

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, two-sided 95 %, of 1 to 10 degrees of freedom; beyond, 1.96 + 2.5 / n is within 0.02."""


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Speeds side by side, tokens a second.

    Attributes
    ----------
    pairs
        How many.
    before, after
        Mean speeds without and with compression.
    low, high
        The 95 % interval of `value`; None with one pair. Source: the ratio estimator of survey sampling (Cochran,
        Sampling Techniques, chapter 6), its error from ``after - ratio * before`` of each pair, Student's t with one
        degree of freedom less than pairs.
    """

    pairs: int
    before: float
    after: float
    low: float | None
    high: float | None

    @property
    def value(self) -> float:
        """1 - after / before: at most 1, negative where compression is faster."""
        return 1.0 - self.after / self.before

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Drop | None:
        """Of speeds (without, with); None where there are none above 0 without compression."""
        if not pairs or not sum(before for before, _ in pairs) > 0:
            return None
        before, after = (fmean(pair[side] for pair in pairs) for side in (0, 1))
        low = high = None
        freedom = len(pairs) - 1
        if freedom:
            t = _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom
            ratio = after / before
            apart = sum((fast - ratio * plain) ** 2 for plain, fast in pairs)
            width = t * math.sqrt(apart / freedom / len(pairs)) / before
            low, high = 1.0 - ratio - width, min(1.0, 1.0 - ratio + width)
        return cls(pairs=len(pairs), before=before, after=after, low=low, high=high)

    def verdict(self, limit: float) -> Verdict:
        """Pass or fail where the whole interval says so, else unclear, which is no pass."""
        if limit >= 1.0:  # no speed is below 0
            return PASS
        if self.low is None or self.high is None:
            return UNCLEAR
        return PASS if self.high <= limit else FAIL if self.low > limit else UNCLEAR

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return "one pair, no interval"
        return f"95 % {self.low:+.1%} to {self.high:+.1%}"


def drop_gate(drop: Drop | None, limit: float, what: str, missing: str = "no run has a speed") -> Gate:
    """The gate of a drop.

    Parameters
    ----------
    what
        What the pairs are, for the reader: said behind *pair* or *pairs*.
    missing
        Why there is none.
    """
    name, shown = "decode drop", f"<= {limit:.2%}"
    if drop is None and limit >= 1.0:
        return Gate(name=name, verdict=PASS, limit=shown, why=f"no speed is below 0; {missing}")
    if drop is None:
        return Gate(name=name, verdict=NOT_MEASURED, limit=shown, why=missing)
    verdict = drop.verdict(limit)
    why = f"{drop.after:.2f} of {drop.before:.2f} tok/s, {count(drop.pairs, 'pair')} {what}; {drop}"
    if verdict == UNCLEAR:
        why += (
            "; the limit lies in it: more runs make it narrower" if drop.low is not None else ": more runs are needed"
        )
    lost, most = apart(100 * drop.value, 100 * limit, 2)
    sign = "" if lost.startswith("-") else "+"
    return Gate(name=name, verdict=verdict, value=f"{sign}{lost}%", limit=f"<= {most}%", why=why)
