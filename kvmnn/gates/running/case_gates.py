"""Gates over what a case measured on a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ...evaluation.statistics import FEWEST
from ..checking.limits import Limits
from ..checking.verdicts import NOT_MEASURED, OFF, Gate, judged
from .measuring import Comparison, RunRecord
from .work import Workload

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The change of perplexity against the full cache, as shares; no interval over fewer than two texts.

    lossy_ratio: bytes of all tokens over those kept at the end of the texts, 1 where nothing was evicted.
    """

    mean: float
    low: float | None
    high: float | None
    texts: int
    tokens: int
    lossy_ratio: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Runs of one piece of work beside each other: without and with compression."""

    work: Workload
    without: RunRecord
    candidate: RunRecord

    @property
    def drop(self) -> float:
        """Share of the speed that was lost."""
        before = self.without.decode_speed
        return (before - self.candidate.decode_speed) / before if before > 0 else 0.0


def case_gates(
    pairs: Sequence[Pair],
    comparisons: Sequence[Comparison],
    quality: Quality | None,
    limits: Limits,
    mode: str,
    perplexity_target: float,
) -> list[Gate]:
    """The gates of a case of ``llm_bench``'s kind."""
    records = [pair.candidate for pair in pairs]
    return [
        lossy_gate(records, limits.lossy_target),
        lossless_gate(records, limits.lossless_target, mode),
        drop_gate(pairs, limits.decode_drop_target),
        *runtime_gates(records, limits),
        *content_gates(comparisons, quality, mode, perplexity_target),
    ]


def lossy_gate(records: Sequence[RunRecord], target: float) -> Gate:
    """Of whole caches: the work for which least was let go."""
    least = min(record.lossy_ratio for record in records)
    why = "bytes of all tokens over those kept, all layers, at the end; least of the runs"
    return Gate(
        name="lossy ratio", verdict=judged(least >= target), value=f"{least:.3f}", limit=f">= {target:.3f}", why=why
    )


def lossless_gate(records: Sequence[RunRecord], target: float, mode: str) -> Gate:
    """Raw over compressed bytes of what the runs encoded."""
    limit = f">= {target:.3f}"
    if not mode:
        return Gate(
            name="lossless ratio",
            verdict=judged(target <= 1.0),
            value="1.000",
            limit=limit,
            why="nothing is compressed",
        )
    raw = sum(record.counters["h2o_lossless_raw_bytes"] for record in records)
    coded = sum(record.counters["h2o_lossless_compressed_bytes"] for record in records)
    if not coded:
        return Gate(name="lossless ratio", verdict=NOT_MEASURED, limit=limit, why="nothing was encoded")
    held = fmean(record.held_ratio for record in records)
    why = f"raw over compressed bytes of what was encoded; of the cache as it is held {held:.3f}"
    return Gate(
        name="lossless ratio", verdict=judged(raw / coded >= target), value=f"{raw / coded:.3f}", limit=limit, why=why
    )


def drop_gate(pairs: Sequence[Pair], target: float) -> Gate:
    """Speeds of runs beside each other."""
    drops = [pair.drop for pair in pairs]
    mean = fmean(drops)
    speeds = [fmean(getattr(pair, side).decode_speed for pair in pairs) for side in ("without", "candidate")]
    why = f"{speeds[1]:.2f} of {speeds[0]:.2f} tok/s, {len(drops)} pairs side by side"
    if len(drops) > 1:
        freedom = len(drops) - 1
        t = _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom
        width = t * stdev(drops) / math.sqrt(len(drops))
        why += f"; 95 % {mean - width:+.1%} to {mean + width:+.1%}"
    return Gate(
        name="decode drop", verdict=judged(mean <= target), value=f"{mean:+.2%}", limit=f"<= {target:.2%}", why=why
    )


def runtime_gates(records: Sequence[RunRecord], limits: Limits) -> list[Gate]:
    """What the runtime did: the largest of the runs."""

    def largest(name: str) -> float:
        return max((record.counters.get(f"h2o_lossless_{name}", 0.0) for record in records), default=0.0)

    def at_most(name: str, counter: str, limit: float, unit: str = "") -> Gate:
        value = largest(counter)
        shown = f"<= {limit:,.0f}{unit}" if limit >= 0 else ""
        why = _percentiles(records, "wait") if unit else ""
        return Gate(
            name=name, verdict=judged(value <= limit, on=limit >= 0), value=f"{value:,.0f}{unit}", limit=shown, why=why
        )

    if not any(record.counters for record in records):
        return []
    worked, key = largest("decompress_us"), "decompress"
    if not worked:  # modes probe and full restore nothing: what they decode is compared with the rows
        worked, key = max(record.latencies.get("verify", {}).get("total_us", 0.0) for record in records), "verify"
    decomp = limits.max_lossless_decomp_us
    needed = ["> 0"] if limits.require_runtime_decomp else []
    bound = [f"<= {decomp:,.0f} us"] if decomp >= 0 else []
    passed = (worked > 0 or not needed) and (worked <= decomp or not bound)
    hits, misses = largest("decode_cache_hit"), largest("decode_cache_miss")
    return [
        Gate(
            name="decompression",
            verdict=judged(passed, on=bool(needed or bound)),
            value=f"{worked:,.0f} us",
            limit=", ".join(needed + bound),
            why=_percentiles(records, key),
        ),
        at_most("async wait", "async_wait_us", limits.max_lossless_async_wait_us, " us"),
        at_most("queue peak", "queue_depth_peak", limits.max_lossless_queue_peak),
        at_most("fallbacks", "fallback_count", limits.max_lossless_fallback),
        at_most("skips", "backpressure_skip_count", limits.max_lossless_backpressure_skip),
        Gate(
            name="cache hits",
            verdict=judged(hits > 0, on=limits.require_decode_cache_hit),
            value=f"{hits:,.0f} of {hits + misses:,.0f}",
            limit="> 0" if limits.require_decode_cache_hit else "",
        ),
    ]


