"""Every gate, number and verdict that the fork's analyser gives for the rows of one case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..logs.parsing import find_missing_columns
from . import gate_section as section
from .conditions import CaseConditions, DecodeStats
from .limits import GateLimits
from .log_scan import LogScan
from .metric_rows import MetricRows
from .offline_ratio import OfflineRatio
from .verdicts import GateResult, format_distinct, verdict_from

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
"""What is said of where the lossless ratio was taken from."""


@dataclass(frozen=True, kw_only=True)
class CaseAnalysis:
    """One case as the fork's analyser judges it.

    Attributes
    ----------
    rows, limits
        What was judged, and by what.
    selected_ratio, ratio_source
        The lossless ratio that counts, and where it comes from: ``"offline_online_sim"``, ``"offline_upper_bound"``
        or ``"runtime"``.
    decode
        Speeds over the rows.
    gates
        The parts of the verdict, in the fork's order.
    section_lines
        Its section *Quality Gate*, name to text.
    warnings
        What it prints besides.
    is_own_run
        Whether rows and lines are those of runs on a model, not of logs.
    """

    rows: MetricRows
    limits: GateLimits
    online_ratio: OfflineRatio | None
    upper_bound: OfflineRatio | None
    selected_ratio: float
    ratio_source: str
    decode: DecodeStats
    gates: tuple[GateResult, ...]
    section_lines: Mapping[str, str]
    warnings: tuple[str, ...]
    is_own_run: bool = False

    @property
    def has_passed(self) -> bool:
        """Whether all gates that are on passed."""
        return self.section_lines["overall_pass"] == "true"


def analyse(
    rows: MetricRows,
    limits: GateLimits,
    *,
    online_ratio: OfflineRatio | None = None,
    upper_bound: OfflineRatio | None = None,
    logs: LogScan | None = None,
) -> CaseAnalysis:
    """Judge the rows of one case exactly as the fork's analyser does.

    Parameters
    ----------
    rows, limits
        What was measured, and what it must reach.
    online_ratio, upper_bound
        Offline evaluations; the former is preferred, and without either the mean of the rows counts.
    logs
        What the logs of the run say of damage.
    """
    selected_ratio, ratio_source, ratio_warnings = _select_lossless_ratio(rows, online_ratio, upper_bound)
    decode = DecodeStats.from_rows(rows.rows, limits.decode_gate_aggregation)
    conditions = CaseConditions(rows, limits, logs or LogScan(), decode, selected_ratio, online_ratio)
    warnings = [*warn_missing_columns(rows.columns), *ratio_warnings, *conditions.warn_low_headroom()]
    gates = _build_gates(conditions)
    lines = {
        **section.build_ratio_lines(conditions, ratio_source),
        **section.build_runtime_lines(conditions),
        **section.build_consistency_lines(conditions),
        "overall_pass": section.format_flag(all(gate.verdict != "fail" for gate in gates)),
        **section.build_decode_lines(conditions),
        **section.build_offline_lines("upper", upper_bound),
        **section.build_offline_lines("online", online_ratio),
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
    """The lossless ratio that counts, its source, and what is said of it."""
    if online_ratio is not None:
        return online_ratio.ratio, "offline_online_sim", []
    if upper_bound is not None:
        return upper_bound.ratio, "offline_upper_bound", [_UPPER_BOUND_WARNING]
    return rows.mean_value("h2o_lossless"), "runtime", [_RUNTIME_VALUE_WARNING]


def warn_missing_columns(columns: Sequence[str]) -> list[str]:
    """What is said of a table that lacks columns of the runtime."""
    missing = find_missing_columns(columns)
    return (
        [f"[WARN] runtime metric columns missing in CSV: {', '.join(missing)}", _OLD_BENCH_WARNING] if missing else []
    )


def _build_gates(conditions: CaseConditions) -> list[GateResult]:
    """The parts of the verdict."""
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
    ]


def _describe_ratio_basis(conditions: CaseConditions) -> str:
    return (
        "mean of the rows"
        if conditions.lossless_ratio == conditions.rows.mean_value("h2o_lossless")
        else "of an offline simulation"
    )


def _explain_consistency(conditions: CaseConditions) -> str:
    """Which part failed; where none did, what was looked at, which is not K and V."""
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
