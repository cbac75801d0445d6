"""Gates over what a case measured on a model."""

from __future__ import annotations

from collections.abc import Sequence

from ...evaluation.statistics import FEWEST
from ..checking.drops import drop_gate
from ..checking.limits import Limits
from ..checking.verdicts import NOT_MEASURED, OFF, Gate, apart, judged
from .figures import Figures, Pair
from .measuring import Comparison, RunRecord
from .quality import Quality

_IDLE = "nothing was encoded: longer prompts, or fewer hot tokens, are needed"


def case_gates(
    pairs: Sequence[Pair],
    comparisons: Sequence[Comparison],
    quality: Quality | None,
    limits: Limits,
    mode: str,
    perplexity_target: float,
    *,
    evicts: bool = True,
) -> list[Gate]:
    """The gates of a case, whatever its work is.

    Parameters
    ----------
    mode
        Of the runtime; empty where nothing is compressed.
    evicts
        Whether the planner is on; perplexity cannot change without it.
    """
    found, records = Figures.of(pairs), [pair.candidate for pair in pairs]
    return [
        lossy_gate(found, limits.lossy_target),
        lossless_gate(found, limits.lossless_target, mode),
        drop_gate(found.drop, limits.decode_drop_target, "side by side"),
        *(runtime_gates(found, records, limits) if mode else ()),
        *content_gates(comparisons, quality, mode, perplexity_target, evicts=evicts),
    ]


def lossy_gate(found: Figures, target: float) -> Gate:
    """Of whole caches: the work for which least was let go."""
    value, limit = apart(found.lossy, target, 3)
    return Gate(
        name="lossy ratio",
        verdict=judged(found.lossy >= target),
        value=value,
        limit=f">= {limit}",
        why="bytes of all tokens over those kept, all layers, at the end; least of the runs",
    )


def lossless_gate(found: Figures, target: float, mode: str) -> Gate:
    """Raw over compressed bytes of what the runs encoded."""
    name, limit = "lossless ratio", f">= {target:.3f}"
    if not mode:
        why = "nothing is compressed"
        return Gate(name=name, verdict=judged(target <= 1.0), value="1.000", limit=limit, why=why)
    if found.encoded_ratio is None:
        return Gate(name=name, verdict=NOT_MEASURED, limit=limit, why=_IDLE)
    why = f"raw over compressed bytes of what was encoded; of the cache as it is held {found.held:.3f}"
    if found.prompts == "synthetic":
        why += "; prompts are synthetic, K and V of texts compress less"
    if found.idle_works:
        why += f"; nothing was encoded in {found.idle_works} of {found.works} prompts"
    verdict = judged(found.encoded_ratio >= target)
    value, least = apart(found.encoded_ratio, target, 3)
    return Gate(name=name, verdict=verdict, value=value, limit=f">= {least}", why=why)


def runtime_gates(found: Figures, records: Sequence[RunRecord], limits: Limits) -> list[Gate]:
    """What the runtime did: the largest of the runs. A limit that is kept because it did nothing says nothing."""
    idle = found.encoded_ratio is None

    def at_most(name: str, value: float, limit: float, unit: str = "") -> Gate:
        shown = f"<= {limit:,.0f}{unit}" if limit >= 0 else ""
        if idle and 0 <= value <= limit:
            return Gate(name=name, verdict=NOT_MEASURED, limit=shown, why=_IDLE)
        why = _percentiles(records, "wait") if unit else ""
        verdict = judged(value <= limit, on=limit >= 0)
        text, most = apart(value, limit, 0)
        shown = f"<= {most}{unit}" if limit >= 0 else ""
        return Gate(name=name, verdict=verdict, value=f"{text}{unit}", limit=shown, why=why)

    worked, decomp = found.decompress_us, limits.max_lossless_decomp_us
    needed = ["> 0"] if limits.require_runtime_decomp else []
    text, most = apart(worked, decomp, 0)
    bound = [f"<= {most} us"] if decomp >= 0 else []
    passed = (worked > 0 or not needed) and (worked <= decomp or not bound)
    on, nothing = bool(needed or bound), idle and not worked
    hits = found.hits or found.misses
    return [
        Gate(
            name="decompression",
            verdict=NOT_MEASURED if on and nothing else judged(passed, on=on),
            value="" if nothing else f"{text} us",
            limit=", ".join(needed + bound),
            why=_IDLE if idle else _percentiles(records, "decompress" if found.restored else "verify"),
        ),
        at_most("async wait", found.wait_us, limits.max_lossless_async_wait_us, " us"),
        at_most("queue peak", found.queue, limits.max_lossless_queue_peak),
        at_most("fallbacks", found.fallbacks, limits.max_lossless_fallback),
        at_most("skips", found.skips, limits.max_lossless_backpressure_skip),
        Gate(
            name="cache hits",
            verdict=NOT_MEASURED
            if idle and limits.require_decode_cache_hit and not hits
            else judged(found.hits > 0, on=limits.require_decode_cache_hit),
            value=f"{found.hits:,.0f} of {found.hits + found.misses:,.0f}",
            limit="> 0" if limits.require_decode_cache_hit else "",
            why=_IDLE if idle and not hits else "",
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
    comparisons: Sequence[Comparison], quality: Quality | None, mode: str, perplexity_target: float, *, evicts: bool
) -> list[Gate]:
    """Bytes that attention reads, and what eviction costs."""
    idle = Gate(name="perplexity", verdict=OFF, why="nothing is evicted")
    if not mode:
        return [Gate(name="consistency", verdict=OFF), idle]
    return [_consistency(comparisons), _perplexity(quality, perplexity_target) if evicts else idle]


def _consistency(comparisons: Sequence[Comparison]) -> Gate:
    compared, unlike = (
        sum(getattr(one, name) for one in comparisons) for name in ("compared_bytes", "different_bytes")
    )
    steps, whole, wrong = (
        sum(getattr(one, name) for one in comparisons) for name in ("steps", "compared_steps", "different_steps")
    )
    if not compared:
        return Gate(name="consistency", verdict=NOT_MEASURED, why="no bytes were compared")
    idle = sum(not one.encoded_bytes for one in comparisons)
    if idle == len(comparisons) and not unlike + wrong:
        return Gate(name="consistency", verdict=NOT_MEASURED, why=_IDLE)
    why = (
        f"K and V at {whole:,} of {steps:,} steps ({compared / 2**20:,.0f} MiB), logits at all: {wrong:,} steps differ"
    )
    if idle:
        why += f"; nothing was encoded in {idle} of {len(comparisons)} prompts"
    verdict = judged(not unlike + wrong)
    return Gate(name="consistency", verdict=verdict, value=f"{unlike:,} bytes differ", limit="0", why=why)


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
        reason = quality.why_all_stay or "longer ones are needed (quality_tokens, quality_prompt)"
        why = f"nothing was evicted in the texts: {reason}"
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
