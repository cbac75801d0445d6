"""What a suite measured as a round: verdicts, files, and a line of history."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ...errors import OutputError
from ..checking.analysis import analyse
from ..checking.checking import Checked
from ..checking.verdicts import Gate, judged, together
from ..demo.judging import DemoChecked, DemoLimits, check_demo
from ..logs.parsing import ParsedLogs
from ..summary.saving import save_checked, save_demo, write_round
from ..summary.writing import Round
from .case_gates import answer_gate, case_gates, content_gates, lossless_gate, lossy_gate, runtime_gates
from .measuring import RunRecord
from .rows_of_runs import bench_rows, demo_runs
from .suite import Measured

HISTORY, FIGURES = "history.jsonl", "runs.json"

_BASIS = "every figure is of these runs; what nothing measured is no pass"


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
    """

    round: Round
    cases: tuple[Checked | DemoChecked, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all cases passed."""
        return self.round.passed

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        found = self.round.to_dict()
        return {**found, "cases": [case.to_dict() for case in self.cases], "notes": list(self.notes)}

    def __str__(self) -> str:
        width = min(shutil.get_terminal_size((80, 24)).columns, 100)
        lines = [line for case in self.cases for line in (*case.lines(width), "")]
        return "\n".join([*lines, *self.notes, *([""] if self.notes else []), str(self.round)])


def judge(measured: Measured, model: str) -> Checked | DemoChecked:
    """The verdict over what a case measured."""
    more = _stability(measured)
    case = measured.case
    if case.kind == "runtime":
        return _runtime(measured, model, more)
    limits = DemoLimits(
        decode_drop_target=case.limits.decode_drop_target,
        require_runtime_decomp=False,  # judged below: modes that restore nothing decode to compare
        require_decode_cache_hit=case.limits.require_decode_cache_hit,
    )
    pairs = measured.pairs
    records = [pair.candidate for pair in pairs]
    answered = answer_gate(pairs)
    runtime = [gate for gate in runtime_gates(records, case.limits) if gate.name != "cache hits"]
    gates = [
        lossy_gate(records, case.limits.lossy_target),
        lossless_gate(records, case.limits.lossless_target, case.mode),
        *runtime,
        *content_gates(measured.comparisons, measured.quality, case.mode, case.settings.perplexity_target),
        *([answered] if answered is not None else []),
    ]
    checked = check_demo(
        demo_runs(pairs, "without"),
        demo_runs(pairs, "candidate"),
        replace(limits, lossy_target=None, lossless_target=None),
        case=case.name,
        mode=case.mode,
        run_order="in turns",
        bucket_order=[str(size) for size in case.settings.buckets],
        strict=True,
    )
    return replace(checked, gates=(*checked.gates, *gates, *more))


def _runtime(measured: Measured, model: str, more: list[Gate]) -> Checked:
    case, pairs = measured.case, measured.pairs
    speeds = [pair.without.decode_speed for pair in pairs]
    limits = replace(
        case.limits,
        decode_baseline=fmean(speeds),
        decode_baseline_source="same_batch_mean",
        decode_baseline_samples=len(speeds),
        hard_checks=False,
    )
    gates = case_gates(
        pairs, measured.comparisons, measured.quality, limits, case.mode, case.settings.perplexity_target
    )
    return Checked(
        case=case.name,
        analysis=replace(analyse(bench_rows(case, pairs, model), limits), warnings=()),
        gates=(*gates, *more),
        strict=True,
        basis=_BASIS,
    )


def _stability(measured: Measured) -> list[Gate]:
    """Whether every round passes by itself; none where there is one."""
    if len(measured.rounds) < 2:
        return []
    limits, settings = measured.case.limits, measured.case.settings
    verdicts = [
        together(
            case_gates(
                pairs, measured.comparisons, measured.quality, limits, measured.case.mode, settings.perplexity_target
            )
        )
        for pairs in measured.rounds
    ]
    speeds = [fmean(pair.candidate.decode_speed for pair in pairs) for pairs in measured.rounds]
    drops = [fmean(pair.drop for pair in pairs) for pairs in measured.rounds]
    passed = verdicts.count("pass")
    return [
        Gate(
            name="stability",
            verdict=judged(passed == len(verdicts)),
            value=f"{passed} of {len(verdicts)} rounds",
            limit="all",
            why=f"decode {min(speeds):.2f} to {max(speeds):.2f} tok/s, drop {min(drops):+.1%} to {max(drops):+.1%}",
        )
    ]


def save(directory: str, measured: Measured, checked: Checked | DemoChecked) -> Round:
    """Write the files of a case, with the rows of both sides as tables."""
    if isinstance(checked, DemoChecked):
        made = save_demo(directory, checked, force=True)
    else:
        made = save_checked(directory, checked, force=True)
    for side in ("without", "candidate"):
        rows = bench_rows(measured.case, measured.pairs, "", side)
        table = ParsedLogs(
            kind="llm_bench", files=rows.files, columns=rows.columns, rows=tuple(dict(row.cells) for row in rows.rows)
        )
        path = Path(directory, checked.case, f"{side}.csv")
        path.write_bytes(table.to_csv().encode("utf-8", "surrogateescape"))
    Path(directory, checked.case, FIGURES).write_text(json.dumps(_figures(measured), indent=1), encoding="utf-8")
    return made


def _figures(measured: Measured) -> dict[str, Any]:
    """What the verdict of a case was made of, run by run, for ``kvmnn report``."""

    def side(record: RunRecord) -> dict[str, Any]:
        return {name: value for name, value in record.to_dict().items() if name != "new_ids"}

    return {
        "kvmnn_gate_runs": 1,
        "case": measured.case.name,
        "mode": measured.case.mode,
        "pairs": [
            {
                "work": pair.work.name,
                "bucket": pair.work.bucket,
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


def finish(directory: str, made: Round, cases: Sequence[Checked | DemoChecked], notes: Sequence[str]) -> SuiteResult:
    """Write the round of these cases, and add it to the history."""
    rows = {row["case"]: row for row in made.rows}
    found = Round.of(directory, [rows[case.case] for case in cases])
    write_round(found)
    _append_history(directory, found)
    return SuiteResult(round=found, cases=tuple(cases), notes=tuple(notes))


def _append_history(directory: str, made: Round) -> None:
    entry = {
        "generated_at": made.generated_at,
        "overall_pass": made.passed,
        "cases": [
            {
                "case": row["case"],
                "pass": row["overall_pass"],
                "reason": row["failure_reason"],
                "lossy": row.get("lossy_best", row.get("candidate_lossy_ratio_avg", 0.0)),
                "lossless": row.get("lossless_selected_value", row.get("candidate_lossless_ratio_avg", 0.0)),
                "decode_tps": row.get("decode_gate_tps", row.get("candidate_decode_tps_avg", 0.0)),
                "drop": row["decode_drop_ratio"],
            }
            for row in made.rows
        ],
    }
    path = os.path.join(directory, HISTORY)
    try:
        with open(path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
