"""The gate of real prompts: runs without compression against runs with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...text import count, escape_markdown
from ...text.folding import folded_lines
from ..checking.drops import Drop, drop_gate
from ..checking.verdicts import (
    FAIL,
    NOT_MEASURED,
    OFF,
    UNCLEAR,
    Gate,
    Verdict,
    apart,
    counted,
    gate_lines,
    judged,
    together,
    worst,
)
from .runs import DemoRun
from .sums import DemoBucket, DemoSums, buckets_of, pairs_by_prompt


@dataclass(frozen=True, kw_only=True)
class DemoLimits:
    """What the prompts must reach.

    Attributes
    ----------
    decode_drop_target
        Largest share of the speed that may be lost, over all prompts and in each bucket.
    require_runtime_decomp, require_decode_cache_hit
        Some run of the candidate must show it.
    require_decode_baseline
        Runs without compression must have a speed.
    require_bucket_decode_pass
        Every bucket counts.
    lossy_target, lossless_target
        Least mean ratios, which the fork does not ask for; None: no gate.
    """

    decode_drop_target: float = 0.08
    require_runtime_decomp: bool = True
    require_decode_cache_hit: bool = False
    require_decode_baseline: bool = True
    require_bucket_decode_pass: bool = True
    lossy_target: float | None = None
    lossless_target: float | None = None


@dataclass(frozen=True, kw_only=True)
class DemoChecked:
    """The verdict over prompts.

    Attributes
    ----------
    case, mode
        Of the round.
    baseline, candidate
        What both sides came to.
    drop
        Share of the speed that was lost; 1 where there is no baseline.
    buckets
        By length, those of the candidate that the baseline lacks included.
    gates
        What the verdict is made of.
    limits
        What was asked for.
    failures
        Runs that did not end well, with their reasons.
    run_order
        Which side ran first, where it is known.
    unmeasured
        Figures of the report that were not measured, by their names: null there.
    """

    case: str
    mode: str
    limits: DemoLimits
    baseline: DemoSums
    candidate: DemoSums
    drop: float
    decode_pass: bool
    buckets: tuple[DemoBucket, ...]
    gates: tuple[Gate, ...]
    failures: tuple[str, ...] = ()
    run_order: str = ""
    strict: bool = False
    unmeasured: frozenset[str] = frozenset()

    @property
    def verdict(self) -> Verdict:
        """Of all gates together."""
        return together(self.gates)

    @property
    def passed(self) -> bool:
        """Whether none failed, and everything that was asked for was measured."""
        return self.verdict == "pass"

    @property
    def failure(self) -> str:
        """What did not pass, in a line."""
        return ", ".join(f"{gate.name} {gate.verdict}" for gate in self.gates if gate.verdict not in ("pass", "off"))

    def to_dict(self) -> dict[str, Any]:
        """The fork's ``llm_demo_report.json`` with the verdict here, and the gates."""
        limits, before, after = self.limits, self.baseline, self.candidate
        failed = [bucket.name for bucket in self.buckets if not bucket.passed]
        found = {
            "overall_pass": self.passed,
            "verdict": self.verdict,
            "failure": self.failure,
            "case": self.case,
            "mode": self.mode,
            "strict": self.strict,
            "run_order": self.run_order,
            "baseline_decode_tps_avg": before.decode_speed,
            "candidate_decode_tps_avg": after.decode_speed,
            "decode_drop_ratio": self.drop,
            "decode_drop_target": limits.decode_drop_target,
            "decode_gate_enabled": before.decode_speed > 0,
            "decode_pass": self.decode_pass,
            **{f"baseline_{name}_avg": value for name, value in _ratios(before).items()},
            **{f"candidate_{name}_avg": value for name, value in _ratios(after).items()},
            "require_runtime_decomp": limits.require_runtime_decomp,
            "runtime_decomp_best_us": after.decompress_us,
            "runtime_decomp_pass": after.decompress_us > 0 or not limits.require_runtime_decomp,
            "require_decode_cache_hit": limits.require_decode_cache_hit,
            "decode_cache_hit_best": after.cache_hits,
            "decode_cache_hit_pass": after.cache_hits > 0 or not limits.require_decode_cache_hit,
            "require_decode_baseline": limits.require_decode_baseline,
            "require_bucket_decode_pass": limits.require_bucket_decode_pass,
            "bucket_decode_pass": not failed,
            "bucket_decode_failures": failed,
            "bucket_report": {bucket.name: _bucket_dict(bucket) for bucket in self.buckets},
            "baseline_overall_pass": before.passed,
            "candidate_overall_pass": after.passed,
            "gates": [gate.to_dict() for gate in self.gates],
            "failures": list(self.failures),
        }
        return {name: None if name in self.unmeasured else value for name, value in found.items()}

    def to_markdown(self) -> str:
        """The report of the case; ends with a newline."""
        lines = ["# H2O final llm_demo Real Prompt Report", ""]
        found = self.to_dict()
        for name, value in found.items():
            if name not in ("bucket_report", "gates", "failures"):
                lines.append(f"- {name}: {_text(value)}")
        lines += ["", "## Bucket Stats", ""]
        for name, bucket in found["bucket_report"].items():
            lines += [f"### bucket_{name}", "", *(f"- {key}: {_text(value)}" for key, value in bucket.items()), ""]
        return escape_markdown("\n".join(lines)).rstrip("\n") + "\n"

    def __str__(self) -> str:
        return "\n".join(self.lines(min(shutil.get_terminal_size((80, 24)).columns, 100)))

    def lines(self, width: int) -> list[str]:
        """The verdict, the gates and the buckets, in `width` columns."""
        runs = f"{count(self.baseline.runs, 'run')} without, {self.candidate.runs:,} with compression"
        asked = [gate for gate in self.gates if gate.verdict != "off"]
        head = f"{self.verdict.upper()}: {self.case}, {counted(asked)}; {runs}"
        lines = [*folded_lines([head], width), "", *gate_lines(asked, width), ""]
        lines.append(f"{'bucket':<8}{'runs':>6}{'tok/s without':>15}{'with':>9}{'drop':>9}{'lossy':>8}{'lossless':>10}")
        nothing = "candidate_lossless_ratio_avg" in self.unmeasured
        for bucket in self.buckets:
            before, after = bucket.baseline, bucket.candidate
            both = f"{before.runs}/{after.runs}"
            lines.append(
                f"{bucket.name[:7]:<8}{both:>6}{before.decode_speed:>15.3f}{after.decode_speed:>9.3f}{bucket.drop:>+9.2%}"
                f"{after.lossy:>8.3f}{'-' if nothing else f'{after.lossless:.3f}':>10}"
            )
        lines += ["", *folded_lines(self.failures, width)] if self.failures else []
        if self.limits.lossy_target is None and self.limits.lossless_target is None and not self.strict:
            lines += ["", "Ratios are not gated here, as in the fork: --strict asks for them."]
        return lines


