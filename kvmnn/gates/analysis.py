"""Judge the rows of one case by the gates of the MNN fork's analyser, and format its report, ``summary.md``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .._util.dataclass import dataclass
from .._util.text import escape_markdown
from .case_inputs import LogScan, MetricRow, MetricRows, OfflineRatio
from .latency_limits import build_latency_gates
from .limits import GateLimits
from .logs import DECOMPRESSED_COLUMN, find_missing_columns
from .verdict import GateResult, build_total_gates, format_distinct, verdict_from


@dataclass(frozen=True, kw_only=True)
class DecodeStats:
    """Decode speeds over the rows in tokens per second; the 90th percentile is the element of rank ceil(0.9 n)."""

    mean: float
    median: float
    p90: float
    best: float
    judged_speed: float

    @classmethod
    def from_rows(cls, rows: Sequence[MetricRow], aggregation: str) -> DecodeStats:
        """Compute the speeds over rows; `aggregation` selects the `judged_speed`."""
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
        self._judge_conditions()

    def _judge_conditions(self) -> None:
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
        self._judge_headroom()
        self._judge_consistency()

    def _judge_headroom(self) -> None:
        target, min_ratio = self.limits.max_lossless_async_wait_us, self.limits.async_wait_headroom_warn_ratio
        self.headroom_us = target - self.async_wait_us if target > 0.0 else 0.0
        self.headroom_ratio = self.headroom_us / target if target > 0.0 else 1.0
        self.is_headroom_low = target > 0.0 and min_ratio >= 0.0 and self.wait_pass and self.headroom_ratio < min_ratio

    def _judge_consistency(self) -> None:
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
        """Return a warning if little of the permitted waiting time is left."""
        if not self.is_headroom_low:
            return []
        return [
            f"[WARN] runtime async wait headroom is low: best={self.async_wait_us:.2f}us "
            f"target={self.limits.max_lossless_async_wait_us:.2f}us headroom={self.headroom_us:.2f}us "
            f"ratio={self.headroom_ratio:.4f}"
        ]


def _is_within(value: float, limit: float) -> bool:
    return limit < 0.0 or value <= limit


def build_ratio_lines(conditions: CaseConditions, ratio_source: str) -> dict[str, str]:
    """Build the report lines about ratios."""
    return {
        "lossy_target": format_four_digits(conditions.limits.lossy_target),
        "lossy_best": format_four_digits(conditions.lossy_ratio),
        "lossy_pass": format_flag(conditions.lossy_pass),
        "lossless_target": format_four_digits(conditions.limits.lossless_target),
        "lossless_selected_source": ratio_source,
        "lossless_selected_value": format_four_digits(conditions.selected_ratio),
        "lossless_selected_pass": format_flag(conditions.selected_pass),
        "lossless_online_value": format_four_digits(conditions.lossless_ratio),
        "lossless_online_pass": format_flag(conditions.lossless_pass),
    }


def build_runtime_lines(conditions: CaseConditions) -> dict[str, str]:
    """Build the report lines about the runtime and its gates."""
    limits = conditions.limits
    return {
        "runtime_decomp_required": format_flag(limits.require_runtime_decomp),
        "runtime_decomp_best_us": format_four_digits(conditions.decompress_us),
        "runtime_metric_columns_strict": format_flag(limits.strict_runtime_metric_columns),
        "runtime_metric_columns_ok": format_flag(not conditions.missing_columns),
        "runtime_metric_columns_pass": format_flag(conditions.columns_pass),
        "runtime_metric_missing_columns": str(conditions.missing_columns),
        **build_limit_lines("runtime_decomp", limits.max_lossless_decomp_us, "_us"),
        "runtime_async_queue_peak_best": format_four_digits(conditions.async_queue_peak),
        "runtime_async_queue_activity_required": format_flag(limits.require_async_queue_activity),
        "runtime_async_wait_best_us": format_four_digits(conditions.async_wait_us),
        **build_limit_lines("runtime_async_wait", limits.max_lossless_async_wait_us, "_us"),
        **_build_headroom_lines(conditions),
        "runtime_decode_cache_hit_best": format_four_digits(conditions.cache_hits),
        "runtime_decode_cache_miss_best": format_four_digits(conditions.cache_misses),
        "runtime_decode_cache_activity_best": format_four_digits(conditions.cache_lookups),
        "runtime_decode_cache_required": format_flag(limits.require_decode_cache_hit),
        "runtime_decode_cache_activity_required": format_flag(limits.require_decode_cache_activity),
        "runtime_decomp_required_pass": format_flag(conditions.decomp_required_pass),
        "runtime_decomp_budget_pass": format_flag(conditions.decomp_budget_pass),
        "runtime_async_queue_activity_pass": format_flag(conditions.async_queue_pass),
        "runtime_async_wait_pass": format_flag(conditions.wait_pass),
        "runtime_decode_cache_required_pass": format_flag(conditions.hit_pass),
        "runtime_decode_cache_activity_pass": format_flag(conditions.activity_pass),
        "runtime_queue_peak_best": format_four_digits(conditions.queue_peak),
        "runtime_fallback_best": format_four_digits(conditions.num_fallbacks),
        "runtime_backpressure_skip_best": format_four_digits(conditions.num_skips),
        **build_limit_lines("runtime_queue_peak", limits.max_lossless_queue_peak),
        "runtime_queue_peak_pass": format_flag(conditions.queue_pass),
        **build_limit_lines("runtime_fallback", limits.max_lossless_fallback),
        "runtime_fallback_pass": format_flag(conditions.fallback_pass),
        **build_limit_lines("runtime_backpressure_skip", limits.max_lossless_backpressure_skip),
        "runtime_backpressure_skip_pass": format_flag(conditions.skip_pass),
        "runtime_decomp_pass": format_flag(conditions.decomp_pass),
    }


def _build_headroom_lines(conditions: CaseConditions) -> dict[str, str]:
    if conditions.limits.max_lossless_async_wait_us < 0.0:
        return {}
    return {
        "runtime_async_wait_headroom_us": format_four_digits(conditions.headroom_us),
        "runtime_async_wait_headroom_ratio": f"{conditions.headroom_ratio:.6f}",
        "runtime_async_wait_headroom_warn_ratio": f"{conditions.limits.async_wait_headroom_warn_ratio:.6f}",
        "runtime_async_wait_headroom_warn": format_flag(conditions.is_headroom_low),
    }


def build_consistency_lines(conditions: CaseConditions) -> dict[str, str]:
    """Build the report lines about the checks that the fork calls consistency."""
    limits = conditions.limits
    return {
        "require_kv_content_consistency": format_flag(limits.require_kv_content_consistency),
        "runtime_mode": limits.runtime_mode,
        "async_threads": str(limits.async_threads),
        "runtime_decompressed_bytes_available": format_flag(conditions.has_bytes_column),
        "runtime_decompressed_bytes_best": format_four_digits(conditions.decompressed_bytes),
        "kv_restore_required": format_flag(conditions.requires_restore),
        "kv_restore_activity_pass": format_flag(conditions.restore_pass),
        "kv_fallback_clean_pass": format_flag(conditions.clean_pass),
        "kv_async_activity_required": format_flag(conditions.requires_async),
        "kv_async_activity_pass": format_flag(conditions.async_pass),
        "kv_invalid_log_count": str(conditions.logs.num_invalid),
        "kv_invalid_log_max_allowed": str(conditions.max_invalid_lines),
        "kv_invalid_log_pass": format_flag(conditions.log_pass),
        "kv_invalid_log_examples": str(list(conditions.logs.examples)),
        "kv_content_consistency_pass": format_flag(conditions.is_consistent),
    }


def build_decode_lines(conditions: CaseConditions) -> dict[str, str]:
    """Build the report lines about speeds, and about the gate if there is a baseline."""
    limits, decode = conditions.limits, conditions.decode
    lines = {
        "decode_gate_enabled": format_flag(conditions.is_decode_gated),
        "decode_aggregation": limits.decode_gate_aggregation,
        "decode_gate_tps": format_four_digits(decode.judged_speed),
        "decode_avg_tps": format_four_digits(decode.mean),
        "decode_median_tps": format_four_digits(decode.median),
        "decode_p90_tps": format_four_digits(decode.p90),
    }
    if not conditions.is_decode_gated:
        return lines
    lines["decode_baseline"] = format_four_digits(limits.decode_baseline)
    if limits.decode_baseline_source:
        lines["decode_baseline_source"] = limits.decode_baseline_source
    if limits.decode_baseline_samples > 0:
        lines["decode_baseline_samples"] = str(limits.decode_baseline_samples)
    return lines | {
        "decode_best": format_four_digits(decode.best),
        "decode_drop_ratio": f"{conditions.drop_ratio:.6f}",
        "decode_drop_target": f"{limits.decode_drop_target:.6f}",
        "decode_pass": format_flag(conditions.decode_pass),
    }


def build_offline_lines(kind: str, offline: OfflineRatio | None) -> dict[str, str]:
    """Build the report lines about an offline evaluation; empty if there was none."""
    if offline is None:
        return {}
    return {
        f"{kind}_selected_entries": str(offline.num_entries),
        f"{kind}_selected_layers": str(offline.layers),
        f"{kind}_json": f"`{offline.path}`",
    }


def build_limit_lines(name: str, limit: float, unit: str = "") -> dict[str, str]:
    """Build the report lines about a limit: whether it is enabled, and its value."""
    enabled_line = {f"{name}_gate_enabled": format_flag(limit >= 0.0)}
    return enabled_line | {f"{name}_target{unit}": format_four_digits(limit)} if limit >= 0.0 else enabled_line


def format_four_digits(value: float) -> str:
    """Format a number with four digits after the decimal point."""
    return f"{value:.4f}"


def format_flag(value: bool) -> str:
    """Format a boolean as the fork writes it."""
    return "true" if value else "false"


_OLD_BENCH_WARNING = (
    "[WARN] likely using an older llm_bench binary/log format; rebuild and use the expected v6 llm_bench."
)
_UPPER_BOUND_WARNING = (
    "[WARN] online-sim lossless JSON not provided or invalid; falling back to upper-bound. "
    "Gate result may be unreliable."
)
_RUNTIME_VALUE_WARNING = (
    "[WARN] no offline lossless JSON provided; falling back to runtime value. Gate result may be unreliable."
)

SELECTED_RATIO_WARNINGS = frozenset({_UPPER_BOUND_WARNING, _RUNTIME_VALUE_WARNING})
"""Warnings about the source of the lossless ratio."""


@dataclass(frozen=True, kw_only=True)
class CaseAnalysis:
    """Figures and gates of one case, as in the fork's analyser."""

    #: The judged rows, the limits, and the offline ratios.
    rows: MetricRows
    limits: GateLimits
    online_ratio: OfflineRatio | None
    upper_bound: OfflineRatio | None
    #: The lossless ratio that counts, and where it comes from: ``"offline_online_sim"``, ``"offline_upper_bound"`` or
    #: ``"runtime"``.
    selected_ratio: float
    ratio_source: str
    #: Speeds over the rows.
    decode: DecodeStats
    #: The gates of the verdict, in the fork's order.
    gates: tuple[GateResult, ...]
    #: Section *Quality Gate* of the report, name to text.
    section_lines: Mapping[str, str]
    #: Warnings that the fork prints.
    warnings: tuple[str, ...]
    #: Whether rows and lines come from runs on a model instead of logs.
    is_own_run: bool = False

    @property
    def has_passed(self) -> bool:
        """Return whether all enabled gates passed."""
        return self.section_lines["overall_pass"] == "true"


