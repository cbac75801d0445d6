"""The drop of the decode speed: the ratio of means, its interval, and verdicts over the whole interval."""

from __future__ import annotations

import numpy as np
import pytest

from kvmnn.gates.slowdown import DecodeSlowdown, build_slowdown_gate


def test_decode_slowdown_is_ratio_of_means() -> None:
    """The mean of the pairs' own drops is something else, and has no lower bound."""
    drop = DecodeSlowdown.from_pairs([(10.0, 10.0), (1.0, 3.0)])
    assert drop is not None
    assert (drop.baseline_speed, drop.candidate_speed) == (5.5, 6.5)
    assert drop.drop_ratio == pytest.approx(1 - 6.5 / 5.5)
    assert drop.interval_high is not None and drop.interval_high <= 1


def test_decode_slowdown_without_speed_is_not_measured() -> None:
    assert DecodeSlowdown.from_pairs([]) is None
    assert DecodeSlowdown.from_pairs([(0.0, 3.0)]) is None
    assert build_slowdown_gate(None, 0.05, "pairs", "why").verdict == "not measured"


@pytest.mark.parametrize(
    ("pairs", "limit", "verdict"),
    [
        ([(10.0, 9.9), (10.2, 10.1), (9.9, 9.8)], 0.05, "pass"),
        ([(10.0, 8.9), (10.2, 9.1), (9.9, 8.8)], 0.05, "fail"),
        ([(10.0, 8.0), (10.2, 10.1), (9.9, 10.9)], 0.05, "unclear"),
        ([(10.0, 12.0), (10.0, 8.5)], 0.05, "unclear"),  # faster on average
        ([(10.0, 9.9)], 0.05, "unclear"),
        ([(10.0, 1.0)], 1.0, "pass"),
        ([(10.0, 10.0), (10.0, 10.0)], 0.0, "pass"),
    ],
)
def test_decode_slowdown_verdict_uses_whole_interval(
    pairs: list[tuple[float, float]], limit: float, verdict: str
) -> None:
    drop = DecodeSlowdown.from_pairs(pairs)
    assert drop is not None
    assert drop.judge(limit) == verdict
    gate = build_slowdown_gate(drop, limit, "side by side")
    assert gate.verdict == verdict
    assert ("more runs" in gate.why) == (verdict == "unclear")


def test_decode_slowdown_interval_has_nominal_coverage() -> None:
    """Speeds of a machine that wanders, both sides together, under a drop of 10 %."""
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(2000):
        machine = rng.normal(60, 12, 6)
        plain, fast = machine + rng.normal(0, 3, 6), 0.9 * machine + rng.normal(0, 3, 6)
        drop = DecodeSlowdown.from_pairs(list(zip(plain.tolist(), fast.tolist(), strict=True)))
        assert drop is not None and drop.interval_low is not None and drop.interval_high is not None
        inside += drop.interval_low <= 0.1 <= drop.interval_high
    assert 0.92 <= inside / 2000 <= 0.98
