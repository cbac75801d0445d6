"""What a suite measured as a round: verdicts, files, and a line of history."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from ...text.folding import folded_lines
from ..checking.analysis import Analysis
from ..checking.checking import Checked
from ..checking.conditions import Decode
from ..checking.limits import Limits
from ..checking.verdicts import Gate, together, worst
from ..demo.judging import DemoChecked, DemoLimits, check_demo
from ..logs.parsing import ParsedLogs
from ..summary.saving import save_checked, save_demo, write_round
from ..summary.writing import Round
from .case_gates import answer_gate, case_gates
from .figures import Figures, Pair, drop_of
from .measuring import RunRecord
from .past import entry_of, note_round
from .rows_of_runs import bench_rows, demo_runs
from .section import gate_lines
from .suite import Measured, Suite

FIGURES = "runs.json"

_OF_ENCODING = frozenset(
    {
        *("candidate_lossless_ratio_avg", "candidate_runtime_total_ratio_avg"),
        *("runtime_decomp_best_us", "runtime_decomp_pass", "decode_cache_hit_best", "decode_cache_hit_pass"),
    }
)
"""What a report of real prompts says of encoding: nothing, where nothing was encoded."""

_BASIS = "every figure is of these runs; what is not measured, or unclear, is no pass"


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """All cases of a run.

    Attributes
    ----------
    round
        Their rows, as the files have them.
    cases
        Their verdicts.
    notes
        What a reader must know, in sentences.
    stamps
        Of each case that of its round, as in its files.
    """

    round: Round
    cases: tuple[Checked | DemoChecked, ...]
    notes: tuple[str, ...] = ()
    stamps: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether all cases passed."""
        return self.round.passed

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        found = self.round.to_dict()
        cases = [{**case.to_dict(), "stamp": self.stamps.get(case.case, "")} for case in self.cases]
        return {**found, "cases": cases, "notes": list(self.notes)}

    def __str__(self) -> str:
        width = min(shutil.get_terminal_size((80, 24)).columns, 100)
        lines = [line for case in self.cases for line in (*case.lines(width), "")]
        notes = folded_lines(self.notes, width)
        return "\n".join([*lines, *notes, *([""] if notes else []), str(self.round)])


def judge(measured: Measured, model: str) -> Checked | DemoChecked:
    """The verdict over what a case measured."""
    more = _stability(measured)
    case = measured.case
    if case.kind == "runtime":
        return _runtime(measured, model, more)
    limits = DemoLimits(
        decode_drop_target=case.limits.decode_drop_target,
        require_runtime_decomp=case.limits.require_runtime_decomp,
        require_decode_cache_hit=case.limits.require_decode_cache_hit,
    )
    pairs = measured.pairs
    answered = answer_gate(pairs)
    gates = [gate for gate in _gates(measured, pairs, case.limits) if gate.name != "decode drop"]
    gates += [answered] if answered is not None else []
    checked = check_demo(
        demo_runs(pairs, "without"),
        demo_runs(pairs, "candidate"),
        limits,
        case=case.name,
        mode=case.mode,
        run_order="in turns",
        bucket_order=[str(size) for size in case.settings.buckets],
        strict=True,
    )
    mine = {gate.name for gate in gates}
    nothing = Figures.of(pairs).encoded_ratio is None
    return replace(
        checked,
        unmeasured=_OF_ENCODING if nothing else frozenset(),
        gates=(*(gate for gate in checked.gates if gate.name not in mine), *gates, *more),
    )


