"""One case of ``llm_bench`` judged: the fork's gates, its hard checks, or the sound ones, and what is behind them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import OptionError, SourceError
from ...text import pluralize
from ...text.folding import wrap_lines
from ..logs.columns import LOG_FILE_COLUMN
from .analysis import SELECTED_RATIO_WARNINGS, CaseAnalysis, analyse
from .diagnoses import diagnose
from .hard_checks import run_hard_checks
from .limits import GateLimits
from .log_scan import scan_logs
from .markdown import format_case_markdown
from .metric_rows import MetricRows
from .offline_ratio import OfflineRatio, read_offline_ratio
from .strict import build_strict_gates
from .verdicts import GateResult, Verdict, aggregate_verdict, format_gate_table, summarize_verdicts

_STRICT_BASIS = (
    "strict: ratios of every row, the lossless one from the run's own bytes, decode speed against that of the "
    "same work, by the interval of the drop; what is not measured, or unclear, is no pass."
)


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case and its verdict.

    Attributes
    ----------
    case
        Its name.
    analysis
        The fork's figures and verdict, whatever else was asked for.
    gates
        What the verdict here is made of: the fork's gates, or with `strict` the sound ones.
    checks
        The hard checks; empty where they were not asked for.
    strict
        Which.
    basis
        What the verdict rests on, in a sentence, where it is not the fork's.
    diagnoses
        What is behind figures that look wrong, in sentences.
    prompts
        Where the prompts come from, of runs on a model; empty for logs, which do not tell.
    """

    case: str
    analysis: CaseAnalysis
    gates: tuple[GateResult, ...]
    checks: tuple[GateResult, ...] = ()
    strict: bool = False
    basis: str = ""
    diagnoses: tuple[str, ...] = ()
    prompts: str = ""

    @property
    def verdict(self) -> Verdict:
        """Of all gates and checks together."""
        return aggregate_verdict([*self.gates, *self.checks])

    @property
    def has_passed(self) -> bool:
        """Whether none failed, and everything that was asked for was measured."""
        return self.verdict == "pass"

    @property
    def warnings(self) -> tuple[str, ...]:
        """The fork's, but for what `strict` does otherwise: it takes the lossless ratio from the run itself."""
        all_warnings = self.analysis.warnings
        return (
            tuple(line for line in all_warnings if line not in SELECTED_RATIO_WARNINGS) if self.strict else all_warnings
        )

    @property
    def failure_text(self) -> str:
        """What did not pass, in a line; empty where everything did."""
        problems = [
            f"{gate.name} {gate.verdict}" for gate in (*self.checks, *self.gates) if gate.verdict not in ("pass", "off")
        ]
        return ", ".join(problems)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; ``gate`` is the fork's section, its values as text."""
        analysis = self.analysis
        return {
            "case": self.case,
            "verdict": self.verdict,
            "overall_pass": self.has_passed,
            "failure": self.failure_text,
            "strict": self.strict,
            "rows": len(analysis.rows.rows),
            "files": list(analysis.rows.files),
            "limits": analysis.limits.to_dict(),
            "gate": dict(analysis.section_lines),
            "gates": [gate.to_dict() for gate in self.gates],
            "hard_checks": [gate.to_dict() for gate in self.checks],
            "warnings": list(self.warnings),
            "notes": list(analysis.rows.notes),
            "diagnoses": list(self.diagnoses),
            **({"prompts": self.prompts} if self.prompts else {}),
        }

    def to_markdown(self) -> str:
        """The report of the case, `format_case_markdown`."""
        return format_case_markdown(self.analysis)

    def __str__(self) -> str:
        return "\n".join(self.format_lines(min(shutil.get_terminal_size((80, 24)).columns, 100)))

    def format_lines(self, width: int) -> list[str]:
        """The verdict, the gates, and what is behind them, in `width` columns."""
        rows = self.analysis.rows
        active_gates = [gate for gate in (*self.gates, *self.checks) if gate.verdict != "off"]
        unused_names = [gate.name for gate in (*self.gates, *self.checks) if gate.verdict == "off"]
        heading = (
            f"{self.verdict.upper()}: {self.case}, {summarize_verdicts(active_gates)}; "
            f"{pluralize(len(rows.rows), 'row')}"
        )
        heading += f"; prompts: {self.prompts}" if self.prompts else ""
        gates = [gate for gate in self.gates if gate.verdict != "off"]
        lines = [*wrap_lines([heading], width), "", *format_gate_table(gates, width)]
        checks = [gate for gate in self.checks if gate.verdict != "off"]
        if checks:
            lines += ["", "before the gates:", *format_gate_table(checks, width)]
        remarks = [*self.warnings, *self.diagnoses]
        for paragraph in (
            [f"off: {', '.join(unused_names)}"] if unused_names else [],
            [self.basis] if self.basis else [],
            remarks,
        ):
            lines += ["", *wrap_lines(paragraph, width)] if paragraph else []
        return lines


