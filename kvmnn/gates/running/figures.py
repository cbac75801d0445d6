"""The figures of a case that are judged, each computed once: for its gates, its report and the round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ..checking.drops import Drop
from .measuring import RunRecord
from .work import Workload


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Runs of one piece of work beside each other: without and with compression."""

    work: Workload
    without: RunRecord
    candidate: RunRecord


def drop_of(pairs: Sequence[Pair]) -> Drop | None:
    """Of the speeds of both sides."""
    return Drop.of([(pair.without.decode_speed, pair.candidate.decode_speed) for pair in pairs])


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the runs of a case came to.

    Attributes
    ----------
    lossy
        Least of the runs: bytes of all tokens over those that are kept.
    encoded_ratio
        Raw over compressed bytes of all that was encoded; None where nothing was.
    held
        Mean of the bytes that are kept over those that hold them.
    drop
        Of the speed; None where no run has one.
    decompress_us
        The longest of the runs, in all: restoring, and in modes that restore nothing decoding what is compared.
    restored
        Whether it was restoring.
    wait_us, async_queue, queue, fallbacks, skips, hits, misses
        The largest of the runs.
    idle_works, works
        Pieces of work of which nothing was encoded, and how many there are.
    prompts
        Where the prompts come from, as `Workload.prompts` names it.
    """

    lossy: float
    encoded_ratio: float | None
    held: float
    drop: Drop | None
    decompress_us: float
    restored: bool
    wait_us: float
    async_queue: float
    queue: float
    fallbacks: float
    skips: float
    hits: float
    misses: float
    idle_works: int
    works: int
    prompts: str = "text"

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Figures:
        """Over the runs of all rounds."""
        records = [pair.candidate for pair in pairs]

        def largest(name: str) -> float:
            return max(record.counter(name) for record in records)

        raw, coded = (sum(record.counter(f"{part}_bytes") for record in records) for part in ("raw", "compressed"))
        active = {pair.work.name for pair in pairs if pair.candidate.counter("raw_bytes") > 0}
        works = {pair.work.name for pair in pairs}
        return cls(
            lossy=min(record.lossy_ratio for record in records),
            encoded_ratio=raw / coded if coded else None,
            held=fmean(record.held_ratio for record in records),
            drop=drop_of(pairs),
            decompress_us=max(record.decompress_us for record in records),
            restored=largest("decompress_us") > 0,
            wait_us=largest("async_wait_us"),
            async_queue=largest("async_queue_peak"),
            queue=largest("queue_depth_peak"),
            fallbacks=largest("fallback_count"),
            skips=largest("backpressure_skip_count"),
            hits=largest("decode_cache_hit"),
            misses=largest("decode_cache_miss"),
            idle_works=len(works - active),
            works=len(works),
            prompts=", ".join(dict.fromkeys(pair.work.prompts for pair in pairs)),
        )
