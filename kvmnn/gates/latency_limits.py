"""Limits of percentiles: the median, the 95th and the 99th of single restores and of single waits for threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from .._util.dataclass import dataclass
from .limits import GateLimits
from .verdict import NOT_MEASURED, GateResult, format_distinct, verdict_from


@dataclass(frozen=True)
class LatencyLimit:
    """A percentile of one operation of the lossless runtime."""

    #: Name of the gate, as in ``decompression p95``.
    gate: str
    #: Field of `GateLimits`.
    limit: str
    #: Line of a report, and key of rows and history.
    line: str
    #: ``"decompress"`` or ``"wait"``, and field of `kvmnn.runtime.metrics.LatencySummary`.
    operation: str
    percentile: str


LATENCY_LIMITS = tuple(
    LatencyLimit(
        f"{gate} {percentile}",
        f"max_lossless_{name}_{percentile}_us",
        f"runtime_{name}_{percentile}_us",
        operation,
        f"{percentile}_us",
    )
    for gate, name, operation in (("decompression", "decomp", "decompress"), ("async wait", "async_wait", "wait"))
    for percentile in ("p50", "p95", "p99")
)


def build_latency_gates(
    limits: GateLimits,
    value_by_line: Mapping[str, float],
    missing_reason: str,
    why_by_operation: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[GateResult]:
    """Build the gates of those percentiles that are limited; `value_by_line` lacks what was not measured."""
    for entry in LATENCY_LIMITS:
        limit = getattr(limits, entry.limit)
        if limit < 0:
            continue
        value = value_by_line.get(entry.line)
        if value is None:
            yield GateResult(name=entry.gate, verdict=NOT_MEASURED, limit=f"<= {limit:,.0f} us", why=missing_reason)
            continue
        value_text, limit_text = format_distinct(value, limit, 0)
        yield GateResult(
            name=entry.gate,
            verdict=verdict_from(value <= limit),
            value=f"{value_text} us",
            limit=f"<= {limit_text} us",
            why=why_by_operation.get(entry.operation, ""),
        )
