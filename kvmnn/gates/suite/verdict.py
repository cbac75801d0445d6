"""Judge a case that `gate run` measured, and format it as the MNN fork does (docs/gates.md).

Pairs of runs, without compression and with it, come in; gates (`GateResult`), the report section and rows of
``llm_bench`` go out. `kvmnn.gates.analysis` does the same for logs that the fork's own tools wrote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from statistics import fmean, stdev

from ..._util.dataclass import dataclass
from ..._util.text import LOSSY
from ...evaluation.scoring import MIN_DOCUMENTS_FOR_INTERVAL
from ...evaluation.task_result import TaskOptions, TaskScore
from ..analysis import DecodeStats, build_limit_lines, format_flag, format_four_digits
from ..case_inputs import NO_VALUE, RATIO_COLUMN, MetricRow, MetricRows
from ..demo import DemoRun
from ..latency_limits import LATENCY_LIMITS, build_latency_gates
from ..limits import GateLimits
from ..logs import BENCH_COLUMNS, order_columns
from ..slowdown import DecodeSlowdown, build_slowdown_gate
from ..summary import MEASURED_BY_KEY, PROMPTS_KEY, TOTAL_LINE
from ..verdict import (
    FAIL,
    NOT_MEASURED,
    OFF,
    PASS,
    TOTAL_GATE,
    UNCLEAR,
    GateResult,
    aggregate_verdict,
    build_total_gates,
    format_distinct,
    verdict_from,
)
from .cases import RunCase
from .measurement import ContentComparison, PerplexityChange, RunRecord
from .settings import RunSettings
from .workloads import Workload


@dataclass(frozen=True, kw_only=True)
class PairedRuns:
    """A run without compression and a run with it, of the same workload."""

    workload: Workload
    without: RunRecord
    candidate: RunRecord


def compute_slowdown(pairs: Sequence[PairedRuns]) -> DecodeSlowdown | None:
    """Compute the slowdown from the speeds of both sides."""
    return DecodeSlowdown.from_pairs([(pair.without.decode_speed, pair.candidate.decode_speed) for pair in pairs])


@dataclass(frozen=True, kw_only=True)
class CaseFigures:
    """The figures of a case, computed from its runs."""

    #: Minimum over the runs: bytes of all tokens over those of kept tokens (`RunRecord.lossy_ratio`).
    lossy_ratio: float
    #: Raw over compressed bytes of everything that was encoded; None if nothing was.
    encoded_ratio: float | None
    #: Mean ratio of the bytes of kept tokens to the resident bytes.
    resident_ratio: float
    #: Minimum over the runs: bytes of all tokens over the resident bytes.
    total_ratio: float
    #: Loss of decode speed; None if no run has a speed.
    slowdown: DecodeSlowdown | None
    #: Maximum over the runs of the total time of restoring, or of decoding for comparison in modes that restore
    #: nothing.
    decompress_us: float
    #: Whether that was restoring.
    has_restored: bool
    #: Maxima over the runs.
    async_wait_us: float
    async_queue_peak: float
    queue_peak: float
    num_fallbacks: float
    num_skips: float
    cache_hits: float
    cache_misses: float
    #: Workloads of which nothing was encoded, and all workloads.
    num_idle_workloads: int
    num_workloads: int
    #: Percentiles of single restores (or decodings for comparison) and waits, each the largest of the runs, by the
    #: lines of `LATENCY_LIMITS`; without those of operations that did not happen.
    latencies: dict[str, float] = field(default_factory=dict)
    #: Source of the prompts, as in `Workload.prompts`.
    prompts_text: str = "text"

    @classmethod
    def from_pairs(cls, pairs: Sequence[PairedRuns]) -> CaseFigures:
        """Compute the figures over the runs of all rounds."""
        records = [pair.candidate for pair in pairs]

        def max_counter(name: str) -> float:
            return max(record.get_counter(name) for record in records)

        raw_bytes, compressed_bytes = (
            sum(record.get_counter(f"{kind}_bytes") for record in records) for kind in ("raw", "compressed")
        )
        active_names = {pair.workload.name for pair in pairs if pair.candidate.get_counter("raw_bytes") > 0}
        workload_names = {pair.workload.name for pair in pairs}
        has_restored = max_counter("decompress_us") > 0
        return cls(
            lossy_ratio=min(record.lossy_ratio for record in records),
            encoded_ratio=raw_bytes / compressed_bytes if compressed_bytes else None,
            resident_ratio=fmean(record.held_ratio for record in records),
            total_ratio=min(record.total_ratio for record in records),
            slowdown=compute_slowdown(pairs),
            decompress_us=max(record.decompress_us for record in records),
            has_restored=has_restored,
            async_wait_us=max_counter("async_wait_us"),
            async_queue_peak=max_counter("async_queue_peak"),
            queue_peak=max_counter("queue_depth_peak"),
            num_fallbacks=max_counter("fallback_count"),
            num_skips=max_counter("backpressure_skip_count"),
            cache_hits=max_counter("decode_cache_hit"),
            cache_misses=max_counter("decode_cache_miss"),
            num_idle_workloads=len(workload_names - active_names),
            num_workloads=len(workload_names),
            latencies=_collect_latencies(records, has_restored),
            prompts_text=", ".join(dict.fromkeys(pair.workload.prompts for pair in pairs)),
        )


def _collect_latencies(records: Sequence[RunRecord], has_restored: bool) -> dict[str, float]:
    latencies = {}
    for entry in LATENCY_LIMITS:
        key = "verify" if entry.operation == "decompress" and not has_restored else entry.operation
        summaries = [record.latencies[key] for record in records if key in record.latencies]
        values = [getattr(summary, entry.percentile) for summary in summaries if summary.count]
        has_worked = any(record.get_counter("raw_bytes") for record in records)
        if values or (key == "wait" and has_worked):  # threads that were never waited for are within any limit
            latencies[entry.line] = max(values, default=0.0)
    return latencies


_NOTHING_ENCODED_REASON = "nothing was encoded: longer prompts, or fewer hot tokens, are needed"


def build_case_gates(
    pairs: Sequence[PairedRuns],
    comparisons: Sequence[ContentComparison],
    quality: PerplexityChange | None,
    limits: GateLimits,
    mode: str,
    settings: RunSettings,
    *,
    evicts: bool = True,
    is_lossy_codec: bool = False,
) -> list[GateResult]:
    """Build the gates of a case with any workload; what a codec rounds (`is_lossy_codec`) is judged by its KL."""
    figures, records = CaseFigures.from_pairs(pairs), [pair.candidate for pair in pairs]
    return [
        build_lossy_gate(figures, limits.lossy_target, is_lossy_codec=is_lossy_codec),
        build_lossless_gate(figures, limits.lossless_target, mode, is_lossy_codec=is_lossy_codec),
        *build_total_gates(limits.total_target, figures.total_ratio, "all tokens over bytes held at the end; least"),
        build_slowdown_gate(figures.slowdown, limits.decode_drop_target, "side by side"),
        *(build_runtime_gates(figures, records, limits) if mode else ()),
        *build_content_gates(comparisons, quality, mode, settings, evicts=evicts, is_lossy_codec=is_lossy_codec),
    ]


def build_lossy_gate(figures: CaseFigures, target: float, *, is_lossy_codec: bool = False) -> GateResult:
    """Build the gate of the lossy ratio of whole caches, judged by the workload with the lowest ratio."""
    value, limit = format_distinct(figures.lossy_ratio, target, 3)
    return GateResult(
        name="lossy ratio",
        verdict=verdict_from(figures.lossy_ratio >= target),
        value=value,
        limit=f">= {limit}",
        why=f"bytes of all tokens over those held, by eviction and a {LOSSY} codec, at the end; least of the runs"
        if is_lossy_codec
        else "bytes of all tokens over those kept, all layers, at the end; least of the runs",
    )


def build_lossless_gate(figures: CaseFigures, target: float, mode: str, *, is_lossy_codec: bool = False) -> GateResult:
    """Build the gate of raw over compressed bytes of everything that the runs encoded; off if a codec rounded it."""
    name, limit = "lossless ratio", f">= {target:.3f}"
    if is_lossy_codec:
        if figures.encoded_ratio is None:
            return GateResult(name=name, verdict=NOT_MEASURED, why=_NOTHING_ENCODED_REASON)
        return GateResult(name=name, verdict=OFF, why=f"{LOSSY} codec: {figures.encoded_ratio:.3f} of what it rounded")
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
    """Build the gates of the runtime from the largest value of the runs.

    A limit counts as not measured if the runtime encoded nothing.
    """
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
        *build_latency_gates(
            limits,
            figures.latencies,
            _NOTHING_ENCODED_REASON if is_idle else "nothing was decoded in any run",
            {"decompress": "of single restores" if figures.has_restored else "of blocks decoded to compare them"},
        ),
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
    """Format the latency percentiles of single operations in the slowest run."""
    latencies = [record.latencies[key] for record in records if key in record.latencies and record.latencies[key].count]
    if not latencies:
        return ""
    slowest = max(latencies, key=lambda latency: latency.p99_us)
    p50, p95, p99 = (f"{value:,.0f}" for value in (slowest.p50_us, slowest.p95_us, slowest.p99_us))
    basis_text = "blocks decoded to compare them" if key == "verify" else "in a run"
    return f"{basis_text}; each p50 {p50}, p95 {p95}, p99 {p99} us"


def build_content_gates(
    comparisons: Sequence[ContentComparison],
    quality: PerplexityChange | None,
    mode: str,
    settings: RunSettings,
    *,
    evicts: bool,
    is_lossy_codec: bool = False,
) -> list[GateResult]:
    """Build the gates of the bytes that attention reads, and of the loss of quality by eviction and rounding."""
    perplexity_off = GateResult(name="perplexity", verdict=OFF, why="nothing is evicted")
    if not mode:
        return [GateResult(name="consistency", verdict=OFF), perplexity_off]
    if is_lossy_codec:
        return [
            GateResult(
                name="consistency",
                verdict=OFF,
                why=f"does not apply: a {LOSSY} codec rounds K and V, whose cost the KL divergence shows",
            ),
            _build_perplexity_gate(quality, settings.perplexity_target),
            *_iter_quality_gates(quality, settings, needs_kl=True),
        ]
    return [
        _build_consistency_gate(comparisons),
        _build_perplexity_gate(quality, settings.perplexity_target) if evicts else perplexity_off,
        *(_iter_quality_gates(quality, settings) if evicts else ()),
    ]


def _iter_quality_gates(
    quality: PerplexityChange | None, settings: RunSettings, *, needs_kl: bool = False
) -> Iterator[GateResult]:
    """Build the gates of KL divergence and of tasks, where the settings have them; of KL always if `needs_kl`."""
    is_cut = quality is not None and quality.lossy_ratio > 1
    if needs_kl and (settings.kl_target < 0 or quality is None or quality.coded_ratio is None):
        why = (
            f"a {LOSSY} codec needs a limit (kl_target)"
            if settings.kl_target < 0
            else f"needs texts (--text) in which the planner evicts and the {LOSSY} codec rounds something"
        )
        yield GateResult(name="KL divergence", verdict=NOT_MEASURED, why=why)
    elif settings.kl_target >= 0:
        limit = f"<= {settings.kl_target:g} nats"
        if quality is None or quality.kl is None or not is_cut:
            why = "needs texts (--text) in which something is evicted"
            yield GateResult(name="KL divergence", verdict=NOT_MEASURED, limit=limit, why=why)
        else:
            yield GateResult(
                name="KL divergence",
                verdict=verdict_from(quality.kl <= settings.kl_target),
                value=f"{quality.kl:.5f} nats",
                limit=limit,
                why=f"mean over {quality.tokens:,} tokens; 99th percentile {quality.kl_p99 or 0:.4f}"
                + (f"; rounding included ({LOSSY}, ratio {quality.coded_ratio:.3f})" if quality.coded_ratio else ""),
            )
    for name in TaskOptions.parse(settings.tasks).names if settings.tasks else ():
        scores = () if quality is None else quality.task_scores
        yield _build_task_gate(name, next((score for score in scores if score.task == name), None), quality, settings)


def _build_task_gate(
    name: str, score: TaskScore | None, quality: PerplexityChange | None, settings: RunSettings
) -> GateResult:
    target = settings.accuracy_target
    limit = f"drop <= {target:.0%}"
    if score is None or quality is None:
        why = "needs texts (--text)"
    elif (quality.stored_share or 1.0) >= 1:
        why = "nothing was evicted from the contexts: longer ones are needed (tokens=N in tasks)"
    elif not score.num_right + score.num_lost:
        why = "the full cache answers nothing: the model cannot do this at all"
    else:
        verdict = PASS if score.drop_high <= target else FAIL if score.drop_low > target else UNCLEAR
        interval = f"95 % {score.drop_low:+.0%} to {score.drop_high:+.0%} over {score.num_items} items"
        why = f"drop {score.drop:+.0%}, {interval}; kept {quality.stored_share:.0%} of the contexts"
        return GateResult(
            name=f"task {name}",
            verdict=verdict,
            value=f"{score.num_right} of {score.num_items} right",
            limit=limit,
            why=why,
        )
    return GateResult(name=f"task {name}", verdict=NOT_MEASURED, limit=limit, why=why)


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
        why = "needs texts (--text)"
        return GateResult(name="perplexity", verdict=NOT_MEASURED, limit=limit, why=why)
    if quality.low is None or quality.high is None or quality.texts < MIN_DOCUMENTS_FOR_INTERVAL:
        why = (
            f"{quality.texts} texts are too few for an interval: {MIN_DOCUMENTS_FOR_INTERVAL} are needed "
            f"(quality_texts, --text)"
        )
        return GateResult(name="perplexity", verdict=NOT_MEASURED, limit=limit, why=why)
    if quality.lossy_ratio <= 1:
        reason = quality.why_all_stay or "longer ones are needed (quality_tokens, quality_prompt)"
        why = f"nothing was evicted in the texts: {reason}"
        return GateResult(name="perplexity", verdict=NOT_MEASURED, limit=limit, why=why)
    interval = f"95 % {quality.low:+.2%} to {quality.high:+.2%} over {quality.texts} texts"
    why = f"against the full cache, lossy ratio {quality.lossy_ratio:.3f}, {interval}; its upper end counts"
    return GateResult(
        name="perplexity",
        verdict=verdict_from(quality.high <= target),
        value=f"{quality.mean:+.2%}",
        limit=limit,
        why=why,
    )


def build_answer_gate(pairs: Sequence[PairedRuns]) -> GateResult | None:
    """Build the gate of exact answers on both sides; None if no question was asked."""
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
        return GateResult(name="exact answers", verdict=NOT_MEASURED, limit=limit, why=why)
    return GateResult(
        name="exact answers",
        verdict=verdict_from(num_candidate >= num_baseline),
        value=value,
        limit=limit,
        why="as many as without",
    )


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
"""Report lines of a gate's figure and verdict, left out if the gate is not measured."""