def analyse(
    rows: MetricRows,
    limits: GateLimits,
    *,
    online_ratio: OfflineRatio | None = None,
    upper_bound: OfflineRatio | None = None,
    logs: LogScan | None = None,
) -> CaseAnalysis:
    """Judge the rows of one case exactly as the fork's analyser does."""
    selected_ratio, ratio_source, ratio_warnings = _select_lossless_ratio(rows, online_ratio, upper_bound)
    decode = DecodeStats.from_rows(rows.rows, limits.decode_gate_aggregation)
    conditions = CaseConditions(rows, limits, logs or LogScan(), decode, selected_ratio, online_ratio)
    warnings = [*warn_missing_columns(rows.columns), *ratio_warnings, *conditions.warn_low_headroom()]
    gates = _build_gates(conditions)
    lines = {
        **build_ratio_lines(conditions, ratio_source),
        **build_runtime_lines(conditions),
        **build_consistency_lines(conditions),
        "overall_pass": format_flag(all(gate.verdict in ("pass", "off") for gate in gates)),
        **build_decode_lines(conditions),
        **build_offline_lines("upper", upper_bound),
        **build_offline_lines("online", online_ratio),
    }
    lines = {"quality_status": "PASS" if lines["overall_pass"] == "true" else "FAIL", **lines}
    return CaseAnalysis(
        rows=rows,
        limits=limits,
        online_ratio=online_ratio,
        upper_bound=upper_bound,
        selected_ratio=selected_ratio,
        ratio_source=ratio_source,
        decode=decode,
        gates=tuple(gates),
        section_lines=lines,
        warnings=tuple(warnings),
    )


