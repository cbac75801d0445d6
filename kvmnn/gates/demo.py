"""Gate of real prompts: compare runs of ``llm_demo`` with and without compression."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from .._util.dataclass import dataclass
from .._util.patterns import declare_pattern
from .._util.text import escape_markdown, pluralize, wrap_lines
from ..errors import SourceError
from .logs import find_log_files, get_number, parse_json_line, parse_printed_values, read_json_records, read_log
from .slowdown import DecodeSlowdown, build_slowdown_gate
from .verdict import (
    FAIL,
    NOT_MEASURED,
    OFF,
    UNCLEAR,
    GateResult,
    JudgedResult,
    Verdict,
    find_worst,
    format_distinct,
    format_gate_table,
    summarize_verdicts,
    verdict_from,
)

_BUCKET_REGEX = declare_pattern(r"prompt_(\d{1,12})_\d+(?:\.\w+)?$", re.IGNORECASE)
_NO_MODEL_MESSAGE = "LLM init error"


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """One run of ``llm_demo`` on one prompt."""

    #: The prompt's file name without suffix, and the digits of ``prompt_<bucket>_<i>``, else ``"other"``.
    name: str
    bucket: str
    #: 0 and ``"ok"`` for a valid run: it ended without error and reported tokens and times.
    return_code: int
    reason: str
    #: Figures from the JSON line if it has them, else from the printed output.
    prompt_tokens: float
    decode_tokens: float
    prefill_s: float
    decode_s: float
    #: The JSON line; empty if there was none.
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def decode_speed(self) -> float:
        """Tokens per second; 0 if no time was reported."""
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else 0.0

    def get_metric(self, key: str) -> float:
        """Return a number of the JSON line; 0 if it is missing."""
        return get_number(self.metrics, key)


def parse_bucket(name: str) -> str:
    """Return the bucket in the name of a prompt's file."""
    match = _BUCKET_REGEX.search(name)
    return match[1] if match else "other"


def build_demo_run(name: str, metrics: Mapping[str, Any], printed_text: str, return_code: int = 0) -> DemoRun:
    """Build a run from its JSON line and its printed output."""
    printed_values = parse_printed_values(printed_text)
    has_metrics = get_number(metrics, "prompt_tokens") > 0 and get_number(metrics, "prefill_us") > 0
    has_metrics = has_metrics or (printed_values.get("prompt_tokens", 0) > 0 and printed_values.get("prefill_s", 0) > 0)
    reason = "ok" if return_code == 0 else f"rc_{return_code}" if return_code > 0 else f"signal_{-return_code}"
    if _NO_MODEL_MESSAGE in printed_text:
        return_code, reason = 1, "llm_init_error"
    elif return_code == 0 and not has_metrics:
        return_code, reason = 2, "missing_summary_metrics"

    def get_preferred(key: str, printed_key: str, scale: float = 1.0) -> float:
        record_value = get_number(metrics, key) * scale
        return record_value if record_value > 0 else printed_values.get(printed_key, 0.0)

    return DemoRun(
        name=name,
        bucket=parse_bucket(name),
        return_code=return_code,
        reason=reason,
        prompt_tokens=get_preferred("prompt_tokens", "prompt_tokens"),
        decode_tokens=get_preferred("decode_tokens", "decode_tokens"),
        prefill_s=get_preferred("prefill_us", "prefill_s", 1e-6),
        decode_s=get_preferred("decode_us", "decode_s", 1e-6),
        metrics=dict(metrics),
    )


def read_demo_runs(path: str | os.PathLike[str]) -> list[DemoRun]:
    """Read the runs of a file or folder.

    Parameters
    ----------
    path
        A file of JSON lines: what the MNN fork's runner notes of its runs (``*_runs.jsonl``), or what ``llm_demo``
        writes itself. Or a folder: one file ``*_runs.jsonl`` in it, else each ``*.jsonl`` in it or in its ``metrics/``
        is a prompt, with ``<name>.stdout.log`` and ``<name>.stderr.log`` next to it or in ``logs/``.

    Raises
    ------
    SourceError
        For what is not there, cannot be read, or contains no runs.
    """
    source = Path(path)
    if not source.is_dir():
        runs = _read_run_file(source)
    else:
        run_files = sorted(source.glob("*_runs.jsonl"))
        if len(run_files) > 1:
            raise SourceError(
                f"{source}: has {run_files[0].name} and {run_files[1].name}: expected one of them, or its own path"
            )
        runs = _read_run_file(run_files[0]) if run_files else _read_run_folder(source)
    if not runs:
        raise SourceError(f"{source}: holds no runs of llm_demo: expected JSON lines with prompt_tokens and prefill_us")
    return runs


