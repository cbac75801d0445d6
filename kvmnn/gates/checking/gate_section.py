"""The section *Quality Gate* of the fork's report: names, order and forms of its lines."""

from __future__ import annotations

from .conditions import Conditions
from .offline_ratio import OfflineRatio


def lossy_lines(found: Conditions, source: str) -> dict[str, str]:
    """Ratios."""
    return {
        "lossy_target": four(found.limits.lossy_target),
        "lossy_best": four(found.lossy),
        "lossy_pass": flag(found.lossy_pass),
        "lossless_target": four(found.limits.lossless_target),
        "lossless_selected_source": source,
        "lossless_selected_value": four(found.selected),
        "lossless_selected_pass": flag(found.selected_pass),
        "lossless_online_value": four(found.lossless),
        "lossless_online_pass": flag(found.lossless_pass),
    }


def runtime_lines(found: Conditions) -> dict[str, str]:
    """Figures of the runtime and their gates."""
    limits = found.limits
    return {
        "runtime_decomp_required": flag(limits.require_runtime_decomp),
        "runtime_decomp_best_us": four(found.decomp),
        "runtime_metric_columns_strict": flag(limits.strict_runtime_metric_columns),
        "runtime_metric_columns_ok": flag(not found.missing),
        "runtime_metric_columns_pass": flag(found.columns_pass),
        "runtime_metric_missing_columns": str(found.missing),
        **budget("runtime_decomp", limits.max_lossless_decomp_us, "_us"),
        "runtime_async_queue_peak_best": four(found.async_queue),
        "runtime_async_queue_activity_required": flag(limits.require_async_queue_activity),
        "runtime_async_wait_best_us": four(found.wait),
        **budget("runtime_async_wait", limits.max_lossless_async_wait_us, "_us"),
        **_headroom_lines(found),
        "runtime_decode_cache_hit_best": four(found.hit),
        "runtime_decode_cache_miss_best": four(found.miss),
        "runtime_decode_cache_activity_best": four(found.activity),
        "runtime_decode_cache_required": flag(limits.require_decode_cache_hit),
        "runtime_decode_cache_activity_required": flag(limits.require_decode_cache_activity),
        "runtime_decomp_required_pass": flag(found.decomp_required_pass),
        "runtime_decomp_budget_pass": flag(found.decomp_budget_pass),
        "runtime_async_queue_activity_pass": flag(found.async_queue_pass),
        "runtime_async_wait_pass": flag(found.wait_pass),
        "runtime_decode_cache_required_pass": flag(found.hit_pass),
        "runtime_decode_cache_activity_pass": flag(found.activity_pass),
        "runtime_queue_peak_best": four(found.queue),
        "runtime_fallback_best": four(found.fallback),
        "runtime_backpressure_skip_best": four(found.skip),
        **budget("runtime_queue_peak", limits.max_lossless_queue_peak),
        "runtime_queue_peak_pass": flag(found.queue_pass),
        **budget("runtime_fallback", limits.max_lossless_fallback),
        "runtime_fallback_pass": flag(found.fallback_pass),
        **budget("runtime_backpressure_skip", limits.max_lossless_backpressure_skip),
        "runtime_backpressure_skip_pass": flag(found.skip_pass),
        "runtime_decomp_pass": flag(found.decomp_pass),
    }


def _headroom_lines(found: Conditions) -> dict[str, str]:
    if found.limits.max_lossless_async_wait_us < 0.0:
        return {}
    return {
        "runtime_async_wait_headroom_us": four(found.headroom),
        "runtime_async_wait_headroom_ratio": f"{found.headroom_ratio:.6f}",
        "runtime_async_wait_headroom_warn_ratio": f"{found.limits.async_wait_headroom_warn_ratio:.6f}",
        "runtime_async_wait_headroom_warn": flag(found.headroom_low),
    }


def consistency_lines(found: Conditions) -> dict[str, str]:
    """The parts of what the fork calls consistency."""
    limits = found.limits
    return {
        "require_kv_content_consistency": flag(limits.require_kv_content_consistency),
        "runtime_mode": limits.runtime_mode,
        "async_threads": str(limits.async_threads),
        "runtime_decompressed_bytes_available": flag(found.bytes_column),
        "runtime_decompressed_bytes_best": four(found.decompressed),
        "kv_restore_required": flag(found.restore_needed),
        "kv_restore_activity_pass": flag(found.restore_pass),
        "kv_fallback_clean_pass": flag(found.clean_pass),
        "kv_async_activity_required": flag(found.async_needed),
        "kv_async_activity_pass": flag(found.async_pass),
        "kv_invalid_log_count": str(found.logs.invalid),
        "kv_invalid_log_max_allowed": str(found.lines_allowed),
        "kv_invalid_log_pass": flag(found.log_pass),
        "kv_invalid_log_examples": str(list(found.logs.examples)),
        "kv_content_consistency_pass": flag(found.consistent),
    }


def decode_lines(found: Conditions) -> dict[str, str]:
    """Speeds, and the gate where there is a baseline."""
    limits, decode = found.limits, found.decode
    lines = {
        "decode_gate_enabled": flag(found.decode_on),
        "decode_aggregation": limits.decode_gate_aggregation,
        "decode_gate_tps": four(decode.gate),
        "decode_avg_tps": four(decode.mean),
        "decode_median_tps": four(decode.median),
        "decode_p90_tps": four(decode.p90),
    }
    if not found.decode_on:
        return lines
    lines["decode_baseline"] = four(limits.decode_baseline)
    if limits.decode_baseline_source:
        lines["decode_baseline_source"] = limits.decode_baseline_source
    if limits.decode_baseline_samples > 0:
        lines["decode_baseline_samples"] = str(limits.decode_baseline_samples)
    return lines | {
        "decode_best": four(decode.best),
        "decode_drop_ratio": f"{found.drop:.6f}",
        "decode_drop_target": f"{limits.decode_drop_target:.6f}",
        "decode_pass": flag(found.decode_pass),
    }


def offline_lines(kind: str, offline: OfflineRatio | None) -> dict[str, str]:
    """What an offline evaluation says of itself; nothing where there was none."""
    if offline is None:
        return {}
    return {
        f"{kind}_selected_entries": str(offline.entries),
        f"{kind}_selected_layers": str(offline.layers),
        f"{kind}_json": f"`{offline.path}`",
    }


def budget(name: str, limit: float, unit: str = "") -> dict[str, str]:
    """Whether a limit is on, and where it is what it is."""
    on = {f"{name}_gate_enabled": flag(limit >= 0.0)}
    return on | {f"{name}_target{unit}": four(limit)} if limit >= 0.0 else on


def four(value: float) -> str:
    """Four digits behind the point."""
    return f"{value:.4f}"


def flag(value: bool) -> str:
    """As the fork writes it."""
    return "true" if value else "false"