def _select_lossless_ratio(
    rows: MetricRows, online_ratio: OfflineRatio | None, upper_bound: OfflineRatio | None
) -> tuple[float, str, list[str]]:
    """Return the lossless ratio to judge, its source, and warnings about it."""
    if online_ratio is not None:
        return online_ratio.ratio, "offline_online_sim", []
    if upper_bound is not None:
        return upper_bound.ratio, "offline_upper_bound", [_UPPER_BOUND_WARNING]
    return rows.mean_value("h2o_lossless"), "runtime", [_RUNTIME_VALUE_WARNING]


def warn_missing_columns(columns: Sequence[str]) -> list[str]:
    """Return the warnings about a table without all columns of the runtime."""
    missing = find_missing_columns(columns)
    return (
        [f"[WARN] runtime metric columns missing in CSV: {', '.join(missing)}", _OLD_BENCH_WARNING] if missing else []
    )


def _build_gates(conditions: CaseConditions) -> list[GateResult]:
    """Build the gates that make up the verdict."""
    limits = conditions.limits
    is_decompress_gated = limits.require_runtime_decomp or limits.max_lossless_decomp_us >= 0.0
    decompress_text, limit_text = format_distinct(conditions.decompress_us, limits.max_lossless_decomp_us, 0)
    limit_texts = [f"<= {limit_text} us"] if limits.max_lossless_decomp_us >= 0.0 else []
    drop_text, max_drop_text = format_distinct(100 * conditions.drop_ratio, 100 * limits.decode_drop_target, 2)
    drop_value = (
        f"{'' if drop_text.startswith('-') else '+'}{drop_text}%"
        if conditions.is_decode_gated
        else f"{conditions.decode.judged_speed:.2f} tok/s"
    )
    return [
        _build_min_gate(
            "lossy ratio", conditions.lossy_ratio, limits.lossy_target, conditions.lossy_pass, "largest of the rows"
        ),
        _build_min_gate(
            "lossless ratio",
            conditions.lossless_ratio,
            limits.lossless_target,
            conditions.lossless_pass,
            _describe_ratio_basis(conditions),
        ),
        GateResult(
            name="decode drop",
            verdict=verdict_from(conditions.decode_pass, is_active=conditions.is_decode_gated),
            value=drop_value,
            limit=f"<= {max_drop_text}%" if conditions.is_decode_gated else "",
            why=f"{conditions.decode.judged_speed:.2f} of {limits.decode_baseline:.2f} tok/s"
            if conditions.is_decode_gated
            else "",
        ),
        GateResult(
            name="columns",
            verdict=verdict_from(conditions.columns_pass, is_active=limits.strict_runtime_metric_columns),
            value=f"{len(conditions.missing_columns)} missing",
            limit="0 missing" if limits.strict_runtime_metric_columns else "",
            why=", ".join(conditions.missing_columns),
        ),
        GateResult(
            name="decompression",
            verdict=verdict_from(conditions.decomp_pass, is_active=is_decompress_gated),
            value=f"{decompress_text} us",
            limit=", ".join((["> 0"] if limits.require_runtime_decomp else []) + limit_texts),
        ),
        _build_max_gate(
            "async wait", conditions.async_wait_us, limits.max_lossless_async_wait_us, conditions.wait_pass, " us"
        ),
        _build_activity_gate(
            "async queue", conditions.async_queue_peak, limits.require_async_queue_activity, conditions.async_queue_pass
        ),
        _build_activity_gate("cache hits", conditions.cache_hits, limits.require_decode_cache_hit, conditions.hit_pass),
        _build_activity_gate(
            "cache lookups", conditions.cache_lookups, limits.require_decode_cache_activity, conditions.activity_pass
        ),
        _build_max_gate("queue peak", conditions.queue_peak, limits.max_lossless_queue_peak, conditions.queue_pass),
        _build_max_gate("fallbacks", conditions.num_fallbacks, limits.max_lossless_fallback, conditions.fallback_pass),
        _build_max_gate("skips", conditions.num_skips, limits.max_lossless_backpressure_skip, conditions.skip_pass),
        GateResult(
            name="consistency",
            verdict=verdict_from(conditions.is_consistent, is_active=limits.require_kv_content_consistency),
            why=_explain_consistency(conditions) if limits.require_kv_content_consistency else "",
        ),
        *build_total_gates(limits.total_target, None, "logs do not have what is held; kvmnn gate run does"),
        *build_latency_gates(limits, {}, "logs have no percentiles; kvmnn gate run does"),
    ]


