"""The section *Quality Gate* of runs on a model: the fork's lines, from the figures and verdicts beside it."""

from __future__ import annotations

from collections.abc import Sequence

from ..checking.conditions import DecodeStats
from ..checking.gate_section import build_limit_lines, format_flag, format_four_digits
from ..checking.limits import GateLimits
from ..checking.verdicts import NOT_MEASURED, OFF, GateResult, aggregate_verdict
from ..summary.rows import MEASURED_BY_KEY, PROMPTS_KEY
from .figures import CaseFigures

_WAIT_PREFIX = "runtime_async_wait"
_LINES_BY_GATE = {
    "lossless ratio": ("lossless_selected_value", "lossless_selected_pass"),
    "decode drop": ("decode_pass",),
    "decompression": ("runtime_decomp_best_us", "runtime_decomp_pass"),
    "async wait": (
        *(
            f"{_WAIT_PREFIX}_best_us",
            f"{_WAIT_PREFIX}_headroom_us",
            f"{_WAIT_PREFIX}_headroom_ratio",
            f"{_WAIT_PREFIX}_headroom_warn",
        ),
        *(f"{_WAIT_PREFIX}_pass", "runtime_async_queue_peak_best"),
    ),
    "queue peak": ("runtime_queue_peak_best", "runtime_queue_peak_pass"),
    "fallbacks": ("runtime_fallback_best", "runtime_fallback_pass"),
    "skips": ("runtime_backpressure_skip_best", "runtime_backpressure_skip_pass"),
    "cache hits": (
        *("runtime_decode_cache_hit_best", "runtime_decode_cache_miss_best"),
        "runtime_decode_cache_required_pass",
    ),
    "consistency": ("kv_content_consistency_pass",),
}
"""Lines that say a figure, or a verdict on it: left out where the gate says that nothing was measured."""


def build_gate_section(
    figures: CaseFigures, decode: DecodeStats, gates: Sequence[GateResult], limits: GateLimits, mode: str
) -> dict[str, str]:
    """Names to texts. Lines that only logs, or only an offline simulation, could fill are left out, and what was not
    measured.

    Parameters
    ----------
    figures
        What was judged.
    decode
        Speeds of pieces of work, means over their runs.
    gates
        Their verdicts, by which a line ``.._pass`` is true.
    mode
        Of the runtime; empty where nothing is compressed.
    """
    passed_by_gate = {gate.name: format_flag(gate.verdict in ("pass", "off")) for gate in gates}
    verdict = aggregate_verdict(gates)
    lines = {
        "quality_status": verdict.upper(),
        MEASURED_BY_KEY: "kvmnn gate run",
        PROMPTS_KEY: figures.prompts_text,
        "lossy_target": format_four_digits(limits.lossy_target),
        "lossy_best": format_four_digits(figures.lossy_ratio),
        "lossy_pass": passed_by_gate["lossy ratio"],
        "lossless_target": format_four_digits(limits.lossless_target),
        "lossless_selected_source": "runtime",
    }
    if figures.encoded_ratio is not None or not mode:
        lines["lossless_selected_value"] = format_four_digits(figures.encoded_ratio or 1.0)
    lines["lossless_selected_pass"] = passed_by_gate["lossless ratio"]
    if mode:
        lines |= _build_own_runtime_lines(figures, limits, passed_by_gate)
    lines |= {"runtime_mode": mode, "overall_pass": format_flag(verdict == "pass")}
    lines |= _build_own_decode_lines(figures, decode, limits, passed_by_gate)
    is_idle = bool(mode) and figures.encoded_ratio is None
    for gate in gates:
        if gate.verdict == NOT_MEASURED or (is_idle and gate.verdict == OFF):
            for name in _LINES_BY_GATE.get(gate.name, ()):
                lines.pop(name, None)
    return lines


def _build_own_runtime_lines(figures: CaseFigures, limits: GateLimits, passed: dict[str, str]) -> dict[str, str]:
    target = limits.max_lossless_async_wait_us
    headroom_lines = {}
    if target > 0:
        headroom_us = target - figures.async_wait_us
        headroom_lines = {
            "runtime_async_wait_headroom_us": format_four_digits(headroom_us),
            "runtime_async_wait_headroom_ratio": f"{headroom_us / target:.6f}",
            "runtime_async_wait_headroom_warn": format_flag(
                0 <= headroom_us / target < limits.async_wait_headroom_warn_ratio
            ),
        }
    return {
        "runtime_decomp_required": format_flag(limits.require_runtime_decomp),
        "runtime_decomp_best_us": format_four_digits(figures.decompress_us),
        **build_limit_lines("runtime_decomp", limits.max_lossless_decomp_us, "_us"),
        "runtime_decomp_pass": passed["decompression"],
        "runtime_async_queue_peak_best": format_four_digits(figures.async_queue_peak),
        "runtime_async_wait_best_us": format_four_digits(figures.async_wait_us),
        **build_limit_lines("runtime_async_wait", target, "_us"),
        **headroom_lines,
        "runtime_async_wait_pass": passed["async wait"],
        "runtime_decode_cache_hit_best": format_four_digits(figures.cache_hits),
        "runtime_decode_cache_miss_best": format_four_digits(figures.cache_misses),
        "runtime_decode_cache_required": format_flag(limits.require_decode_cache_hit),
        "runtime_decode_cache_required_pass": passed["cache hits"],
        "runtime_queue_peak_best": format_four_digits(figures.queue_peak),
        **build_limit_lines("runtime_queue_peak", limits.max_lossless_queue_peak),
        "runtime_queue_peak_pass": passed["queue peak"],
        "runtime_fallback_best": format_four_digits(figures.num_fallbacks),
        **build_limit_lines("runtime_fallback", limits.max_lossless_fallback),
        "runtime_fallback_pass": passed["fallbacks"],
        "runtime_backpressure_skip_best": format_four_digits(figures.num_skips),
        **build_limit_lines("runtime_backpressure_skip", limits.max_lossless_backpressure_skip),
        "runtime_backpressure_skip_pass": passed["skips"],
        "kv_content_consistency_pass": passed["consistency"],
    }


def _build_own_decode_lines(
    figures: CaseFigures, decode: DecodeStats, limits: GateLimits, passed: dict[str, str]
) -> dict[str, str]:
    lines = {
        "decode_gate_enabled": format_flag(figures.slowdown is not None),
        "decode_aggregation": "avg",
        "decode_gate_tps": format_four_digits(
            decode.judged_speed if figures.slowdown is None else figures.slowdown.candidate_speed
        ),
        "decode_avg_tps": format_four_digits(decode.mean),
        "decode_median_tps": format_four_digits(decode.median),
        "decode_p90_tps": format_four_digits(decode.p90),
        "decode_best": format_four_digits(decode.best),
    }
    if figures.slowdown is None:
        return lines
    lines |= {
        "decode_baseline": format_four_digits(figures.slowdown.baseline_speed),
        "decode_baseline_source": "same_batch_mean",
        "decode_baseline_samples": str(figures.slowdown.num_pairs),
        "decode_drop_ratio": f"{figures.slowdown.drop_ratio:.6f}",
    }
    if figures.slowdown.interval_low is not None and figures.slowdown.interval_high is not None:
        lines["decode_drop_interval"] = f"[{figures.slowdown.interval_low:.6f}, {figures.slowdown.interval_high:.6f}]"
    return lines | {"decode_drop_target": f"{limits.decode_drop_target:.6f}", "decode_pass": passed["decode drop"]}
