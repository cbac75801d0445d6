"""The limits of the six cases, as the fork's suite sets them."""

from __future__ import annotations

from .limits import GateLimits

_RUNTIME_LIMITS = GateLimits(
    async_threads=2,
    max_lossless_queue_peak=8.0,
    max_lossless_fallback=0.0,
    strict_runtime_metric_columns=True,
    hard_checks=True,
)

RUNTIME_CASES: dict[str, GateLimits] = {
    "runtime_baseline": _RUNTIME_LIMITS.with_values(
        {
            "runtime_mode": "full",
            "lossy_target": 1.0,
            "lossless_target": 1.0,
            "decode_drop_target": 1.0,
            "strict_runtime_metric_columns": False,
            "hard_checks": False,
        },
        "runtime_baseline",
    ),
    "runtime_probe": _RUNTIME_LIMITS.with_values(
        {"runtime_mode": "probe", "max_lossless_async_wait_us": 20000.0}, "runtime_probe"
    ),
    "runtime_full": _RUNTIME_LIMITS.with_values(
        {
            "runtime_mode": "full",
            "require_runtime_decomp": True,
            "require_kv_content_consistency": True,
            "max_lossless_decomp_us": 30000.0,
            "max_lossless_async_wait_us": 20000.0,
        },
        "runtime_full",
    ),
    "runtime_store": _RUNTIME_LIMITS.with_values(
        {
            "runtime_mode": "store",
            "require_runtime_decomp": True,
            "require_kv_content_consistency": True,
            "max_lossless_decomp_us": 70000.0,
            "max_lossless_async_wait_us": 40000.0,
        },
        "runtime_store",
    ),
}
"""Cases of ``llm_bench`` by their names."""

DEMO_CASES = {"llm_demo_full": "full", "llm_demo_store": "store"}
"""Cases of ``llm_demo``, and the mode of the runtime in each."""

FIXED_BASELINE_TOKENS_PER_SECOND = 6.60
"""Tokens a second that the fork's script takes where no other baseline is to be had."""
