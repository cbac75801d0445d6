"""The section *Quality Gate* of the fork's report: names, order and forms of its lines."""

from __future__ import annotations

from .conditions import CaseConditions
from .offline_ratio import OfflineRatio


def build_ratio_lines(conditions: CaseConditions, ratio_source: str) -> dict[str, str]:
    """Ratios."""
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
    """Figures of the runtime and their gates."""
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
    """The parts of what the fork calls consistency."""
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
    """Speeds, and the gate where there is a baseline."""
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
    """What an offline evaluation says of itself; nothing where there was none."""
    if offline is None:
        return {}
    return {
        f"{kind}_selected_entries": str(offline.num_entries),
        f"{kind}_selected_layers": str(offline.layers),
        f"{kind}_json": f"`{offline.path}`",
    }


def build_limit_lines(name: str, limit: float, unit: str = "") -> dict[str, str]:
    """Whether a limit is on, and where it is what it is."""
    enabled_line = {f"{name}_gate_enabled": format_flag(limit >= 0.0)}
    return enabled_line | {f"{name}_target{unit}": format_four_digits(limit)} if limit >= 0.0 else enabled_line


def format_four_digits(value: float) -> str:
    """Four digits behind the point."""
    return f"{value:.4f}"


def format_flag(value: bool) -> str:
    """As the fork writes it."""
    return "true" if value else "false"
