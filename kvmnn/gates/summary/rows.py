"""Rows of a round, one for each case, under the names of the fork's suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..logs.numbers import parse_first_number

MEASURED_BY_KEY = "measured_by"
"""A line that only sections of runs on a model have: what they lack was not measured, in those of the fork it is 0."""

PROMPTS_KEY = "prompts"
"""Likewise: where the prompts of a run on a model come from."""

RUNTIME_ROW_KEYS = (
    "lossy_best",
    "lossless_selected_value",
    "decode_gate_tps",
    "decode_best",
    "decode_baseline",
    "decode_drop_ratio",
    "decode_drop_target",
    "runtime_decomp_best_us",
    "runtime_async_wait_best_us",
    "runtime_async_wait_headroom_us",
    "runtime_async_wait_headroom_ratio",
    "runtime_queue_peak_best",
    "runtime_fallback_best",
    "runtime_backpressure_skip_best",
    "runtime_decode_cache_hit_best",
    "runtime_decode_cache_miss_best",
    "kv_invalid_log_count",
)
DEMO_ROW_KEYS = (
    "baseline_decode_tps_avg",
    "candidate_decode_tps_avg",
    "decode_drop_ratio",
    "decode_drop_target",
    "candidate_lossy_ratio_avg",
    "candidate_lossless_ratio_avg",
    "candidate_runtime_total_ratio_avg",
    "runtime_decomp_best_us",
    "decode_cache_hit_best",
)


def build_runtime_row(
    case: str,
    mode: str,
    gate: Mapping[str, str],
    *,
    passed: bool,
    failure: str,
    return_code: int = 0,
    summary: str = "",
    summary_exists: bool = True,
    console_log: str = "",
) -> dict[str, Any]:
    """A row of a case of ``llm_bench``, from the lines of its section *Quality Gate*.

    What that of a run on a model leaves out is None.
    """
    is_own_run = MEASURED_BY_KEY in gate
    figures = {
        name: None if is_own_run and name not in gate else parse_first_number(gate.get(name, 0.0))
        for name in RUNTIME_ROW_KEYS
    }
    if "decode_gate_tps" not in gate:
        figures["decode_gate_tps"] = figures["decode_best"]
    flags = {
        name: None if is_own_run and name not in gate else gate.get(name, "").lower() == "true"
        for name in ("runtime_async_wait_headroom_warn", "kv_content_consistency_pass")
    }
    return {
        "suite": "runtime",
        "case": case,
        "mode": mode,
        "return_code": return_code,
        "summary_exists": summary_exists,
        "quality_gate_found": bool(gate),
        "failure_reason": failure,
        "overall_pass": passed,
        "summary": summary,
        "console_log": console_log,
        "quality_status": gate.get("quality_status", ""),
        "lossy_best": figures["lossy_best"],
        "lossless_selected_value": figures["lossless_selected_value"],
        "decode_aggregation": gate.get("decode_aggregation", "best"),
        **{name: figures[name] for name in RUNTIME_ROW_KEYS[2:11]},
        "runtime_async_wait_headroom_warn": flags["runtime_async_wait_headroom_warn"],
        **{name: figures[name] for name in RUNTIME_ROW_KEYS[11:16]},
        "kv_content_consistency_pass": flags["kv_content_consistency_pass"],
        "kv_invalid_log_count": figures["kv_invalid_log_count"],
        **({PROMPTS_KEY: gate[PROMPTS_KEY]} if PROMPTS_KEY in gate else {}),
    }


def build_demo_row(
    case: str,
    mode: str,
    report: Mapping[str, Any],
    *,
    passed: bool,
    failure: str,
    return_code: int = 0,
    summary: str = "",
    report_json: str = "",
    console_log: str = "",
) -> dict[str, Any]:
    """A row of a case of ``llm_demo``, from its report. What that of a run on a model leaves out is None."""
    is_own_run = MEASURED_BY_KEY in report
    missing_value = None if is_own_run else 0.0
    return {
        "suite": "llm_demo",
        "case": case,
        "mode": mode,
        "return_code": return_code,
        "failure_reason": failure,
        "overall_pass": passed,
        "summary": summary,
        "report_json": report_json,
        "console_log": console_log,
        **{
            name: None if report.get(name, missing_value) is None else parse_first_number(report.get(name))
            for name in DEMO_ROW_KEYS
        },
        "decode_pass": None if is_own_run and "decode_pass" not in report else bool(report.get("decode_pass", False)),
        "run_order": str(report.get("run_order", ""))[:80],
    }