def _read_run_file(path: Path) -> list[DemoRun]:
    text = read_log(path)
    lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        return []
    if "h2o_metrics" in parse_json_line(lines[0][1], f"{path}: line {lines[0][0]}"):
        return [_parse_run_line(parse_json_line(line, f"{path}: line {i}")) for i, line in lines]
    records = read_json_records(text, str(path))
    if len(records) == 1:
        return [build_demo_run(path.stem, records[0], _read_printed_text(path))]
    return [build_demo_run(f"{path.stem}:{record.get('prompt_index')}", record, "") for record in records]


def _parse_run_line(row: Mapping[str, Any]) -> DemoRun:
    """Parse a run as the fork's runner records it."""
    metrics = row.get("h2o_metrics")
    name = Path(str(row.get("prompt_file", ""))[:400]).stem
    return_code = get_number(row, "effective_returncode") if "effective_returncode" in row else 1.0
    return DemoRun(
        name=name,
        bucket=str(row.get("prompt_bucket", parse_bucket(name)))[:40],
        return_code=int(return_code),
        reason=str(row.get("status_reason", ""))[:80],
        prompt_tokens=get_number(row, "prompt_tokens"),
        decode_tokens=get_number(row, "decode_tokens"),
        prefill_s=get_number(row, "prefill_s"),
        decode_s=get_number(row, "decode_s"),
        metrics=metrics if isinstance(metrics, dict) else {},
    )


def _read_run_folder(folder: Path) -> list[DemoRun]:
    metrics = folder / "metrics" if (folder / "metrics").is_dir() else folder
    runs = []
    for path in find_log_files([metrics], (".jsonl",)):
        records = read_json_records(read_log(path), str(path))
        runs.append(build_demo_run(path.stem, records[-1] if records else {}, _read_printed_text(path)))
    return runs


def _read_printed_text(path: Path) -> str:
    """Read the printed output of a run if its logs are next to its JSON lines."""
    folders = (path.parent, path.parent.parent / "logs")
    logs = [folder / f"{path.stem}.{stream}.log" for folder in folders for stream in ("stdout", "stderr")]
    return "\n".join(read_log(log) for log in logs if log.is_file())


@dataclass(frozen=True, kw_only=True)
class DemoStats:
    """Statistics over runs; the mean speed is over runs that have one."""

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
        """Return whether there were runs and all ended without error."""
        return 0 < self.num_runs == self.num_passed

    @classmethod
    def from_runs(cls, runs: Sequence[DemoRun]) -> DemoStats:
        """Compute the statistics over runs."""

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
        """Return whether the slowdown of this length is within the limit."""
        return self.verdict == "pass"


def pair_by_prompt(baseline: Iterable[DemoRun], candidate: Iterable[DemoRun]) -> Iterator[tuple[float, float]]:
    """Pair the speeds (without, with) of the same prompt on both sides; repeated runs pair in order."""
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
    """Build the prompt length buckets of both sides, those of `first_names` first; `strict` judges by intervals."""
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
    """Order buckets: those of `first_names` that exist, then numbers ascending, then names."""
    other_names = sorted(
        set(names) - set(first_names), key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name)
    )
    present_names = set(names)
    return [name for name in dict.fromkeys(first_names) if name in present_names] + other_names


@dataclass(frozen=True, kw_only=True)
class DemoLimits:
    """The limits for the gates of real prompts."""

    #: Largest share of the speed that may be lost, over all prompts and in each bucket.
    decode_drop_target: float = 0.08
    #: Some run of the candidate must show it.
    require_runtime_decomp: bool = True
    require_decode_cache_hit: bool = False
    #: Runs without compression must have a speed.
    require_decode_baseline: bool = True
    #: Every bucket counts.
    require_bucket_decode_pass: bool = True
    #: Minimum mean ratios, which the fork does not require; None: no gate.
    lossy_target: float | None = None
    lossless_target: float | None = None


