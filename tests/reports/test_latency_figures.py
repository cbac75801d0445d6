"""Which run's latencies a report shows."""

from __future__ import annotations

from kvmnn.reports.page.page_sections import _OPERATION_NAMES, _find_slowest
from kvmnn.runtime.metrics import LatencySummary


def latency(p95: float, p99: float, count: int = 10) -> LatencySummary:
    return LatencySummary(count=count, total_us=1.0, p50_us=1.0, p95_us=p95, p99_us=p99, max_us=p99)


def test_find_slowest_run_has_the_highest_p99() -> None:
    first, second = list(_OPERATION_NAMES)[:2]
    steady, spiky = latency(p95=90.0, p99=100.0), latency(p95=10.0, p99=400.0)
    for runs in ([steady, spiky], [spiky, steady]):
        assert _find_slowest([{first: one} for one in runs]) == {first: spiky}
    never = latency(p95=9e9, p99=9e9, count=0)
    assert _find_slowest([{first: steady, second: spiky}, {first: never}]) == {first: steady, second: spiky}