def check_demo(
    baseline: Sequence[DemoRun],
    candidate: Sequence[DemoRun],
    limits: DemoLimits,
    *,
    case: str = "llm_demo",
    mode: str = "",
    run_order: str = "",
    bucket_order: Sequence[str] = (),
    strict: bool = False,
) -> DemoChecked:
    """Judge prompts as the fork does; ratios as well where `limits` ask for them.

    The drop is that of the mean speeds. The fork judges it as it is, `strict` by its interval over the prompts that
    both sides have (`Drop`).

    Parameters
    ----------
    baseline, candidate
        Runs of the same prompts without and with compression.
    bucket_order
        Buckets to name first.
    strict
        Judge speeds by intervals; which ratios are asked for is in `limits`.
    """
    before, after = DemoSums.of(baseline), DemoSums.of(candidate)
    drop = (before.decode_speed - after.decode_speed) / before.decode_speed if before.decode_speed > 0 else 1.0
    speed = _fork_gate(before, after, drop, limits)
    if strict and (before.decode_speed > 0 or limits.require_decode_baseline):
        paired = Drop.of(list(pairs_by_prompt(baseline, candidate)))
        missing = "no prompt has a speed on both sides"
        speed = drop_gate(paired, limits.decode_drop_target, "of runs of the same prompts", missing)
        drop = drop if paired is None else paired.value
    decode_pass = speed.verdict == "pass"
    buckets = tuple(buckets_of(baseline, candidate, limits.decode_drop_target, bucket_order, strict))
    failures = [
        f"{side} {run.name}: {run.reason or 'failed'} ({run.return_code})"
        for side, runs in (("baseline", baseline), ("candidate", candidate))
        for run in runs
        if run.return_code
    ]
    return DemoChecked(
        case=case,
        mode=mode,
        limits=limits,
        baseline=before,
        candidate=after,
        drop=drop,
        decode_pass=decode_pass,
        buckets=buckets,
        gates=tuple(_gates(before, after, speed, buckets, limits)),
        failures=tuple(failures),
        run_order=run_order,
        strict=strict,
    )