_OFF_FOR_LOSSY_CODECS = ("lossless ratio", "consistency")
"""Gates that are off for a lossy codec: they check losslessness, so their lines are left out."""


def build_gate_section(
    figures: CaseFigures, decode: DecodeStats, gates: Sequence[GateResult], limits: GateLimits, mode: str
) -> dict[str, str]:
    """Build the gate section, names to texts.

    It leaves out quantities that were not measured, and lines that only logs or an offline simulation could fill.
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
    if limits.total_target >= 0:
        lines |= {
            "total_target": format_four_digits(limits.total_target),
            TOTAL_LINE: format_four_digits(figures.total_ratio),
            "total_pass": passed_by_gate[TOTAL_GATE],
        }
    if mode:
        lines |= _build_own_runtime_lines(figures, limits, passed_by_gate)
    lines |= {"runtime_mode": mode, "overall_pass": format_flag(verdict == "pass")}
    lines |= _build_own_decode_lines(figures, decode, limits, passed_by_gate)
    is_idle = bool(mode) and figures.encoded_ratio is None
    for gate in gates:
        is_inapplicable = bool(mode) and gate.verdict == OFF and (is_idle or gate.name in _OFF_FOR_LOSSY_CODECS)
        if gate.verdict == NOT_MEASURED or is_inapplicable:
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
        **{name: format_four_digits(value) for name, value in figures.latencies.items()},
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


_BYTES_PER_MIB = 1 << 20
RunMetric = Callable[[RunRecord], float]


def _make_counter_metric(name: str, unit: float = 1.0) -> RunMetric:
    return lambda record: record.get_counter(name) / unit


_METRIC_BY_COLUMN: dict[str, tuple[RunMetric, int]] = {
    "h2o_keep": (lambda record: 1 / record.eviction_ratio, 4),
    "h2o_lossy": (lambda record: record.lossy_ratio, 3),
    "h2o_lossless": (lambda record: record.lossless_ratio, 3),
    "h2o_lossless_raw_mb": (_make_counter_metric("raw_bytes", _BYTES_PER_MIB), 2),
    "h2o_lossless_comp_mb": (_make_counter_metric("compressed_bytes", _BYTES_PER_MIB), 2),
    "h2o_lossless_comp_us": (_make_counter_metric("compress_us"), 2),
    "h2o_lossless_decomp_us": (lambda record: record.decompress_us, 2),
    "h2o_lossless_queue_peak": (_make_counter_metric("queue_depth_peak"), 2),
    "h2o_lossless_fallback": (_make_counter_metric("fallback_count"), 2),
    "h2o_lossless_backpressure_skip": (_make_counter_metric("backpressure_skip_count"), 2),
    "h2o_lossless_async_queue_peak": (_make_counter_metric("async_queue_peak"), 2),
    "h2o_lossless_async_wait_us": (_make_counter_metric("async_wait_us"), 2),
    "h2o_lossless_decode_cache_hit": (_make_counter_metric("decode_cache_hit"), 2),
    "h2o_lossless_decode_cache_miss": (_make_counter_metric("decode_cache_miss"), 2),
}
"""Columns of ``llm_bench``, what of a run stands in them, and digits after the decimal point."""

_PLAN_KEY_BY_COLUMN = {
    "h2o_target_keep_effective": ("h2o_target_keep_effective", 4),
    "h2o_floor_keep": ("h2o_floor_keep_by_recent_sink", 4),
    "h2o_quantized_keep": ("h2o_block_quantized_keep", 4),
    "h2o_evict_us": ("h2o_evict_us", 2),
}
"""Likewise, of the planner's last plan; only where there was one."""