def _describe_ratio_basis(conditions: CaseConditions) -> str:
    return (
        "mean of the rows"
        if conditions.lossless_ratio == conditions.rows.mean_value("h2o_lossless")
        else "of an offline simulation"
    )


def _explain_consistency(conditions: CaseConditions) -> str:
    """Return the consistency checks that failed; if none did, what was checked, which does not include K and V."""
    failed = [
        explanation
        for passed, explanation in (
            (conditions.log_pass, f"{conditions.logs.num_invalid} lines of damage in the logs"),
            (conditions.async_pass, "nothing was done by the threads"),
            (conditions.restore_pass, "nothing was decompressed"),
            (conditions.clean_pass, f"{conditions.num_fallbacks:g} fallbacks"),
        )
        if not passed
    ]
    return "; ".join(failed) or "activity and logs; no bytes are compared"


def _build_min_gate(name: str, value: float, limit: float, passed: bool, why: str) -> GateResult:
    value_text, limit_text = format_distinct(value, limit, 3)
    return GateResult(name=name, verdict=verdict_from(passed), value=value_text, limit=f">= {limit_text}", why=why)


def _build_max_gate(name: str, value: float, limit: float, passed: bool, unit: str = "") -> GateResult:
    value_text, limit_text = f"{value:,.0f}" if unit else f"{value:,.4g}", f"{limit:,.0f}"
    if value_text == limit_text:
        value_text, limit_text = format_distinct(value, limit, 0)
    return GateResult(
        name=name,
        verdict=verdict_from(passed, is_active=limit >= 0.0),
        value=f"{value_text}{unit}",
        limit=f"<= {limit_text}{unit}" if limit >= 0.0 else "",
    )


