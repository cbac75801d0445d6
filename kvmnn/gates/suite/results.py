"""Results of a suite as a round: verdicts, files, and a line of history."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from statistics import fmean
from typing import Any

from ..._util.dataclass import dataclass
from ..._util.text import wrap_lines
from ...files.schema import Record
from ..analysis import CaseAnalysis, DecodeStats
from ..checker import CaseResult
from ..demo import DemoLimits, DemoResult, check_demo
from ..limits import GateLimits
from ..logs import ParsedLogs
from ..summary import RoundSummary, save_case_result, write_round_files
from ..verdict import GateResult, TerminalResult, aggregate_verdict, find_worst
from .history import append_round, build_history_entry
from .measurement import ContentComparison, PerplexityChange, RunRecord
from .suite import CaseMeasurement, Suite
from .verdict import (
    CaseFigures,
    PairedRuns,
    build_answer_gate,
    build_bench_rows,
    build_case_gates,
    build_demo_runs,
    build_gate_section,
    compute_slowdown,
)

RUNS_FILE = "runs.json"

_RATIO_KEY = "candidate_lossless_ratio_avg"
_ENCODING_KEYS = frozenset(
    {
        *(_RATIO_KEY, "candidate_runtime_total_ratio_avg"),
        *("runtime_decomp_best_us", "runtime_decomp_pass", "decode_cache_hit_best", "decode_cache_hit_pass"),
    }
)
"""Keys about encoding in a report of real prompts, which are null if nothing was encoded."""

_SUITE_BASIS = "every figure is of these runs; what is not measured, or unclear, is no pass"


@dataclass(frozen=True, kw_only=True)
class RunPair(Record):
    """Both sides of a workload in ``runs.json``."""

    work: str
    bucket: str
    prompts: str
    round: int
    without: RunRecord
    candidate: RunRecord


@dataclass(frozen=True, kw_only=True)
class CaseRuns(Record):
    """``CASE/runs.json``: the single runs behind the verdict of a case, for ``kvmnn report``."""

    kvmnn_gate_runs: int = 1
    stamp: str
    case: str
    mode: str
    pairs: tuple[RunPair, ...]
    comparisons: tuple[ContentComparison, ...]
    quality: PerplexityChange | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SuiteResult(TerminalResult):
    """All cases of a run."""

    json_keys = "**round_summary cases=_case_documents notes"

    #: Rows of the cases, as in the files.
    round_summary: RoundSummary
    #: Verdicts of the cases.
    cases: tuple[CaseResult | DemoResult, ...]
    #: Notes for the reader, in sentences.
    notes: tuple[str, ...] = ()
    #: Stamp of each case's round, as in its files.
    stamp_by_case: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_passed(self) -> bool:
        """Return whether all cases passed."""
        return self.round_summary.has_passed

    @property
    def _case_documents(self) -> list[dict[str, Any]]:
        return [{**case.to_dict(), "stamp": self.stamp_by_case.get(case.case, "")} for case in self.cases]

    def format_lines(self, width: int) -> list[str]:
        """Return the cases, the notes and the round, in `width` columns."""
        lines = [line for case in self.cases for line in (*case.format_lines(width), "")]
        notes = wrap_lines(self.notes, width)
        return [*lines, *notes, *([""] if notes else []), *self.round_summary.format_lines(width)]


def judge_case(measured: CaseMeasurement, model: str) -> CaseResult | DemoResult:
    """Compute the verdict on a case's measurements."""
    stability_gates, measured = _judge_rounds(measured)
    case = measured.case
    if case.kind == "runtime":
        return _judge_runtime_case(measured, model, stability_gates)
    limits = DemoLimits(
        decode_drop_target=case.limits.decode_drop_target,
        require_runtime_decomp=case.limits.require_runtime_decomp,
        require_decode_cache_hit=case.limits.require_decode_cache_hit,
    )
    pairs = measured.pairs
    answers_gate = build_answer_gate(pairs)
    gates = [gate for gate in _build_gates(measured, pairs, case.limits) if gate.name != "decode drop"]
    gates += [answers_gate] if answers_gate is not None else []
    demo_result = check_demo(
        build_demo_runs(pairs, "without"),
        build_demo_runs(pairs, "candidate"),
        limits,
        case=case.name,
        mode=case.mode,
        run_order="in turns",
        leading_buckets=[str(size) for size in case.settings.buckets],
        strict=True,
    )
    own_names = {gate.name for gate in gates}
    figures = CaseFigures.from_pairs(pairs)
    unmeasured_keys = frozenset({_RATIO_KEY}) if case.is_lossy_codec else frozenset()
    return replace(
        demo_result,
        latencies=figures.latencies,
        unmeasured_keys=_ENCODING_KEYS if figures.encoded_ratio is None else unmeasured_keys,
        gates=(*(gate for gate in demo_result.gates if gate.name not in own_names), *gates, *stability_gates),
    )


