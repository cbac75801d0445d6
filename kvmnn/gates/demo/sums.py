"""Sums over runs of ``llm_demo``, over all prompts and over those of one length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..checking.drops import DecodeSlowdown
from ..checking.verdicts import Verdict, verdict_from
from .runs import DemoRun


@dataclass(frozen=True, kw_only=True)
class DemoStats:
    """What runs come to; means are over runs, that of the speed over those that have one."""

    num_runs: int
    num_passed: int
    decode_speed: float
    keep_ratio: float
    lossy_ratio: float
    lossless_ratio: float
    total_ratio: float
    decompress_us: float
    cache_hits: float

    @property
    def has_passed(self) -> bool:
        """Whether there were runs, and all ended well."""
        return 0 < self.num_runs == self.num_passed

    @classmethod
    def from_runs(cls, runs: Sequence[DemoRun]) -> DemoStats:
        """Over runs."""

        def compute_mean(get_value: Callable[[DemoRun], float]) -> float:
            return sum(map(get_value, runs)) / len(runs) if runs else 0.0

        speeds = [run.decode_speed for run in runs if run.decode_speed > 0]
        return cls(
            num_runs=len(runs),
            num_passed=sum(run.return_code == 0 for run in runs),
            decode_speed=sum(speeds) / len(speeds) if speeds else 0.0,
            keep_ratio=compute_mean(lambda run: run.get_metric("h2o_keep_ratio")),
            lossy_ratio=compute_mean(lambda run: run.get_metric("h2o_lossy_ratio")),
            lossless_ratio=compute_mean(lambda run: run.get_metric("h2o_lossless_ratio")),
            total_ratio=compute_mean(
                lambda run: run.get_metric("h2o_lossy_ratio") * run.get_metric("h2o_lossless_ratio")
            ),
            decompress_us=max((run.get_metric("h2o_lossless_decompress_us") for run in runs), default=0.0),
            cache_hits=max((run.get_metric("h2o_lossless_decode_cache_hit") for run in runs), default=0.0),
        )


@dataclass(frozen=True, kw_only=True)
class DemoBucket:
    """The prompts of one length."""

    name: str
    baseline: DemoStats
    candidate: DemoStats
    drop_ratio: float
    verdict: Verdict

    @property
    def has_passed(self) -> bool:
        """Whether its speed is within the limit."""
        return self.verdict == "pass"


def pair_by_prompt(baseline: Iterable[DemoRun], candidate: Iterable[DemoRun]) -> Iterator[tuple[float, float]]:
    """Speeds (without, with) of the same prompts on both sides, of those that ran several times in their order."""
    baseline_speeds: dict[str, list[float]] = defaultdict(list)
    for run in baseline:
        baseline_speeds[run.name].append(run.decode_speed)
    for run in candidate:
        speed = baseline_speeds[run.name].pop(0) if baseline_speeds[run.name] else 0.0
        if speed > 0 and run.decode_speed > 0:
            yield speed, run.decode_speed


def build_buckets(
    baseline: Sequence[DemoRun],
    candidate: Sequence[DemoRun],
    max_drop_ratio: float,
    first_names: Sequence[str],
    strict: bool,
) -> Iterator[DemoBucket]:
    """The lengths of both sides, those of `first_names` first; `strict` judges by intervals."""
    for name in order_buckets({run.bucket for run in (*baseline, *candidate)}, first_names):
        runs_of_sides = [[run for run in runs if run.bucket == name] for runs in (baseline, candidate)]
        baseline_stats, candidate_stats = map(DemoStats.from_runs, runs_of_sides)
        has_baseline_speed = baseline_stats.decode_speed > 0
        drop_ratio = (
            (baseline_stats.decode_speed - candidate_stats.decode_speed) / baseline_stats.decode_speed
            if has_baseline_speed
            else 1.0
        )
        verdict: Verdict = verdict_from(
            baseline_stats.num_runs == candidate_stats.num_runs > 0
            and has_baseline_speed
            and drop_ratio <= max_drop_ratio
        )
        slowdown = DecodeSlowdown.from_pairs(list(pair_by_prompt(*runs_of_sides))) if strict else None
        if slowdown is not None and baseline_stats.num_runs == candidate_stats.num_runs:
            verdict, drop_ratio = slowdown.judge(max_drop_ratio), slowdown.drop_ratio
        yield DemoBucket(
            name=name, baseline=baseline_stats, candidate=candidate_stats, drop_ratio=drop_ratio, verdict=verdict
        )


def order_buckets(names: Iterable[str], first_names: Sequence[str] = ()) -> list[str]:
    """Buckets in order: those of `first_names` that are there, then numbers ascending, then names."""
    other_names = sorted(
        set(names) - set(first_names), key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name)
    )
    present_names = set(names)
    return [name for name in dict.fromkeys(first_names) if name in present_names] + other_names