@dataclass(frozen=True, kw_only=True)
class DemoResult(JudgedResult):
    """The verdict over prompts."""

    #: Names of case and mode.
    case: str
    mode: str
    limits: DemoLimits
    #: Statistics of both sides.
    baseline: DemoStats
    candidate: DemoStats
    #: Share of the speed that was lost; 1 without a baseline.
    drop_ratio: float
    is_decode_passed: bool
    #: Results by prompt length, lengths that the baseline lacks included.
    buckets: tuple[DemoBucket, ...]
    #: The gates of the verdict.
    gates: tuple[GateResult, ...]
    #: Failed runs, with their reasons.
    failures: tuple[str, ...] = ()
    #: Which side ran first, if known.
    run_order: str = ""
    strict: bool = False
    #: Names of the figures that were not measured, which are null in the report.
    unmeasured_keys: frozenset[str] = frozenset()
    #: Percentiles of the runtime's latencies by their lines (`kvmnn.gates.latency_limits`), of runs on a model.
    latencies: Mapping[str, float] = field(default_factory=dict)

    @property
    def all_gates(self) -> tuple[GateResult, ...]:
        return self.gates

    def to_dict(self) -> dict[str, Any]:
        """Return the fork's ``llm_demo_report.json`` with kvmnn's verdict and the gates."""
        # computed: the keys are those of the fork's file, most of them of three records under names of its own
        limits, baseline, candidate = self.limits, self.baseline, self.candidate
        failed_buckets = [bucket.name for bucket in self.buckets if not bucket.has_passed]
        document = {
            "overall_pass": self.has_passed,
            "verdict": self.verdict,
            "failure": self.failure_text,
            "case": self.case,
            "mode": self.mode,
            "strict": self.strict,
            "run_order": self.run_order,
            "baseline_decode_tps_avg": baseline.decode_speed,
            "candidate_decode_tps_avg": candidate.decode_speed,
            "decode_drop_ratio": self.drop_ratio,
            "decode_drop_target": limits.decode_drop_target,
            "decode_gate_enabled": baseline.decode_speed > 0,
            "decode_pass": self.is_decode_passed,
            **{f"baseline_{name}_avg": value for name, value in _ratio_by_key(baseline).items()},
            **{f"candidate_{name}_avg": value for name, value in _ratio_by_key(candidate).items()},
            "require_runtime_decomp": limits.require_runtime_decomp,
            "runtime_decomp_best_us": candidate.decompress_us,
            "runtime_decomp_pass": candidate.decompress_us > 0 or not limits.require_runtime_decomp,
            "require_decode_cache_hit": limits.require_decode_cache_hit,
            "decode_cache_hit_best": candidate.cache_hits,
            "decode_cache_hit_pass": candidate.cache_hits > 0 or not limits.require_decode_cache_hit,
            "require_decode_baseline": limits.require_decode_baseline,
            "require_bucket_decode_pass": limits.require_bucket_decode_pass,
            "bucket_decode_pass": not failed_buckets,
            "bucket_decode_failures": failed_buckets,
            "bucket_report": {bucket.name: _bucket_to_dict(bucket) for bucket in self.buckets},
            "baseline_overall_pass": baseline.has_passed,
            "candidate_overall_pass": candidate.has_passed,
            **self.latencies,
            "gates": [gate.to_dict() for gate in self.gates],
            "failures": list(self.failures),
        }
        return {name: None if name in self.unmeasured_keys else value for name, value in document.items()}

    def to_markdown(self) -> str:
        """Return the report of the case as Markdown, ending with a newline."""
        lines = ["# H2O final llm_demo Real Prompt Report", ""]
        document = self.to_dict()
        for name, value in document.items():
            if name not in ("bucket_report", "gates", "failures"):
                lines.append(f"- {name}: {_format_value(value)}")
        lines += ["", "## Bucket Stats", ""]
        for name, bucket in document["bucket_report"].items():
            lines += [
                f"### bucket_{name}",
                "",
                *(f"- {key}: {_format_value(value)}" for key, value in bucket.items()),
                "",
            ]
        return escape_markdown("\n".join(lines)).rstrip("\n") + "\n"

    def format_lines(self, width: int) -> list[str]:
        """Return the verdict, the gates and the buckets, in `width` columns."""
        runs = f"{pluralize(self.baseline.num_runs, 'run')} without, {self.candidate.num_runs:,} with compression"
        active_gates = [gate for gate in self.gates if gate.verdict != "off"]
        heading = f"{self.verdict.upper()}: {self.case}, {summarize_verdicts(active_gates)}; {runs}"
        lines = [*wrap_lines([heading], width), "", *format_gate_table(active_gates, width), ""]
        lines.append(f"{'bucket':<8}{'runs':>6}{'tok/s without':>15}{'with':>9}{'drop':>9}{'lossy':>8}{'lossless':>10}")
        is_ratio_unmeasured = "candidate_lossless_ratio_avg" in self.unmeasured_keys
        for bucket in self.buckets:
            baseline, candidate = bucket.baseline, bucket.candidate
            runs_text = f"{baseline.num_runs}/{candidate.num_runs}"
            lines.append(
                f"{bucket.name[:7]:<8}{runs_text:>6}{baseline.decode_speed:>15.3f}{candidate.decode_speed:>9.3f}{bucket.drop_ratio:>+9.2%}"
                f"{candidate.lossy_ratio:>8.3f}{'-' if is_ratio_unmeasured else f'{candidate.lossless_ratio:.3f}':>10}"
            )
        lines += ["", *wrap_lines(self.failures, width)] if self.failures else []
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
    leading_buckets: Sequence[str] = (),
    strict: bool = False,
) -> DemoResult:
    """Judge prompts as the fork does; also ratios if `limits` set them.

    The drop is that of the mean speeds. The fork judges it as it is, `strict` by its interval over the prompts that
    both sides have (`DecodeSlowdown`).

    Parameters
    ----------
    baseline, candidate
        Runs of the same prompts without and with compression.
    leading_buckets
        Buckets to name first.
    strict
        Judge speeds by intervals; `limits` states the required ratios.
    """
    baseline_stats, candidate_stats = DemoStats.from_runs(baseline), DemoStats.from_runs(candidate)
    drop_ratio = (
        (baseline_stats.decode_speed - candidate_stats.decode_speed) / baseline_stats.decode_speed
        if baseline_stats.decode_speed > 0
        else 1.0
    )
    speed_gate = _build_fork_gate(baseline_stats, candidate_stats, drop_ratio, limits)
    if strict and (baseline_stats.decode_speed > 0 or limits.require_decode_baseline):
        slowdown = DecodeSlowdown.from_pairs(list(pair_by_prompt(baseline, candidate)))
        missing_reason = "no prompt has a speed on both sides"
        speed_gate = build_slowdown_gate(
            slowdown, limits.decode_drop_target, "of runs of the same prompts", missing_reason
        )
        drop_ratio = drop_ratio if slowdown is None else slowdown.drop_ratio
    decode_pass = speed_gate.verdict == "pass"
    buckets = tuple(build_buckets(baseline, candidate, limits.decode_drop_target, leading_buckets, strict))
    failure_texts = [
        f"{side} {run.name}: {run.reason or 'failed'} ({run.return_code})"
        for side, runs in (("baseline", baseline), ("candidate", candidate))
        for run in runs
        if run.return_code
    ]
    return DemoResult(
        case=case,
        mode=mode,
        limits=limits,
        baseline=baseline_stats,
        candidate=candidate_stats,
        drop_ratio=drop_ratio,
        is_decode_passed=decode_pass,
        buckets=buckets,
        gates=tuple(_iter_gates(baseline_stats, candidate_stats, speed_gate, buckets, limits)),
        failures=tuple(failure_texts),
        run_order=run_order,
        strict=strict,
    )