def _judge_runtime_case(measured: CaseMeasurement, model: str, stability_gates: list[GateResult]) -> CaseResult:
    case, pairs = measured.case, measured.pairs
    limits = replace(
        case.limits,
        decode_baseline=fmean(pair.without.decode_speed for pair in pairs),
        decode_baseline_source="same_batch_mean",
        decode_baseline_samples=len(pairs),
        hard_checks=False,
    )
    gates = [*_build_gates(measured, pairs, limits), *stability_gates]
    rows, figures = build_bench_rows(case, pairs, model), CaseFigures.from_pairs(pairs)
    decode = DecodeStats.from_rows(rows.rows, "avg")
    analysis = CaseAnalysis(
        rows=rows,
        limits=limits,
        online_ratio=None,
        upper_bound=None,
        selected_ratio=1.0 if case.is_lossy_codec else figures.encoded_ratio or 1.0,
        ratio_source="runtime",
        decode=decode,
        gates=tuple(gates),
        section_lines=build_gate_section(figures, decode, gates, limits, case.mode),
        warnings=(),
        is_own_run=True,
    )
    return CaseResult(
        case=case.name,
        analysis=analysis,
        gates=tuple(gates),
        strict=True,
        basis=_SUITE_BASIS,
        prompts=figures.prompts_text,
    )


def _build_gates(measured: CaseMeasurement, pairs: Sequence[PairedRuns], limits: GateLimits) -> list[GateResult]:
    """Build the gates of a case over some of its pairs."""
    case = measured.case
    return build_case_gates(
        pairs,
        measured.comparisons,
        measured.quality,
        limits,
        case.mode,
        case.settings,
        evicts=case.evicts,
        is_lossy_codec=case.is_lossy_codec,
    )


def _judge_rounds(measured: CaseMeasurement) -> tuple[list[GateResult], CaseMeasurement]:
    """Build the gate of the rounds that must pass each by itself, and select those that the other gates judge.

    These are all, unless ``pass_runs`` allows some to fail and enough pass: then those that pass.
    """
    if len(measured.rounds) < 2:
        return [], measured
    settings = measured.case.settings
    verdicts = [aggregate_verdict(_build_gates(measured, pairs, measured.case.limits)) for pairs in measured.rounds]
    speeds = [fmean(pair.candidate.decode_speed for pair in pairs) for pairs in measured.rounds]
    why = f"decode {min(speeds):.2f} to {max(speeds):.2f} tok/s"
    if drops := [drop.drop_ratio for pairs in measured.rounds if (drop := compute_slowdown(pairs)) is not None]:
        why += f", drop {min(drops):+.1%} to {max(drops):+.1%}"
    num_passed, required = verdicts.count("pass"), settings.pass_runs or len(verdicts)
    is_enough = num_passed >= required
    if is_enough and num_passed < len(verdicts):
        passed_rounds = [pairs for pairs, verdict in zip(measured.rounds, verdicts, strict=True) if verdict == "pass"]
        measured = replace(measured, rounds=tuple(passed_rounds))
        why += "; the other gates are of the rounds that pass"
    gate = GateResult(
        name="stability",
        verdict="pass" if is_enough else find_worst(verdicts),
        value=f"{num_passed} of {len(verdicts)} rounds",
        limit="all" if required == len(verdicts) else f">= {required}",
        why=why,
    )
    return [gate], measured


def save_case(directory: str, measured: CaseMeasurement, case_result: CaseResult | DemoResult) -> RoundSummary:
    """Write the files of a case, with the rows of both sides as tables."""
    extra_files = {RUNS_FILE: json.dumps(_collect_case_runs(measured).to_dict(), indent=1)}
    for side in ("without", "candidate"):
        rows = build_bench_rows(measured.case, measured.pairs, "", side)
        table = ParsedLogs(
            kind="llm_bench", files=rows.files, columns=rows.columns, rows=tuple(dict(row.cells) for row in rows.rows)
        )
        extra_files[f"{side}.csv"] = table.to_csv()
    return save_case_result(directory, case_result, force=True, extra_files=extra_files, stamp=measured.stamp)


def _collect_case_runs(measured: CaseMeasurement) -> CaseRuns:
    return CaseRuns(
        stamp=measured.stamp,
        case=measured.case.name,
        mode=measured.case.mode,
        pairs=tuple(
            RunPair(
                work=pair.workload.name,
                bucket=pair.workload.bucket,
                prompts=pair.workload.prompts,
                round=round_number,
                without=replace(pair.without, new_ids=()),
                candidate=replace(pair.candidate, new_ids=()),
            )
            for round_number, pairs in enumerate(measured.rounds, start=1)
            for pair in pairs
        ),
        comparisons=measured.comparisons,
        quality=measured.quality,
        notes=measured.notes,
    )


def finish_suite(
    directory: str,
    collected: RoundSummary,
    cases: Sequence[CaseResult | DemoResult],
    notes: Sequence[str],
    suite: Suite,
) -> SuiteResult:
    """Write the round of these cases, and add it to the history."""
    rows = {row["case"]: row for row in collected.rows}
    round_summary = RoundSummary.from_rows(directory, [rows[case.case] for case in cases])
    write_round_files(round_summary)
    append_round(
        directory, build_history_entry(round_summary, suite.rerun_number, suite.run_info, suite.settings_by_case)
    )
    return SuiteResult(
        round_summary=round_summary, cases=tuple(cases), notes=tuple(notes), stamp_by_case=suite.stamp_by_case
    )