def build_bench_rows(case: RunCase, pairs: Sequence[PairedRuns], model: str, side: str = "candidate") -> MetricRows:
    """Build a row for each workload: means and deviations over its repeats; ratios are of whole caches."""
    pairs_by_workload: dict[str, list[PairedRuns]] = defaultdict(list)
    for pair in pairs:
        pairs_by_workload[pair.workload.name].append(pair)
    rows = [
        _build_bench_row(case, work_pairs, [getattr(pair, side) for pair in work_pairs], model)
        for work_pairs in pairs_by_workload.values()
    ]
    columns = order_columns(BENCH_COLUMNS, [dict(row.cells) for row in rows])
    return MetricRows(columns=tuple(columns), rows=tuple(rows), files=(case.name,))


def _build_bench_row(case: RunCase, pairs: Sequence[PairedRuns], records: Sequence[RunRecord], model: str) -> MetricRow:
    """Build a row whose numbers are the exact means, not the rounded ones in its cells."""
    workload, metrics = pairs[0].workload, dict(_METRIC_BY_COLUMN)
    for column, (key, digits) in _PLAN_KEY_BY_COLUMN.items():
        if all(key in record.plan_stats for record in records):
            metrics[column] = (_make_plan_metric(key), digits)
    cells = {
        "model": model,
        "backend": "onnxruntime",
        "threads": str(case.settings.threads),
        "llm_demo": f"prompt={sum(map(len, workload.turns))}<br>decode={workload.new_tokens}",
        "speed(tok/s)": (
            f"{_format_mean(records, _compute_prefill_speed, 2)}<br>{_format_mean(records, _get_decode_speed, 2)}"
        ),
        **{column: _format_mean(records, metric, digits) for column, (metric, digits) in metrics.items()},
        **({RATIO_COLUMN: NO_VALUE} if any(record.is_rounded for record in records) else {}),
        "log_file": workload.name,
        "held_ratio": _format_mean(records, lambda record: record.held_ratio, 3),
    }
    exact_values = {column: fmean(map(metric, records)) for column, (metric, _) in metrics.items()}
    row = MetricRow.from_cells(cells)
    return replace(row, numbers={**row.numbers, **exact_values}, decode_speed=fmean(map(_get_decode_speed, records)))


