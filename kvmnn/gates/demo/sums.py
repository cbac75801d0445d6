"""Sums over runs of ``llm_demo``, over all prompts and over those of one length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..checking.drops import Drop
from ..checking.verdicts import Verdict, judged
from .runs import DemoRun


@dataclass(frozen=True, kw_only=True)
class DemoSums:
    """What runs come to; means are over runs, that of the speed over those that have one."""

    runs: int
    passed_runs: int
    decode_speed: float
    keep: float
    lossy: float
    lossless: float
    total: float
    decompress_us: float
    cache_hits: float

    @property
    def passed(self) -> bool:
        """Whether there were runs, and all ended well."""
        return 0 < self.runs == self.passed_runs

    @classmethod
    def of(cls, runs: Sequence[DemoRun]) -> DemoSums:
        """Over runs."""

        def mean(figure: Callable[[DemoRun], float]) -> float:
            return sum(map(figure, runs)) / len(runs) if runs else 0.0

        speeds = [run.decode_speed for run in runs if run.decode_speed > 0]
        return cls(
            runs=len(runs),
            passed_runs=sum(run.return_code == 0 for run in runs),
            decode_speed=sum(speeds) / len(speeds) if speeds else 0.0,
            keep=mean(lambda run: run.figure("h2o_keep_ratio")),
            lossy=mean(lambda run: run.figure("h2o_lossy_ratio")),
            lossless=mean(lambda run: run.figure("h2o_lossless_ratio")),
            total=mean(lambda run: run.figure("h2o_lossy_ratio") * run.figure("h2o_lossless_ratio")),
            decompress_us=max((run.figure("h2o_lossless_decompress_us") for run in runs), default=0.0),
            cache_hits=max((run.figure("h2o_lossless_decode_cache_hit") for run in runs), default=0.0),
        )


@dataclass(frozen=True, kw_only=True)
class DemoBucket:
    """The prompts of one length."""

    name: str
    baseline: DemoSums
    candidate: DemoSums
    drop: float
    verdict: Verdict

    @property
    def passed(self) -> bool:
        """Whether its speed is within the limit."""
        return self.verdict == "pass"


def pairs_by_prompt(baseline: Iterable[DemoRun], candidate: Iterable[DemoRun]) -> Iterator[tuple[float, float]]:
    """Speeds (without, with) of the same prompts on both sides, of those that ran several times in their order."""
    there: dict[str, list[float]] = defaultdict(list)
    for run in baseline:
        there[run.name].append(run.decode_speed)
    for run in candidate:
        speed = there[run.name].pop(0) if there[run.name] else 0.0
        if speed > 0 and run.decode_speed > 0:
            yield speed, run.decode_speed


def buckets_of(
    baseline: Sequence[DemoRun], candidate: Sequence[DemoRun], most: float, first: Sequence[str], strict: bool
) -> Iterator[DemoBucket]:
    """The lengths of both sides, those of `first` first; `strict` judges by intervals."""
    for name in bucket_order({run.bucket for run in (*baseline, *candidate)}, first):
        sides = [[run for run in runs if run.bucket == name] for runs in (baseline, candidate)]
        before, after = map(DemoSums.of, sides)
        known = before.decode_speed > 0
        drop = (before.decode_speed - after.decode_speed) / before.decode_speed if known else 1.0
        verdict: Verdict = judged(before.runs == after.runs > 0 and known and drop <= most)
        paired = Drop.of(list(pairs_by_prompt(*sides))) if strict else None
        if paired is not None and before.runs == after.runs:
            verdict, drop = paired.verdict(most), paired.value
        yield DemoBucket(name=name, baseline=before, candidate=after, drop=drop, verdict=verdict)


def bucket_order(found: Iterable[str], first: Sequence[str] = ()) -> list[str]:
    """Buckets in order: those of `first` that are there, then numbers ascending, then names."""
    rest = sorted(set(found) - set(first), key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))
    there = set(found)
    return [name for name in dict.fromkeys(first) if name in there] + rest
