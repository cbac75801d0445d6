"""The values of the rows of one case against their limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..logs.columns import DECOMPRESSED
from ..logs.parsing import missing_columns
from .limits import Limits
from .log_scan import LogScan
from .metric_rows import MetricRow, MetricRows
from .offline_ratio import OfflineRatio


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Tokens a second of decoding over the rows, 90th percentile as the element of rank ceil(0.9 n)."""

    mean: float
    median: float
    p90: float
    best: float
    gate: float

    @classmethod
    def of(cls, rows: Sequence[MetricRow], aggregation: str) -> Decode:
        """Over rows; `gate` is the one that `aggregation` names."""
        speeds = sorted(row.decode for row in rows)
        number = len(speeds)
        middle = number // 2
        found = {
            "avg": sum(speeds) / number,
            "median": speeds[middle] if number % 2 else (speeds[middle - 1] + speeds[middle]) / 2.0,
            "p90": speeds[min(number, max(1, math.ceil(0.9 * number))) - 1],
            "best": max(rows, key=lambda row: row.decode).decode,
        }
        return cls(
            mean=found["avg"],
            median=found["median"],
            p90=found["p90"],
            best=found["best"],
            gate=found[aggregation],
        )


class Conditions:
    """The largest values of the rows, and whether each is within its limit."""

    def __init__(
        self,
        rows: MetricRows,
        limits: Limits,
        logs: LogScan,
        decode: Decode,
        selected: float,
        online: OfflineRatio | None,
    ) -> None:
        self.rows, self.limits, self.logs, self.decode, self.selected = rows, limits, logs, decode, selected
        self.lossless = online.ratio if online is not None else selected
        self.lossy = rows.largest("h2o_lossy")
        self.decomp = rows.largest("h2o_lossless_decomp_us")
        self.queue = rows.largest("h2o_lossless_queue_peak")
        self.fallback = rows.largest("h2o_lossless_fallback")
        self.skip = rows.largest("h2o_lossless_backpressure_skip")
        self.async_queue = rows.largest("h2o_lossless_async_queue_peak")
        self.wait = rows.largest("h2o_lossless_async_wait_us")
        self.hit = rows.largest("h2o_lossless_decode_cache_hit")
        self.miss = rows.largest("h2o_lossless_decode_cache_miss")
        self.activity = max(
            row.numbers["h2o_lossless_decode_cache_hit"] + row.numbers["h2o_lossless_decode_cache_miss"]
            for row in rows.rows
        )
        self.missing = missing_columns(rows.columns)
        self.bytes_column = DECOMPRESSED in rows.columns
        self.decompressed = rows.largest(DECOMPRESSED)
        self._decide()

    def _decide(self) -> None:
        limits = self.limits
        self.lossy_pass = self.lossy >= limits.lossy_target
        self.selected_pass = self.selected >= limits.lossless_target
        self.lossless_pass = self.lossless >= limits.lossless_target
        self.columns_pass = not (limits.strict_runtime_metric_columns and self.missing)
        self.decomp_required_pass = not limits.require_runtime_decomp or self.decomp > 0.0
        self.decomp_budget_pass = _within(self.decomp, limits.max_lossless_decomp_us)
        self.decomp_pass = self.decomp_required_pass and self.decomp_budget_pass
        self.wait_pass = _within(self.wait, limits.max_lossless_async_wait_us)
        self.async_queue_pass = not limits.require_async_queue_activity or self.async_queue > 0.0
        self.hit_pass = not limits.require_decode_cache_hit or self.hit > 0.0
        self.activity_pass = not limits.require_decode_cache_activity or self.activity > 0.0
        self.queue_pass = _within(self.queue, limits.max_lossless_queue_peak)
        self.fallback_pass = _within(self.fallback, limits.max_lossless_fallback)
        self.skip_pass = _within(self.skip, limits.max_lossless_backpressure_skip)
        self.decode_on = limits.decode_baseline > 0.0
        self.drop = (limits.decode_baseline - self.decode.gate) / limits.decode_baseline if self.decode_on else 0.0
        self.decode_pass = not self.decode_on or self.drop <= limits.decode_drop_target
        self._decide_headroom()
        self._decide_consistency()

    def _decide_headroom(self) -> None:
        target, least = self.limits.max_lossless_async_wait_us, self.limits.async_wait_headroom_warn_ratio
        self.headroom = target - self.wait if target > 0.0 else 0.0
        self.headroom_ratio = self.headroom / target if target > 0.0 else 1.0
        self.headroom_low = target > 0.0 and least >= 0.0 and self.wait_pass and self.headroom_ratio < least

    def _decide_consistency(self) -> None:
        limits = self.limits
        self.lines_allowed = max(0, limits.max_kv_invalid_log_lines)
        self.log_pass = self.logs.invalid <= self.lines_allowed
        self.async_needed = limits.async_threads > 0 and limits.runtime_mode != "probe"
        self.async_pass = not self.async_needed or self.async_queue > 0.0 or self.wait > 0.0
        self.restore_needed = limits.runtime_mode in ("full", "store")
        restored = self.decomp > 0.0 and (self.decompressed > 0.0 or not self.bytes_column)
        self.restore_pass = not self.restore_needed or restored
        self.clean_pass = self.fallback <= 0.0
        parts = (self.log_pass, self.async_pass, self.restore_pass, self.clean_pass)
        self.consistent = not limits.require_kv_content_consistency or all(parts)

    def headroom_warned(self) -> list[str]:
        """A line where little of the waiting allowed is left."""
        if not self.headroom_low:
            return []
        return [
            f"[WARN] runtime async wait headroom is low: best={self.wait:.2f}us "
            f"target={self.limits.max_lossless_async_wait_us:.2f}us headroom={self.headroom:.2f}us "
            f"ratio={self.headroom_ratio:.4f}"
        ]


def _within(value: float, limit: float) -> bool:
    return limit < 0.0 or value <= limit