def _build_fork_gate(baseline: DemoStats, candidate: DemoStats, drop_ratio: float, limits: DemoLimits) -> GateResult:
    has_baseline_speed = baseline.decode_speed > 0
    return GateResult(
        name="decode drop",
        verdict=verdict_from(
            drop_ratio <= limits.decode_drop_target if has_baseline_speed else not limits.require_decode_baseline
        ),
        value=f"{drop_ratio:+.2%}" if has_baseline_speed else "no baseline",
        limit=f"<= {limits.decode_drop_target:.2%}",
        why=f"{candidate.decode_speed:.3f} of {baseline.decode_speed:.3f} tok/s",
    )


def _iter_gates(
    baseline: DemoStats,
    candidate: DemoStats,
    speed_gate: GateResult,
    buckets: Sequence[DemoBucket],
    limits: DemoLimits,
) -> Iterable[GateResult]:
    for name, stats in (("baseline runs", baseline), ("candidate runs", candidate)):
        yield GateResult(
            name=name,
            verdict=verdict_from(stats.has_passed),
            value=f"{stats.num_passed} of {stats.num_runs} well",
            limit="all",
        )
    yield speed_gate
    requires_decompress, requires_hits = limits.require_runtime_decomp, limits.require_decode_cache_hit
    yield GateResult(
        name="decompression",
        verdict=verdict_from(candidate.decompress_us > 0, is_active=requires_decompress),
        value=f"{candidate.decompress_us:,.0f} us",
        limit="> 0",
    )
    yield GateResult(
        name="cache hits",
        verdict=verdict_from(candidate.cache_hits > 0, is_active=requires_hits),
        value=f"{candidate.cache_hits:g}",
        limit="> 0",
    )
    reasons = [
        f"{word}: {', '.join(names)[:80]}"
        for word, verdict in (("failed", FAIL), ("unclear", UNCLEAR))
        if (names := [bucket.name for bucket in buckets if bucket.verdict == verdict])
    ]
    yield GateResult(
        name="buckets",
        verdict=find_worst(bucket.verdict for bucket in buckets) if limits.require_bucket_decode_pass else OFF,
        value=f"{sum(bucket.has_passed for bucket in buckets)} of {len(buckets)}",
        limit="all",
        why="; ".join(reasons),
    )
    yield from _iter_ratio_gates(candidate, limits)


