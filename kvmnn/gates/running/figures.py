"""The figures of a case that are judged, each computed once: for its gates, its report and the round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ..checking.drops import DecodeSlowdown
from .measuring import RunRecord
from .work import Workload


@dataclass(frozen=True, kw_only=True)
class PairedRuns:
    """Runs of one piece of work beside each other: without and with compression."""

    workload: Workload
    without: RunRecord
    candidate: RunRecord


def compute_slowdown(pairs: Sequence[PairedRuns]) -> DecodeSlowdown | None:
    """Of the speeds of both sides."""
    return DecodeSlowdown.from_pairs([(pair.without.decode_speed, pair.candidate.decode_speed) for pair in pairs])


@dataclass(frozen=True, kw_only=True)
class CaseFigures:
    """What the runs of a case came to.

    Attributes
    ----------
    lossy_ratio
        Least of the runs: bytes of all tokens over those that are kept.
    encoded_ratio
        Raw over compressed bytes of all that was encoded; None where nothing was.
    resident_ratio
        Mean of the bytes that are kept over those that hold them.
    slowdown
        Of the speed; None where no run has one.
    decompress_us
        The longest of the runs, in all: restoring, and in modes that restore nothing decoding what is compared.
    has_restored
        Whether it was restoring.
    async_wait_us, async_queue_peak, queue_peak, num_fallbacks, num_skips, cache_hits, cache_misses
        The largest of the runs.
    num_idle_workloads, num_workloads
        Pieces of work of which nothing was encoded, and how many there are.
    prompts_text
        Where the prompts come from, as `Workload.prompts` names it.
    """

    lossy_ratio: float
    encoded_ratio: float | None
    resident_ratio: float
    slowdown: DecodeSlowdown | None
    decompress_us: float
    has_restored: bool
    async_wait_us: float
    async_queue_peak: float
    queue_peak: float
    num_fallbacks: float
    num_skips: float
    cache_hits: float
    cache_misses: float
    num_idle_workloads: int
    num_workloads: int
    prompts_text: str = "text"

    @classmethod
    def from_pairs(cls, pairs: Sequence[PairedRuns]) -> CaseFigures:
        """Over the runs of all rounds."""
        records = [pair.candidate for pair in pairs]

        def max_counter(name: str) -> float:
            return max(record.get_counter(name) for record in records)

        raw_bytes, compressed_bytes = (
            sum(record.get_counter(f"{kind}_bytes") for record in records) for kind in ("raw", "compressed")
        )
        active_names = {pair.workload.name for pair in pairs if pair.candidate.get_counter("raw_bytes") > 0}
        workload_names = {pair.workload.name for pair in pairs}
        return cls(
            lossy_ratio=min(record.lossy_ratio for record in records),
            encoded_ratio=raw_bytes / compressed_bytes if compressed_bytes else None,
            resident_ratio=fmean(record.held_ratio for record in records),
            slowdown=compute_slowdown(pairs),
            decompress_us=max(record.decompress_us for record in records),
            has_restored=max_counter("decompress_us") > 0,
            async_wait_us=max_counter("async_wait_us"),
            async_queue_peak=max_counter("async_queue_peak"),
            queue_peak=max_counter("queue_depth_peak"),
            num_fallbacks=max_counter("fallback_count"),
            num_skips=max_counter("backpressure_skip_count"),
            cache_hits=max_counter("decode_cache_hit"),
            cache_misses=max_counter("decode_cache_miss"),
            num_idle_workloads=len(workload_names - active_names),
            num_workloads=len(workload_names),
            prompts_text=", ".join(dict.fromkeys(pair.workload.prompts for pair in pairs)),
        )