def _build_activity_gate(name: str, value: float, required: bool, passed: bool) -> GateResult:
    return GateResult(
        name=name, verdict=verdict_from(passed, is_active=required), value=f"{value:g}", limit="> 0" if required else ""
    )


GATE_HEADING = "## Quality Gate"

_AVERAGE_COLUMNS = (
    ("Avg target keep effective", "h2o_target_keep_effective", 4),
    ("Avg floor keep (sink+recent)", "h2o_floor_keep", 4),
    ("Avg quantized keep", "h2o_quantized_keep", 4),
    ("Avg evict us", "h2o_evict_us", 2),
    ("Avg codec us", "h2o_codec_us", 2),
    ("Avg lossless raw MB", "h2o_lossless_raw_mb", 4),
    ("Avg lossless comp MB", "h2o_lossless_comp_mb", 4),
    ("Avg lossless comp us", "h2o_lossless_comp_us", 2),
    ("Avg lossless decomp us", "h2o_lossless_decomp_us", 2),
    ("Avg lossless queue peak", "h2o_lossless_queue_peak", 2),
    ("Avg lossless fallback", "h2o_lossless_fallback", 2),
    ("Avg lossless backpressure skip", "h2o_lossless_backpressure_skip", 2),
    ("Avg lossless async queue peak", "h2o_lossless_async_queue_peak", 2),
    ("Avg lossless async wait us", "h2o_lossless_async_wait_us", 2),
    ("Avg lossless decode cache hit", "h2o_lossless_decode_cache_hit", 2),
    ("Avg lossless decode cache miss", "h2o_lossless_decode_cache_miss", 2),
)