def _iter_ratio_gates(candidate: DemoStats, limits: DemoLimits) -> Iterable[GateResult]:
    for name, value, target in (
        ("lossy ratio", candidate.lossy_ratio, limits.lossy_target),
        ("lossless ratio", candidate.lossless_ratio, limits.lossless_target),
    ):
        if target is None:
            continue
        verdict = verdict_from(value >= target) if value > 0 else NOT_MEASURED
        value_text, limit_text = format_distinct(value, target, 3)
        yield GateResult(
            name=name,
            verdict=verdict,
            value=value_text if value > 0 else "",
            limit=f">= {limit_text}",
            why="mean over the prompts",
        )


def _ratio_by_key(stats: DemoStats) -> dict[str, float]:
    return {
        "keep_ratio": stats.keep_ratio,
        "lossy_ratio": stats.lossy_ratio,
        "lossless_ratio": stats.lossless_ratio,
        "runtime_total_ratio": stats.total_ratio,
    }


def _bucket_to_dict(bucket: DemoBucket) -> dict[str, Any]:
    baseline, candidate = bucket.baseline, bucket.candidate
    return {
        "baseline_runs": baseline.num_runs,
        "candidate_runs": candidate.num_runs,
        "baseline_decode_tps_avg": baseline.decode_speed,
        "candidate_decode_tps_avg": candidate.decode_speed,
        "decode_drop_ratio": bucket.drop_ratio,
        "decode_gate_enabled": baseline.num_runs > 0 and candidate.num_runs > 0 and baseline.decode_speed > 0,
        "decode_pass": bucket.has_passed,
        "baseline_lossy_ratio_avg": baseline.lossy_ratio,
        "candidate_lossy_ratio_avg": candidate.lossy_ratio,
        "baseline_runtime_total_ratio_avg": baseline.total_ratio,
        "candidate_runtime_total_ratio_avg": candidate.total_ratio,
    }


def _format_value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6f}" if isinstance(value, float) else str(value)