def check(
    rows: MetricRows,
    limits: GateLimits,
    *,
    case: str = "runtime",
    online_json: str | os.PathLike[str] | None = None,
    upper_json: str | os.PathLike[str] | None = None,
    logs: Sequence[str | os.PathLike[str]] = (),
    baseline: MetricRows | None = None,
    strict: bool = False,
) -> CaseResult:
    """Judge the rows of a case.

    Parameters
    ----------
    rows, limits
        What was measured, and what it must reach.
    case
        Its name.
    online_json, upper_json
        Documents of offline evaluations; the fork takes its lossless ratio from them.
    logs
        Files and folders of logs of the same run, which are searched for damage and encodings.
    baseline
        Rows of the same work without compression; `strict` judges the decode speed by them.
    strict
        Judge by `build_strict_gates`.

    Raises
    ------
    SourceError
        For documents and logs that cannot be read; with `strict` for rows that are headers.
    OptionError
        With `strict` for a baseline that is the table itself: the same file, or the same rows.
    """
    online_ratio, upper_ratio = _read_optional_ratio(online_json), _read_optional_ratio(upper_json)
    log_scan = scan_logs(logs) if logs else None
    analysis = analyse(rows, limits, online_ratio=online_ratio, upper_bound=upper_ratio, logs=log_scan)
    if strict:
        _check_no_headers(rows)
        if baseline is not None:
            _check_distinct_baseline(rows, baseline)
    gates = build_strict_gates(analysis, baseline) if strict else analysis.gates
    return CaseResult(
        case=case,
        analysis=analysis,
        gates=gates,
        checks=run_hard_checks(rows, limits, log_scan, online_ratio) if limits.hard_checks else (),
        strict=strict,
        basis=_STRICT_BASIS if strict else "",
        diagnoses=diagnose(replace(analysis, gates=gates), log_scan),
    )


def _read_optional_ratio(path: str | os.PathLike[str] | None) -> OfflineRatio | None:
    return None if path is None else read_offline_ratio(path)


def _check_distinct_baseline(rows: MetricRows, baseline: MetricRows) -> None:
    judged_files = {os.path.realpath(name): name for name in rows.files}
    shared_file = next((name for name in baseline.files if os.path.realpath(name) in judged_files), None)
    if shared_file is None and _list_cells(rows) == _list_cells(baseline):
        shared_file = next(iter(baseline.files), "the baseline")
    if shared_file is not None:
        raise OptionError(
            f"{shared_file}: holds the rows that are judged and is their baseline as well: expected rows of runs "
            f"without "
            "compression (--baseline)"
        )


def _list_cells(rows: MetricRows) -> list[dict[str, str]]:
    return [{name: cell for name, cell in row.cells.items() if name != LOG_FILE_COLUMN} for row in rows.rows]


def _check_no_headers(rows: MetricRows) -> None:
    for row_number, row in enumerate(rows.rows, start=1):
        if row.is_header:
            raise SourceError(
                f"{', '.join(rows.files)[:120]}: row {row_number} is the header of a second table, expected figures"
            )
