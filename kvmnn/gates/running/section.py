"""The section *Quality Gate* of runs on a model: the fork's lines, from the figures and verdicts beside it."""

from __future__ import annotations

from collections.abc import Sequence

from ..checking.conditions import Decode
from ..checking.gate_section import budget, flag, four
from ..checking.limits import Limits
from ..checking.verdicts import NOT_MEASURED, OFF, Gate, together
from ..summary.rows import MEASURED_BY, PROMPTS
from .figures import Figures

_WAIT = "runtime_async_wait"
_OF_GATES = {
    "lossless ratio": ("lossless_selected_value", "lossless_selected_pass"),
    "decode drop": ("decode_pass",),
    "decompression": ("runtime_decomp_best_us", "runtime_decomp_pass"),
    "async wait": (
        *(f"{_WAIT}_best_us", f"{_WAIT}_headroom_us", f"{_WAIT}_headroom_ratio", f"{_WAIT}_headroom_warn"),
        *(f"{_WAIT}_pass", "runtime_async_queue_peak_best"),
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


def gate_lines(found: Figures, decode: Decode, gates: Sequence[Gate], limits: Limits, mode: str) -> dict[str, str]:
    """Names to texts. Lines that only logs, or only an offline simulation, could fill are left out, and what was not
    measured.

    Parameters
    ----------
    found
        What was judged.
    decode
        Speeds of pieces of work, means over their runs.
    gates
        Their verdicts, by which a line ``.._pass`` is true.
    mode
        Of the runtime; empty where nothing is compressed.
    """
    passed = {gate.name: flag(gate.verdict in ("pass", "off")) for gate in gates}
    overall = together(gates)
    lines = {
        "quality_status": overall.upper(),
        MEASURED_BY: "kvmnn gate run",
        PROMPTS: found.prompts,
        "lossy_target": four(limits.lossy_target),
        "lossy_best": four(found.lossy),
        "lossy_pass": passed["lossy ratio"],
        "lossless_target": four(limits.lossless_target),
        "lossless_selected_source": "runtime",
    }
    if found.encoded_ratio is not None or not mode:
        lines["lossless_selected_value"] = four(found.encoded_ratio or 1.0)
    lines["lossless_selected_pass"] = passed["lossless ratio"]
    if mode:
        lines |= _runtime_lines(found, limits, passed)
    lines |= {"runtime_mode": mode, "overall_pass": flag(overall == "pass")}
    lines |= _decode_lines(found, decode, limits, passed)
    idle = bool(mode) and found.encoded_ratio is None
    for gate in gates:
        if gate.verdict == NOT_MEASURED or (idle and gate.verdict == OFF):
            for name in _OF_GATES.get(gate.name, ()):
                lines.pop(name, None)
    return lines


def _runtime_lines(found: Figures, limits: Limits, passed: dict[str, str]) -> dict[str, str]:
    target = limits.max_lossless_async_wait_us
    headroom = {}
    if target > 0:
        left = target - found.wait_us
        headroom = {
            "runtime_async_wait_headroom_us": four(left),
            "runtime_async_wait_headroom_ratio": f"{left / target:.6f}",
            "runtime_async_wait_headroom_warn": flag(0 <= left / target < limits.async_wait_headroom_warn_ratio),
        }
    return {
        "runtime_decomp_required": flag(limits.require_runtime_decomp),
        "runtime_decomp_best_us": four(found.decompress_us),
        **budget("runtime_decomp", limits.max_lossless_decomp_us, "_us"),
        "runtime_decomp_pass": passed["decompression"],
        "runtime_async_queue_peak_best": four(found.async_queue),
        "runtime_async_wait_best_us": four(found.wait_us),
        **budget("runtime_async_wait", target, "_us"),
        **headroom,
        "runtime_async_wait_pass": passed["async wait"],
        "runtime_decode_cache_hit_best": four(found.hits),
        "runtime_decode_cache_miss_best": four(found.misses),
        "runtime_decode_cache_required": flag(limits.require_decode_cache_hit),
        "runtime_decode_cache_required_pass": passed["cache hits"],
        "runtime_queue_peak_best": four(found.queue),
        **budget("runtime_queue_peak", limits.max_lossless_queue_peak),
        "runtime_queue_peak_pass": passed["queue peak"],
        "runtime_fallback_best": four(found.fallbacks),
        **budget("runtime_fallback", limits.max_lossless_fallback),
        "runtime_fallback_pass": passed["fallbacks"],
        "runtime_backpressure_skip_best": four(found.skips),
        **budget("runtime_backpressure_skip", limits.max_lossless_backpressure_skip),
        "runtime_backpressure_skip_pass": passed["skips"],
        "kv_content_consistency_pass": passed["consistency"],
    }


def _decode_lines(found: Figures, decode: Decode, limits: Limits, passed: dict[str, str]) -> dict[str, str]:
    lines = {
        "decode_gate_enabled": flag(found.drop is not None),
        "decode_aggregation": "avg",
        "decode_gate_tps": four(decode.gate if found.drop is None else found.drop.after),
        "decode_avg_tps": four(decode.mean),
        "decode_median_tps": four(decode.median),
        "decode_p90_tps": four(decode.p90),
        "decode_best": four(decode.best),
    }
    if found.drop is None:
        return lines
    lines |= {
        "decode_baseline": four(found.drop.before),
        "decode_baseline_source": "same_batch_mean",
        "decode_baseline_samples": str(found.drop.pairs),
        "decode_drop_ratio": f"{found.drop.value:.6f}",
    }
    if found.drop.low is not None and found.drop.high is not None:
        lines["decode_drop_interval"] = f"[{found.drop.low:.6f}, {found.drop.high:.6f}]"
    return lines | {"decode_drop_target": f"{limits.decode_drop_target:.6f}", "decode_pass": passed["decode drop"]}