def _runtime(measured: Measured, model: str, more: list[Gate]) -> Checked:
    case, pairs = measured.case, measured.pairs
    limits = replace(
        case.limits,
        decode_baseline=fmean(pair.without.decode_speed for pair in pairs),
        decode_baseline_source="same_batch_mean",
        decode_baseline_samples=len(pairs),
        hard_checks=False,
    )
    gates = [*_gates(measured, pairs, limits), *more]
    rows, found = bench_rows(case, pairs, model), Figures.of(pairs)
    decode = Decode.of(rows.rows, "avg")
    analysis = Analysis(
        rows=rows,
        limits=limits,
        online=None,
        upper=None,
        selected=found.encoded_ratio or 1.0,
        source="runtime",
        decode=decode,
        gates=tuple(gates),
        lines=gate_lines(found, decode, gates, limits, case.mode),
        warnings=(),
        measured=True,
    )
    return Checked(
        case=case.name, analysis=analysis, gates=tuple(gates), strict=True, basis=_BASIS, prompts=found.prompts
    )


def _gates(measured: Measured, pairs: Sequence[Pair], limits: Limits) -> list[Gate]:
    """Those of a case over some of its pairs."""
    case = measured.case
    return case_gates(
        pairs,
        measured.comparisons,
        measured.quality,
        limits,
        case.mode,
        case.settings.perplexity_target,
        evicts=case.evicts,
    )


def _stability(measured: Measured) -> list[Gate]:
    """Whether every round passes by itself; none where there is one."""
    if len(measured.rounds) < 2:
        return []
    verdicts = [together(_gates(measured, pairs, measured.case.limits)) for pairs in measured.rounds]
    speeds = [fmean(pair.candidate.decode_speed for pair in pairs) for pairs in measured.rounds]
    why = f"decode {min(speeds):.2f} to {max(speeds):.2f} tok/s"
    if drops := [drop.value for pairs in measured.rounds if (drop := drop_of(pairs)) is not None]:
        why += f", drop {min(drops):+.1%} to {max(drops):+.1%}"
    value = f"{verdicts.count('pass')} of {len(verdicts)} rounds"
    return [Gate(name="stability", verdict=worst(verdicts), value=value, limit="all", why=why)]


def save(directory: str, measured: Measured, checked: Checked | DemoChecked) -> Round:
    """Write the files of a case, with the rows of both sides as tables."""
    more = {FIGURES: json.dumps(_figures(measured), indent=1)}
    for side in ("without", "candidate"):
        rows = bench_rows(measured.case, measured.pairs, "", side)
        table = ParsedLogs(
            kind="llm_bench", files=rows.files, columns=rows.columns, rows=tuple(dict(row.cells) for row in rows.rows)
        )
        more[f"{side}.csv"] = table.to_csv()
    if isinstance(checked, DemoChecked):
        return save_demo(directory, checked, force=True, more=more, stamp=measured.stamp)
    return save_checked(directory, checked, force=True, more=more, stamp=measured.stamp)


def _figures(measured: Measured) -> dict[str, Any]:
    """What the verdict of a case was made of, run by run, for ``kvmnn report``."""

    def side(record: RunRecord) -> dict[str, Any]:
        return {name: value for name, value in record.to_dict().items() if name != "new_ids"}

    return {
        "kvmnn_gate_runs": 1,
        "stamp": measured.stamp,
        "case": measured.case.name,
        "mode": measured.case.mode,
        "pairs": [
            {
                "work": pair.work.name,
                "bucket": pair.work.bucket,
                "prompts": pair.work.prompts,
                "round": place,
                "without": side(pair.without),
                "candidate": side(pair.candidate),
            }
            for place, pairs in enumerate(measured.rounds, start=1)
            for pair in pairs
        ],
        "comparisons": [one.to_dict() for one in measured.comparisons],
        "quality": None if measured.quality is None else asdict(measured.quality),
        "notes": list(measured.notes),
    }


def finish(
    directory: str, made: Round, cases: Sequence[Checked | DemoChecked], notes: Sequence[str], suite: Suite
) -> SuiteResult:
    """Write the round of these cases, and note it down in the history."""
    rows = {row["case"]: row for row in made.rows}
    found = Round.of(directory, [rows[case.case] for case in cases])
    write_round(found)
    note_round(directory, entry_of(found, suite.take, suite.about, suite.settings_of_cases))
    return SuiteResult(round=found, cases=tuple(cases), notes=tuple(notes), stamps=suite.stamps)