def _percentiles(records: Sequence[RunRecord], key: str) -> str:
    """Of single operations, the slowest run."""
    found = [record.latencies[key] for record in records if record.latencies.get(key, {}).get("count")]
    if not found:
        return ""
    slowest = max(found, key=lambda one: one["p99_us"])
    p50, p95, p99 = (f"{slowest[part]:,.0f}" for part in ("p50_us", "p95_us", "p99_us"))
    what = "blocks decoded to compare them" if key == "verify" else "in a run"
    return f"{what}; each p50 {p50}, p95 {p95}, p99 {p99} us"


def content_gates(
    comparisons: Sequence[Comparison], quality: Quality | None, mode: str, perplexity_target: float
) -> list[Gate]:
    """Bytes that attention reads, and what eviction costs."""
    if not mode:
        return [Gate(name="consistency", verdict=OFF), Gate(name="perplexity", verdict=OFF)]
    return [_consistency(comparisons), _perplexity(quality, perplexity_target)]


def _consistency(comparisons: Sequence[Comparison]) -> Gate:
    compared, unlike = (
        sum(getattr(one, name) for one in comparisons) for name in ("compared_bytes", "different_bytes")
    )
    steps, whole, wrong = (
        sum(getattr(one, name) for one in comparisons) for name in ("steps", "compared_steps", "different_steps")
    )
    if not compared:
        return Gate(name="consistency", verdict=NOT_MEASURED, why="no bytes were compared")
    return Gate(
        name="consistency",
        verdict=judged(all(one.equal for one in comparisons)),
        value=f"{unlike:,} bytes differ",
        limit="0",
        why=f"K and V at {whole:,} of {steps:,} steps ({compared / 2**20:,.0f} MiB), logits at all: "
        f"{wrong:,} steps differ",
    )


def _perplexity(quality: Quality | None, target: float) -> Gate:
    limit = f"<= {target:+.2%}"
    if quality is None:
        why = "needs texts (--prompts)"
        return Gate(name="perplexity", verdict=NOT_MEASURED, limit=limit, why=why)
    value = f"{quality.mean:+.2%}"
    if quality.low is None or quality.high is None or quality.texts < FEWEST:
        why = f"{quality.texts} texts are too few for an interval: {FEWEST} are needed (quality_texts, --prompts)"
        return Gate(name="perplexity", verdict=NOT_MEASURED, value=value, limit=limit, why=why)
    if quality.lossy_ratio <= 1:
        why = "nothing was evicted in the texts: longer ones are needed (quality_tokens, quality_prompt)"
        return Gate(name="perplexity", verdict=NOT_MEASURED, value=value, limit=limit, why=why)
    interval = f"95 % {quality.low:+.2%} to {quality.high:+.2%} over {quality.texts} texts"
    why = f"against the full cache, lossy ratio {quality.lossy_ratio:.3f}, {interval}; its upper end counts"
    return Gate(name="perplexity", verdict=judged(quality.high <= target), value=value, limit=limit, why=why)


def answer_gate(pairs: Sequence[Pair]) -> Gate | None:
    """Exact answers of both sides; None where nothing was asked."""
    asked = [pair for pair in pairs if pair.work.answer]
    if not asked:
        return None

    def exact(side: str) -> int:
        return sum(getattr(pair, side).new_ids[: len(pair.work.answer)] == pair.work.answer for pair in asked)

    before, after = exact("without"), exact("candidate")
    value, limit = f"{after} of {len(asked)}", f">= {before}"
    if not before:
        why = "without compression the model answers none: it cannot do this at all"
        return Gate(name="exact answers", verdict=NOT_MEASURED, value=value, limit=limit, why=why)
    return Gate(
        name="exact answers", verdict=judged(after >= before), value=value, limit=limit, why="as many as without"
    )
