"""Gates over what a case measured on a model."""

from __future__ import annotations

from collections.abc import Sequence

from ...evaluation.statistics import MIN_DOCUMENTS_FOR_INTERVAL
from ..checking.drops import build_slowdown_gate
from ..checking.limits import GateLimits
from ..checking.verdicts import NOT_MEASURED, OFF, GateResult, format_distinct, verdict_from
from .figures import CaseFigures, PairedRuns
from .measuring import ContentComparison, RunRecord
from .quality import PerplexityChange

_NOTHING_ENCODED_REASON = "nothing was encoded: longer prompts, or fewer hot tokens, are needed"


def build_case_gates(
    pairs: Sequence[PairedRuns],
    comparisons: Sequence[ContentComparison],
    quality: PerplexityChange | None,
    limits: GateLimits,
    mode: str,
    perplexity_target: float,
    *,
    evicts: bool = True,
) -> list[GateResult]:
    """The gates of a case, whatever its work is.

    Parameters
    ----------
    mode
        Of the runtime; empty where nothing is compressed.
    evicts
        Whether the planner is on; perplexity cannot change without it.
    """
    figures, records = CaseFigures.from_pairs(pairs), [pair.candidate for pair in pairs]
    return [
        build_lossy_gate(figures, limits.lossy_target),
        build_lossless_gate(figures, limits.lossless_target, mode),
        build_slowdown_gate(figures.slowdown, limits.decode_drop_target, "side by side"),
        *(build_runtime_gates(figures, records, limits) if mode else ()),
        *build_content_gates(comparisons, quality, mode, perplexity_target, evicts=evicts),
    ]


def build_lossy_gate(figures: CaseFigures, target: float) -> GateResult:
    """Of whole caches: the work for which least was let go."""
    value, limit = format_distinct(figures.lossy_ratio, target, 3)
    return GateResult(
        name="lossy ratio",
        verdict=verdict_from(figures.lossy_ratio >= target),
        value=value,
        limit=f">= {limit}",
        why="bytes of all tokens over those kept, all layers, at the end; least of the runs",
    )


def build_lossless_gate(figures: CaseFigures, target: float, mode: str) -> GateResult:
    """Raw over compressed bytes of what the runs encoded."""
    name, limit = "lossless ratio", f">= {target:.3f}"
    if not mode:
        why = "nothing is compressed"
        return GateResult(name=name, verdict=verdict_from(target <= 1.0), value="1.000", limit=limit, why=why)
    if figures.encoded_ratio is None:
        return GateResult(name=name, verdict=NOT_MEASURED, limit=limit, why=_NOTHING_ENCODED_REASON)
    why = f"raw over compressed bytes of what was encoded; of the cache as it is held {figures.resident_ratio:.3f}"
    if figures.prompts_text == "synthetic":
        why += "; prompts are synthetic, K and V of texts compress less"
    if figures.num_idle_workloads:
        why += f"; nothing was encoded in {figures.num_idle_workloads} of {figures.num_workloads} prompts"
    verdict = verdict_from(figures.encoded_ratio >= target)
    value, limit_text = format_distinct(figures.encoded_ratio, target, 3)
    return GateResult(name=name, verdict=verdict, value=value, limit=f">= {limit_text}", why=why)


def build_runtime_gates(figures: CaseFigures, records: Sequence[RunRecord], limits: GateLimits) -> list[GateResult]:
    """What the runtime did: the largest of the runs. A limit that is kept because it did nothing says nothing."""
    is_idle = figures.encoded_ratio is None

    def build_max_gate(name: str, value: float, limit: float, unit: str = "") -> GateResult:
        limit_text = f"<= {limit:,.0f}{unit}" if limit >= 0 else ""
        if is_idle and 0 <= value <= limit:
            return GateResult(name=name, verdict=NOT_MEASURED, limit=limit_text, why=_NOTHING_ENCODED_REASON)
        why = _format_percentiles(records, "wait") if unit else ""
        verdict = verdict_from(value <= limit, is_active=limit >= 0)
        value_text, max_text = format_distinct(value, limit, 0)
        limit_text = f"<= {max_text}{unit}" if limit >= 0 else ""
        return GateResult(name=name, verdict=verdict, value=f"{value_text}{unit}", limit=limit_text, why=why)

    decompress_us, max_decompress_us = figures.decompress_us, limits.max_lossless_decomp_us
    required_texts = ["> 0"] if limits.require_runtime_decomp else []
    value_text, limit_text = format_distinct(decompress_us, max_decompress_us, 0)
    limit_texts = [f"<= {limit_text} us"] if max_decompress_us >= 0 else []
    has_passed = (decompress_us > 0 or not required_texts) and (decompress_us <= max_decompress_us or not limit_texts)
    is_active, is_unmeasured = bool(required_texts or limit_texts), is_idle and not decompress_us
    num_lookups = figures.cache_hits or figures.cache_misses
    return [
        GateResult(
            name="decompression",
            verdict=NOT_MEASURED if is_active and is_unmeasured else verdict_from(has_passed, is_active=is_active),
            value="" if is_unmeasured else f"{value_text} us",
            limit=", ".join(required_texts + limit_texts),
            why=_NOTHING_ENCODED_REASON
            if is_idle
            else _format_percentiles(records, "decompress" if figures.has_restored else "verify"),
        ),
        build_max_gate("async wait", figures.async_wait_us, limits.max_lossless_async_wait_us, " us"),
        build_max_gate("queue peak", figures.queue_peak, limits.max_lossless_queue_peak),
        build_max_gate("fallbacks", figures.num_fallbacks, limits.max_lossless_fallback),
        build_max_gate("skips", figures.num_skips, limits.max_lossless_backpressure_skip),
        GateResult(
            name="cache hits",
            verdict=NOT_MEASURED
            if is_idle and limits.require_decode_cache_hit and not num_lookups
            else verdict_from(figures.cache_hits > 0, is_active=limits.require_decode_cache_hit),
            value=f"{figures.cache_hits:,.0f} of {figures.cache_hits + figures.cache_misses:,.0f}",
            limit="> 0" if limits.require_decode_cache_hit else "",
            why=_NOTHING_ENCODED_REASON if is_idle and not num_lookups else "",
        ),
    ]