def format_case_markdown(analysis: CaseAnalysis) -> str:
    """Format the report as Markdown, ending with a newline.

    A missing column is shown as 0, as in the fork; reports of kvmnn's own runs omit it.
    """
    parts = [
        ["# H2O final Summary"],
        _build_average_lines(analysis),
        ["## Best Lossy Ratio"],
        _build_best_row_lines(analysis, lambda row: row.numbers["h2o_lossy"], "lossy ratio"),
        ["## Best Decode TPS"],
        _build_best_row_lines(analysis, lambda row: row.decode_speed, "decode tps"),
        ["## Best Total Ratio"],
        _build_best_row_lines(analysis, lambda row: row.numbers["h2o_lossy"] * analysis.selected_ratio, "total ratio"),
        ["## Pareto Top-5 (by selected total then decode)"],
        _build_pareto_lines(analysis),
        [GATE_HEADING],
        [escape_markdown(f"- {name}: {text}".replace("\n", " ")) for name, text in analysis.section_lines.items()],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _has_no_encoding(analysis: CaseAnalysis) -> bool:
    """Return whether kvmnn's own runs encoded nothing, so that neither ratio nor runtime was measured."""
    return analysis.is_own_run and "lossless_selected_value" not in analysis.section_lines


def _format_if_encoded(analysis: CaseAnalysis, value: float) -> str:
    """Format the selected ratio, or a multiple of it; a dash if it was not measured."""
    return "-" if _has_no_encoding(analysis) else f"{value:.4f}"


def _build_average_lines(analysis: CaseAnalysis) -> list[str]:
    rows = analysis.rows
    lines = [
        f"- Rows: {len(rows.rows)}",
        f"- Avg keep ratio: {rows.mean_value('h2o_keep'):.4f}",
        f"- Avg lossy ratio: {rows.mean_value('h2o_lossy'):.4f}",
        f"- Avg runtime lossless ratio: {rows.format_mean_ratio()}",
        f"- Lossless selected source: {analysis.ratio_source}",
        f"- Lossless selected value: {_format_if_encoded(analysis, analysis.selected_ratio)}",
    ]
    if analysis.upper_bound is not None:
        lines.append(f"- Offline upper-bound lossless: {analysis.upper_bound.ratio:.4f}")
    if analysis.online_ratio is not None:
        lines.append(f"- Offline online-sim lossless: {analysis.online_ratio.ratio:.4f}")
    total = sum(row.numbers["h2o_lossy"] * analysis.selected_ratio for row in rows.rows) / len(rows.rows)
    lines.append(f"- Avg total ratio (selected): {_format_if_encoded(analysis, total)}")
    shown_columns = [entry for entry in _AVERAGE_COLUMNS if not analysis.is_own_run or entry[1] in rows.columns]
    if _has_no_encoding(analysis):
        shown_columns = [entry for entry in shown_columns if not entry[1].startswith("h2o_lossless")]
    return lines + [f"- {heading}: {rows.mean_value(column):.{digits}f}" for heading, column, digits in shown_columns]


def _build_best_row_lines(
    analysis: CaseAnalysis, get_measure: Callable[[MetricRow], float], first_name: str
) -> list[str]:
    """Build the report lines of the row with the largest `get_measure`, its value `first_name` first."""
    row = max(analysis.rows.rows, key=get_measure)
    text_by_name = {
        "decode tps": f"{row.decode_speed:.2f}",
        "lossy ratio": f"{row.numbers['h2o_lossy']:.4f}",
        "keep ratio": f"{row.numbers['h2o_keep']:.4f}",
        f"lossless ratio ({analysis.ratio_source})": _format_if_encoded(analysis, analysis.selected_ratio),
        "runtime lossless ratio": replace(analysis.rows, rows=(row,)).format_mean_ratio(),
        "total ratio": _format_if_encoded(analysis, row.numbers["h2o_lossy"] * analysis.selected_ratio),
        "log": f"`{escape_markdown(row.log_file)}`",
    }
    return [f"- {name}: {text_by_name[name]}" for name in dict.fromkeys([first_name, *text_by_name])]


def _build_pareto_lines(analysis: CaseAnalysis) -> list[str]:
    def get_ratio_and_speed(row: MetricRow) -> tuple[float, float]:
        return row.numbers["h2o_lossy"] * analysis.selected_ratio, row.decode_speed

    rows = sorted(analysis.rows.rows, key=get_ratio_and_speed, reverse=True)[:5]
    return [
        f"{rank}. total={_format_if_encoded(analysis, get_ratio_and_speed(row)[0])}, decode={row.decode_speed:.2f}, "
        f"lossy={row.numbers['h2o_lossy']:.4f}, lossless={_format_if_encoded(analysis, analysis.selected_ratio)}, "
        f"log=`{escape_markdown(row.log_file)}`"
        for rank, row in enumerate(rows, start=1)
    ]


def read_gate_section(text: str) -> dict[str, str]:
    """Return the lines of the last gate section of a report; empty if it has none."""
    section_lines: dict[str, str] = {}
    is_in_section = False
    for line in map(str.strip, text.split("\n")):
        if line == GATE_HEADING:
            is_in_section = True
        elif is_in_section and line.startswith("## "):
            break
        elif is_in_section and line.startswith("- ") and ":" in line:
            name, _, value = line[2:].partition(":")
            section_lines[name.strip()] = value.strip().strip("`")
    return section_lines
