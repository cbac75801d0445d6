"""One case of ``llm_bench`` judged: the fork's gates, its hard checks, or the sound ones, and what is behind them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import OptionError, SourceError
from ...text import count
from ...text.folding import folded_lines
from ..logs.columns import LOG_FILE
from .analysis import SELECTED_WARNINGS, Analysis, analyse
from .diagnoses import diagnoses
from .hard_checks import hard_checks
from .limits import Limits
from .log_scan import scan
from .markdown import case_markdown
from .metric_rows import MetricRows
from .offline_ratio import OfflineRatio, read_offline
from .strict import strict_gates
from .verdicts import Gate, Verdict, counted, gate_lines, together

_STRICT = (
    "strict: ratios of every row, the lossless one from the run's own bytes, decode speed against that of the "
    "same work, by the interval of the drop; what is not measured, or unclear, is no pass."
)


@dataclass(frozen=True, kw_only=True)
class Checked:
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
    analysis: Analysis
    gates: tuple[Gate, ...]
    checks: tuple[Gate, ...] = ()
    strict: bool = False
    basis: str = ""
    diagnoses: tuple[str, ...] = ()
    prompts: str = ""

    @property
    def verdict(self) -> Verdict:
        """Of all gates and checks together."""
        return together([*self.gates, *self.checks])

    @property
    def passed(self) -> bool:
        """Whether none failed, and everything that was asked for was measured."""
        return self.verdict == "pass"

    @property
    def warnings(self) -> tuple[str, ...]:
        """The fork's, but for what `strict` does otherwise: it takes the lossless ratio from the run itself."""
        found = self.analysis.warnings
        return tuple(line for line in found if line not in SELECTED_WARNINGS) if self.strict else found

    @property
    def failure(self) -> str:
        """What did not pass, in a line; empty where everything did."""
        wrong = [
            f"{gate.name} {gate.verdict}" for gate in (*self.checks, *self.gates) if gate.verdict not in ("pass", "off")
        ]
        return ", ".join(wrong)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; ``gate`` is the fork's section, its values as text."""
        analysis = self.analysis
        return {
            "case": self.case,
            "verdict": self.verdict,
            "overall_pass": self.passed,
            "failure": self.failure,
            "strict": self.strict,
            "rows": len(analysis.rows.rows),
            "files": list(analysis.rows.files),
            "limits": analysis.limits.to_dict(),
            "gate": dict(analysis.lines),
            "gates": [gate.to_dict() for gate in self.gates],
            "hard_checks": [gate.to_dict() for gate in self.checks],
            "warnings": list(self.warnings),
            "notes": list(analysis.rows.notes),
            "diagnoses": list(self.diagnoses),
            **({"prompts": self.prompts} if self.prompts else {}),
        }

    def to_markdown(self) -> str:
        """The report of the case, `case_markdown`."""
        return case_markdown(self.analysis)

    def __str__(self) -> str:
        return "\n".join(self.lines(min(shutil.get_terminal_size((80, 24)).columns, 100)))

    def lines(self, width: int) -> list[str]:
        """The verdict, the gates, and what is behind them, in `width` columns."""
        rows = self.analysis.rows
        asked = [gate for gate in (*self.gates, *self.checks) if gate.verdict != "off"]
        idle = [gate.name for gate in (*self.gates, *self.checks) if gate.verdict == "off"]
        head = f"{self.verdict.upper()}: {self.case}, {counted(asked)}; {count(len(rows.rows), 'row')}"
        head += f"; prompts: {self.prompts}" if self.prompts else ""
        gates = [gate for gate in self.gates if gate.verdict != "off"]
        lines = [*folded_lines([head], width), "", *gate_lines(gates, width)]
        checks = [gate for gate in self.checks if gate.verdict != "off"]
        if checks:
            lines += ["", "before the gates:", *gate_lines(checks, width)]
        said = [*self.warnings, *self.diagnoses]
        for part in ([f"off: {', '.join(idle)}"] if idle else [], [self.basis] if self.basis else [], said):
            lines += ["", *folded_lines(part, width)] if part else []
        return lines


def check(
    rows: MetricRows,
    limits: Limits,
    *,
    case: str = "runtime",
    online: str | os.PathLike[str] | None = None,
    upper: str | os.PathLike[str] | None = None,
    logs: Sequence[str | os.PathLike[str]] = (),
    baseline: MetricRows | None = None,
    strict: bool = False,
) -> Checked:
    """Judge the rows of a case.

    Parameters
    ----------
    rows, limits
        What was measured, and what it must reach.
    case
        Its name.
    online, upper
        Documents of offline evaluations; the fork takes its lossless ratio from them.
    logs
        Files and folders of logs of the same run, which are searched for damage and encodings.
    baseline
        Rows of the same work without compression; `strict` judges the decode speed by them.
    strict
        Judge by `strict_gates`.

    Raises
    ------
    SourceError
        For documents and logs that cannot be read; with `strict` for rows that are headers.
    OptionError
        With `strict` for a baseline that is the table itself: the same file, or the same rows.
    """
    online_ratio, upper_ratio = _offline(online), _offline(upper)
    found = scan(logs) if logs else None
    analysis = analyse(rows, limits, online=online_ratio, upper=upper_ratio, logs=found)
    if strict:
        _refuse_headers(rows)
        if baseline is not None:
            _refuse_itself(rows, baseline)
    gates = strict_gates(analysis, baseline) if strict else analysis.gates
    return Checked(
        case=case,
        analysis=analysis,
        gates=gates,
        checks=hard_checks(rows, limits, found, online_ratio) if limits.hard_checks else (),
        strict=strict,
        basis=_STRICT if strict else "",
        diagnoses=diagnoses(replace(analysis, gates=gates), found),
    )


def _offline(path: str | os.PathLike[str] | None) -> OfflineRatio | None:
    return None if path is None else read_offline(path)


def _refuse_itself(rows: MetricRows, baseline: MetricRows) -> None:
    mine = {os.path.realpath(name): name for name in rows.files}
    twice = next((name for name in baseline.files if os.path.realpath(name) in mine), None)
    if twice is None and _cells(rows) == _cells(baseline):
        twice = next(iter(baseline.files), "the baseline")
    if twice is not None:
        raise OptionError(
            f"{twice}: holds the rows that are judged and is their baseline as well: expected rows of runs without "
            "compression (--baseline)"
        )


def _cells(rows: MetricRows) -> list[dict[str, str]]:
    return [{name: cell for name, cell in row.cells.items() if name != LOG_FILE} for row in rows.rows]


def _refuse_headers(rows: MetricRows) -> None:
    for place, row in enumerate(rows.rows, start=1):
        if row.is_header:
            raise SourceError(
                f"{', '.join(rows.files)[:120]}: row {place} is the header of a second table, expected figures"
            )
