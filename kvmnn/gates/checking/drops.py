"""The share of the decode speed that is lost: of pairs of speeds, the ratio of their means with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ...text import pluralize
from .verdicts import FAIL, NOT_MEASURED, PASS, UNCLEAR, GateResult, Verdict, format_distinct

_STUDENT_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, two-sided 95 %, of 1 to 10 degrees of freedom; beyond, 1.96 + 2.5 / n is within 0.02."""


@dataclass(frozen=True, kw_only=True)
class DecodeSlowdown:
    """Speeds side by side, tokens a second.

    Attributes
    ----------
    num_pairs
        How many.
    baseline_speed, candidate_speed
        Mean speeds without and with compression.
    interval_low, interval_high
        The 95 % interval of `drop_ratio`; None with one pair. Source: the ratio estimator of survey sampling (Cochran,
        Sampling Techniques, chapter 6), its error from ``after - ratio * before`` of each pair, Student's t with one
        degree of freedom less than pairs.
    """

    num_pairs: int
    baseline_speed: float
    candidate_speed: float
    interval_low: float | None
    interval_high: float | None

    @property
    def drop_ratio(self) -> float:
        """1 - after / before: at most 1, negative where compression is faster."""
        return 1.0 - self.candidate_speed / self.baseline_speed

    @classmethod
    def from_pairs(cls, pairs: Sequence[tuple[float, float]]) -> DecodeSlowdown | None:
        """Of speeds (without, with); None where there are none above 0 without compression."""
        if not pairs or not sum(baseline_speed for baseline_speed, _ in pairs) > 0:
            return None
        baseline_speed, candidate_speed = (fmean(pair[side] for pair in pairs) for side in (0, 1))
        interval_low = interval_high = None
        degrees_of_freedom = len(pairs) - 1
        if degrees_of_freedom:
            t_value = (
                _STUDENT_T_95[degrees_of_freedom - 1]
                if degrees_of_freedom <= len(_STUDENT_T_95)
                else 1.96 + 2.5 / degrees_of_freedom
            )
            ratio = candidate_speed / baseline_speed
            squared_residuals = sum((candidate - ratio * baseline) ** 2 for baseline, candidate in pairs)
            half_width = t_value * math.sqrt(squared_residuals / degrees_of_freedom / len(pairs)) / baseline_speed
            interval_low, interval_high = 1.0 - ratio - half_width, min(1.0, 1.0 - ratio + half_width)
        return cls(
            num_pairs=len(pairs),
            baseline_speed=baseline_speed,
            candidate_speed=candidate_speed,
            interval_low=interval_low,
            interval_high=interval_high,
        )

    def judge(self, limit: float) -> Verdict:
        """Pass or fail where the whole interval says so, else unclear, which is no pass."""
        if limit >= 1.0:  # no speed is below 0
            return PASS
        if self.interval_low is None or self.interval_high is None:
            return UNCLEAR
        return PASS if self.interval_high <= limit else FAIL if self.interval_low > limit else UNCLEAR

    def __str__(self) -> str:
        if self.interval_low is None or self.interval_high is None:
            return "one pair, no interval"
        return f"95 % {self.interval_low:+.1%} to {self.interval_high:+.1%}"


def build_slowdown_gate(
    slowdown: DecodeSlowdown | None, limit: float, pairs_text: str, missing_reason: str = "no run has a speed"
) -> GateResult:
    """The gate of a drop.

    Parameters
    ----------
    pairs_text
        What the pairs are, for the reader: said behind *pair* or *pairs*.
    missing_reason
        Why there is none.
    """
    name, limit_text = "decode drop", f"<= {limit:.2%}"
    if slowdown is None and limit >= 1.0:
        return GateResult(name=name, verdict=PASS, limit=limit_text, why=f"no speed is below 0; {missing_reason}")
    if slowdown is None:
        return GateResult(name=name, verdict=NOT_MEASURED, limit=limit_text, why=missing_reason)
    verdict = slowdown.judge(limit)
    why = (
        f"{slowdown.candidate_speed:.2f} of {slowdown.baseline_speed:.2f} tok/s, "
        f"{pluralize(slowdown.num_pairs, 'pair')} {pairs_text}; {slowdown}"
    )
    if verdict == UNCLEAR:
        why += (
            "; the limit lies in it: more runs make it narrower"
            if slowdown.interval_low is not None
            else ": more runs are needed"
        )
    drop_text, max_drop_text = format_distinct(100 * slowdown.drop_ratio, 100 * limit, 2)
    sign = "" if drop_text.startswith("-") else "+"
    return GateResult(name=name, verdict=verdict, value=f"{sign}{drop_text}%", limit=f"<= {max_drop_text}%", why=why)