def _format_percentiles(records: Sequence[RunRecord], key: str) -> str:
    """Of single operations, the slowest run."""
    latencies = [record.latencies[key] for record in records if record.latencies.get(key, {}).get("count")]
    if not latencies:
        return ""
    slowest = max(latencies, key=lambda latency: latency["p99_us"])
    p50, p95, p99 = (f"{slowest[part]:,.0f}" for part in ("p50_us", "p95_us", "p99_us"))
    basis_text = "blocks decoded to compare them" if key == "verify" else "in a run"
    return f"{basis_text}; each p50 {p50}, p95 {p95}, p99 {p99} us"


def build_content_gates(
    comparisons: Sequence[ContentComparison],
    quality: PerplexityChange | None,
    mode: str,
    perplexity_target: float,
    *,
    evicts: bool,
) -> list[GateResult]:
    """Bytes that attention reads, and what eviction costs."""
    perplexity_off = GateResult(name="perplexity", verdict=OFF, why="nothing is evicted")
    if not mode:
        return [GateResult(name="consistency", verdict=OFF), perplexity_off]
    return [
        _build_consistency_gate(comparisons),
        _build_perplexity_gate(quality, perplexity_target) if evicts else perplexity_off,
    ]


def _build_consistency_gate(comparisons: Sequence[ContentComparison]) -> GateResult:
    compared_bytes, different_bytes = (
        sum(getattr(comparison, name) for comparison in comparisons) for name in ("compared_bytes", "different_bytes")
    )
    steps, compared_steps, different_steps = (
        sum(getattr(comparison, name) for comparison in comparisons)
        for name in ("steps", "compared_steps", "different_steps")
    )
    if not compared_bytes:
        return GateResult(name="consistency", verdict=NOT_MEASURED, why="no bytes were compared")
    num_idle = sum(not comparison.encoded_bytes for comparison in comparisons)
    if num_idle == len(comparisons) and not different_bytes + different_steps:
        return GateResult(name="consistency", verdict=NOT_MEASURED, why=_NOTHING_ENCODED_REASON)
    why = (
        f"K and V at {compared_steps:,} of {steps:,} steps ({compared_bytes / 2**20:,.0f} MiB), logits at all: "
        f"{different_steps:,} steps differ"
    )
    if num_idle:
        why += f"; nothing was encoded in {num_idle} of {len(comparisons)} prompts"
    verdict = verdict_from(not different_bytes + different_steps)
    return GateResult(
        name="consistency", verdict=verdict, value=f"{different_bytes:,} bytes differ", limit="0", why=why
    )


def _build_perplexity_gate(quality: PerplexityChange | None, target: float) -> GateResult:
    limit = f"<= {target:+.2%}"
    if quality is None:
        why = "needs texts (--prompts)"
        return GateResult(name="perplexity", verdict=NOT_MEASURED, limit=limit, why=why)
    value = f"{quality.mean:+.2%}"
    if quality.low is None or quality.high is None or quality.texts < MIN_DOCUMENTS_FOR_INTERVAL:
        why = (
            f"{quality.texts} texts are too few for an interval: {MIN_DOCUMENTS_FOR_INTERVAL} are needed "
            f"(quality_texts, --prompts)"
        )
        return GateResult(name="perplexity", verdict=NOT_MEASURED, value=value, limit=limit, why=why)
    if quality.lossy_ratio <= 1:
        reason = quality.why_all_stay or "longer ones are needed (quality_tokens, quality_prompt)"
        why = f"nothing was evicted in the texts: {reason}"
        return GateResult(name="perplexity", verdict=NOT_MEASURED, value=value, limit=limit, why=why)
    interval = f"95 % {quality.low:+.2%} to {quality.high:+.2%} over {quality.texts} texts"
    why = f"against the full cache, lossy ratio {quality.lossy_ratio:.3f}, {interval}; its upper end counts"
    return GateResult(
        name="perplexity", verdict=verdict_from(quality.high <= target), value=value, limit=limit, why=why
    )


def build_answer_gate(pairs: Sequence[PairedRuns]) -> GateResult | None:
    """Exact answers of both sides; None where nothing was asked."""
    pairs_with_answer = [pair for pair in pairs if pair.workload.answer]
    if not pairs_with_answer:
        return None

    def count_exact(side: str) -> int:
        return sum(
            getattr(pair, side).new_ids[: len(pair.workload.answer)] == pair.workload.answer
            for pair in pairs_with_answer
        )

    num_baseline, num_candidate = count_exact("without"), count_exact("candidate")
    value, limit = f"{num_candidate} of {len(pairs_with_answer)}", f">= {num_baseline}"
    if not num_baseline:
        why = "without compression the model answers none: it cannot do this at all"
        return GateResult(name="exact answers", verdict=NOT_MEASURED, value=value, limit=limit, why=why)
    return GateResult(
        name="exact answers",
        verdict=verdict_from(num_candidate >= num_baseline),
        value=value,
        limit=limit,
        why="as many as without",
    )
