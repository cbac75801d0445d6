"""Percentiles of durations: which share of all each of them has below it."""

from __future__ import annotations

import pytest

from kvmnn.runtime.metrics import LatencyHistogram


@pytest.mark.parametrize(
    ("slow", "p50", "p95", "p99"),
    [
        (0, "quick", "quick", "quick"),
        (1, "quick", "quick", "quick"),
        (2, "quick", "quick", "slow"),
        (5, "quick", "quick", "slow"),
        (6, "quick", "slow", "slow"),
        (50, "quick", "slow", "slow"),
        (51, "slow", "slow", "slow"),
    ],
)
def test_summary_percentiles_of_100_durations(slow: int, p50: str, p95: str, p99: str) -> None:
    """Of 100 durations `slow` take a thousand times as long as the others."""
    microseconds = {"quick": 1.0, "slow": 1000.0}
    latencies = LatencyHistogram()
    for number in range(100):
        latencies.add(1_000_000 if number < slow else 1000)
    summary = latencies.summarize()
    for found, expected in ((summary.p50_us, p50), (summary.p95_us, p95), (summary.p99_us, p99)):
        assert microseconds[expected] <= found <= 1.1 * microseconds[expected]
    assert summary.count == 100 and summary.max_us == microseconds["slow" if slow else "quick"]
    assert summary.total_us == pytest.approx(slow * 1000.0 + (100 - slow) * 1.0)
