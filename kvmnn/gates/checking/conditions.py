"""The values of the rows of one case against their limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..logs.columns import DECOMPRESSED_COLUMN
from ..logs.parsing import find_missing_columns
from .limits import GateLimits
from .log_scan import LogScan
from .metric_rows import MetricRow, MetricRows
from .offline_ratio import OfflineRatio


@dataclass(frozen=True, kw_only=True)
class DecodeStats:
    """Tokens a second of decoding over the rows, 90th percentile as the element of rank ceil(0.9 n)."""

    mean: float
    median: float
    p90: float
    best: float
    judged_speed: float

    @classmethod
    def from_rows(cls, rows: Sequence[MetricRow], aggregation: str) -> DecodeStats:
        """Over rows; `judged_speed` is the one that `aggregation` names."""
        speeds = sorted(row.decode_speed for row in rows)
        num_speeds = len(speeds)
        middle_index = num_speeds // 2
        speed_by_aggregation = {
            "avg": sum(speeds) / num_speeds,
            "median": speeds[middle_index]
            if num_speeds % 2
            else (speeds[middle_index - 1] + speeds[middle_index]) / 2.0,
            "p90": speeds[min(num_speeds, max(1, math.ceil(0.9 * num_speeds))) - 1],
            "best": max(rows, key=lambda row: row.decode_speed).decode_speed,
        }
        return cls(
            mean=speed_by_aggregation["avg"],
            median=speed_by_aggregation["median"],
            p90=speed_by_aggregation["p90"],
            best=speed_by_aggregation["best"],
            judged_speed=speed_by_aggregation[aggregation],
        )


class CaseConditions:
    """The largest values of the rows, and whether each is within its limit."""

    def __init__(
        self,
        rows: MetricRows,
        limits: GateLimits,
        logs: LogScan,
        decode: DecodeStats,
        selected_ratio: float,
        online_ratio: OfflineRatio | None,
    ) -> None:
        self.rows, self.limits, self.logs, self.decode, self.selected_ratio = rows, limits, logs, decode, selected_ratio
        self.lossless_ratio = online_ratio.ratio if online_ratio is not None else selected_ratio
        self.lossy_ratio = rows.max_value("h2o_lossy")
        self.decompress_us = rows.max_value("h2o_lossless_decomp_us")
        self.queue_peak = rows.max_value("h2o_lossless_queue_peak")
        self.num_fallbacks = rows.max_value("h2o_lossless_fallback")
        self.num_skips = rows.max_value("h2o_lossless_backpressure_skip")
        self.async_queue_peak = rows.max_value("h2o_lossless_async_queue_peak")
        self.async_wait_us = rows.max_value("h2o_lossless_async_wait_us")
        self.cache_hits = rows.max_value("h2o_lossless_decode_cache_hit")
        self.cache_misses = rows.max_value("h2o_lossless_decode_cache_miss")
        self.cache_lookups = max(
            row.numbers["h2o_lossless_decode_cache_hit"] + row.numbers["h2o_lossless_decode_cache_miss"]
            for row in rows.rows
        )
        self.missing_columns = find_missing_columns(rows.columns)
        self.has_bytes_column = DECOMPRESSED_COLUMN in rows.columns
        self.decompressed_bytes = rows.max_value(DECOMPRESSED_COLUMN)
        self._decide()

    def _decide(self) -> None:
        limits = self.limits
        self.lossy_pass = self.lossy_ratio >= limits.lossy_target
        self.selected_pass = self.selected_ratio >= limits.lossless_target
        self.lossless_pass = self.lossless_ratio >= limits.lossless_target
        self.columns_pass = not (limits.strict_runtime_metric_columns and self.missing_columns)
        self.decomp_required_pass = not limits.require_runtime_decomp or self.decompress_us > 0.0
        self.decomp_budget_pass = _is_within(self.decompress_us, limits.max_lossless_decomp_us)
        self.decomp_pass = self.decomp_required_pass and self.decomp_budget_pass
        self.wait_pass = _is_within(self.async_wait_us, limits.max_lossless_async_wait_us)
        self.async_queue_pass = not limits.require_async_queue_activity or self.async_queue_peak > 0.0
        self.hit_pass = not limits.require_decode_cache_hit or self.cache_hits > 0.0
        self.activity_pass = not limits.require_decode_cache_activity or self.cache_lookups > 0.0
        self.queue_pass = _is_within(self.queue_peak, limits.max_lossless_queue_peak)
        self.fallback_pass = _is_within(self.num_fallbacks, limits.max_lossless_fallback)
        self.skip_pass = _is_within(self.num_skips, limits.max_lossless_backpressure_skip)
        self.is_decode_gated = limits.decode_baseline > 0.0
        self.drop_ratio = (
            (limits.decode_baseline - self.decode.judged_speed) / limits.decode_baseline
            if self.is_decode_gated
            else 0.0
        )
        self.decode_pass = not self.is_decode_gated or self.drop_ratio <= limits.decode_drop_target
        self._decide_headroom()
        self._decide_consistency()

    def _decide_headroom(self) -> None:
        target, min_ratio = self.limits.max_lossless_async_wait_us, self.limits.async_wait_headroom_warn_ratio
        self.headroom_us = target - self.async_wait_us if target > 0.0 else 0.0
        self.headroom_ratio = self.headroom_us / target if target > 0.0 else 1.0
        self.is_headroom_low = target > 0.0 and min_ratio >= 0.0 and self.wait_pass and self.headroom_ratio < min_ratio

    def _decide_consistency(self) -> None:
        limits = self.limits
        self.max_invalid_lines = max(0, limits.max_kv_invalid_log_lines)
        self.log_pass = self.logs.num_invalid <= self.max_invalid_lines
        self.requires_async = limits.async_threads > 0 and limits.runtime_mode != "probe"
        self.async_pass = not self.requires_async or self.async_queue_peak > 0.0 or self.async_wait_us > 0.0
        self.requires_restore = limits.runtime_mode in ("full", "store")
        was_restored = self.decompress_us > 0.0 and (self.decompressed_bytes > 0.0 or not self.has_bytes_column)
        self.restore_pass = not self.requires_restore or was_restored
        self.clean_pass = self.num_fallbacks <= 0.0
        all_passed = (self.log_pass, self.async_pass, self.restore_pass, self.clean_pass)
        self.is_consistent = not limits.require_kv_content_consistency or all(all_passed)

    def warn_low_headroom(self) -> list[str]:
        """A line where little of the waiting allowed is left."""
        if not self.is_headroom_low:
            return []
        return [
            f"[WARN] runtime async wait headroom is low: best={self.async_wait_us:.2f}us "
            f"target={self.limits.max_lossless_async_wait_us:.2f}us headroom={self.headroom_us:.2f}us "
            f"ratio={self.headroom_ratio:.4f}"
        ]


def _is_within(value: float, limit: float) -> bool:
    return limit < 0.0 or value <= limit