def _make_plan_metric(key: str) -> RunMetric:
    return lambda record: record.plan_stats[key]


def _get_decode_speed(record: RunRecord) -> float:
    return record.decode_speed


def _compute_prefill_speed(record: RunRecord) -> float:
    return record.prompt_tokens / record.prefill_seconds if record.prefill_seconds > 0 else 0.0


def _format_mean(records: Sequence[RunRecord], metric: RunMetric, digits: int) -> str:
    values = [metric(record) for record in records]
    return f"{fmean(values):.{digits}f} \N{PLUS-MINUS SIGN} {stdev(values) if len(values) > 1 else 0.0:.{digits}f}"


def build_demo_runs(pairs: Sequence[PairedRuns], side: str) -> list[DemoRun]:
    """Build a run of ``llm_demo`` from each run of one side."""
    return [_build_demo_run(pair, getattr(pair, side)) for pair in pairs]


def _build_demo_run(pair: PairedRuns, record: RunRecord) -> DemoRun:
    metrics = {
        "h2o_keep_ratio": 1 / record.eviction_ratio,
        "h2o_lossy_ratio": record.lossy_ratio,
        "h2o_lossless_ratio": record.lossless_ratio,
        **record.counters,
        "h2o_lossless_decompress_us": record.decompress_us,
    }
    return DemoRun(
        name=pair.workload.name,
        bucket=pair.workload.bucket,
        return_code=0,
        reason="ok",
        prompt_tokens=record.prompt_tokens,
        decode_tokens=record.decode_tokens,
        prefill_s=record.prefill_seconds,
        decode_s=record.decode_seconds,
        metrics=metrics,
    )