def _fork_gate(before: DemoSums, after: DemoSums, drop: float, limits: DemoLimits) -> Gate:
    known = before.decode_speed > 0
    return Gate(
        name="decode drop",
        verdict=judged(drop <= limits.decode_drop_target if known else not limits.require_decode_baseline),
        value=f"{drop:+.2%}" if known else "no baseline",
        limit=f"<= {limits.decode_drop_target:.2%}",
        why=f"{after.decode_speed:.3f} of {before.decode_speed:.3f} tok/s",
    )


def _gates(
    before: DemoSums,
    after: DemoSums,
    speed: Gate,
    buckets: Sequence[DemoBucket],
    limits: DemoLimits,
) -> Iterable[Gate]:
    for name, sums in (("baseline runs", before), ("candidate runs", after)):
        yield Gate(name=name, verdict=judged(sums.passed), value=f"{sums.passed_runs} of {sums.runs} well", limit="all")
    yield speed
    decomp, hits = limits.require_runtime_decomp, limits.require_decode_cache_hit
    yield Gate(
        name="decompression",
        verdict=judged(after.decompress_us > 0, on=decomp),
        value=f"{after.decompress_us:,.0f} us",
        limit="> 0",
    )
    yield Gate(
        name="cache hits", verdict=judged(after.cache_hits > 0, on=hits), value=f"{after.cache_hits:g}", limit="> 0"
    )
    said = [
        f"{word}: {', '.join(names)[:80]}"
        for word, verdict in (("failed", FAIL), ("unclear", UNCLEAR))
        if (names := [bucket.name for bucket in buckets if bucket.verdict == verdict])
    ]
    yield Gate(
        name="buckets",
        verdict=worst(bucket.verdict for bucket in buckets) if limits.require_bucket_decode_pass else OFF,
        value=f"{sum(bucket.passed for bucket in buckets)} of {len(buckets)}",
        limit="all",
        why="; ".join(said),
    )
    yield from _ratio_gates(after, limits)


def _ratio_gates(after: DemoSums, limits: DemoLimits) -> Iterable[Gate]:
    for name, value, target in (
        ("lossy ratio", after.lossy, limits.lossy_target),
        ("lossless ratio", after.lossless, limits.lossless_target),
    ):
        if target is None:
            continue
        verdict = judged(value >= target) if value > 0 else NOT_MEASURED
        shown, least = apart(value, target, 3)
        yield Gate(
            name=name,
            verdict=verdict,
            value=shown if value > 0 else "",
            limit=f">= {least}",
            why="mean over the prompts",
        )


def _ratios(sums: DemoSums) -> dict[str, float]:
    return {
        "keep_ratio": sums.keep,
        "lossy_ratio": sums.lossy,
        "lossless_ratio": sums.lossless,
        "runtime_total_ratio": sums.total,
    }


def _bucket_dict(bucket: DemoBucket) -> dict[str, Any]:
    before, after = bucket.baseline, bucket.candidate
    return {
        "baseline_runs": before.runs,
        "candidate_runs": after.runs,
        "baseline_decode_tps_avg": before.decode_speed,
        "candidate_decode_tps_avg": after.decode_speed,
        "decode_drop_ratio": bucket.drop,
        "decode_gate_enabled": before.runs > 0 and after.runs > 0 and before.decode_speed > 0,
        "decode_pass": bucket.passed,
        "baseline_lossy_ratio_avg": before.lossy,
        "candidate_lossy_ratio_avg": after.lossy,
        "baseline_runtime_total_ratio_avg": before.total,
        "candidate_runtime_total_ratio_avg": after.total,
    }


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6f}" if isinstance(value, float) else str(value)
