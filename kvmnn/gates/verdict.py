"""Verdicts of single gates, and of all gates combined."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from typing import Literal

from .._util.dataclass import dataclass
from .._util.text import wrap_text
from ..files.schema import Record

Verdict = Literal["pass", "fail", "off", "not measured", "unclear"]

PASS: Verdict = "pass"
FAIL: Verdict = "fail"
OFF: Verdict = "off"
NOT_MEASURED: Verdict = "not measured"
UNCLEAR: Verdict = "unclear"


@dataclass(frozen=True, kw_only=True)
class GateResult(Record):
    """Result of one gate."""

    #: The judged quantity.
    name: str
    #: ``"off"``: there is no limit. ``"not measured"``: there is no measurement. ``"unclear"``: the measurement does
    #: not show on which side of the limit the value is. The last two are not a pass.
    verdict: Verdict
    #: Value and limit as text, with units; empty if there is none. Without a measurement there is no value.
    value: str = ""
    limit: str = ""
    #: Explanation: basis, rows, or missing data; empty if the name is enough.
    why: str = ""


class TerminalResult(Record):
    """Base of results whose text has the width of the terminal."""

    def format_lines(self, width: int) -> list[str]:
        """Return what a reader must know, in `width` columns."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self.format_lines(get_text_width()))


class JudgedResult(TerminalResult):
    """Base of results whose verdict is made of gates."""

    @property
    def all_gates(self) -> tuple[GateResult, ...]:
        """Gates and checks, in the order in which they are reasons of a failure."""
        raise NotImplementedError

    @property
    def verdict(self) -> Verdict:
        """The combined verdict of all gates and checks."""
        return aggregate_verdict(self.all_gates)

    @property
    def has_passed(self) -> bool:
        """Whether no check failed and every requested quantity was measured."""
        return self.verdict == PASS

    @property
    def failure_text(self) -> str:
        """One line with the gates and checks that did not pass; empty if all did."""
        return ", ".join(f"{gate.name} {gate.verdict}" for gate in self.all_gates if gate.verdict not in (PASS, OFF))


def get_text_width() -> int:
    """Return how wide texts are: as the terminal, at most 100 columns."""
    return min(shutil.get_terminal_size((80, 24)).columns, 100)


TOTAL_GATE = "total ratio"


def build_total_gates(target: float, ratio: float | None, why: str) -> Iterator[GateResult]:
    """Build the gate of the least total ratio of the runs, none for a negative target; None was not measured."""
    if target < 0:
        return
    if ratio is None:
        yield GateResult(name=TOTAL_GATE, verdict=NOT_MEASURED, limit=f">= {target:.3f}", why=why)
        return
    value, limit = format_distinct(ratio, target, 3)
    yield GateResult(name=TOTAL_GATE, verdict=verdict_from(ratio >= target), value=value, limit=f">= {limit}", why=why)


def verdict_from(is_passed: bool, *, is_active: bool = True) -> Verdict:
    """Return the verdict of a condition."""
    return (PASS if is_passed else FAIL) if is_active else OFF


def format_distinct(value: float, limit: float, digits: int) -> tuple[str, str]:
    """Format a value and its limit, with more than `digits` decimals if they would look equal."""
    formatted = ("", "")
    for number in range(digits, 16):
        formatted = f"{value:,.{number}f}", f"{limit:,.{number}f}"
        if formatted[0] != formatted[1] or value == limit:
            break
    return formatted


def aggregate_verdict(gates: Iterable[GateResult]) -> Verdict:
    """Combine gates: fail if one failed, else not measured, else unclear if one is so, else pass."""
    return find_worst(gate.verdict for gate in gates)


def find_worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict: fail, not measured, unclear, or else pass."""
    distinct_verdicts = set(verdicts)
    return next((verdict for verdict in (FAIL, NOT_MEASURED, UNCLEAR) if verdict in distinct_verdicts), PASS)


def summarize_verdicts(gates: Iterable[GateResult]) -> str:
    """Summarize as in ``10 pass, 1 fail, 2 off``."""
    verdicts = [gate.verdict for gate in gates]
    counts = {verdict: verdicts.count(verdict) for verdict in (PASS, FAIL, NOT_MEASURED, UNCLEAR, OFF)}
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)


def format_gate_table(gates: Iterable[GateResult], width: int) -> list[str]:
    """Format gates as a table in `width` columns; explanations are wrapped below their row."""
    rows = [(gate.verdict.upper(), gate.name, gate.value, gate.limit, gate.why) for gate in gates]
    widths = [max([len(row[i]) for row in rows], default=0) for i in range(4)]
    lines = []
    for row in rows:
        line = "  ".join(cell.ljust(column_width) for cell, column_width in zip(row, widths, strict=False))
        full_line = f"{line}  {row[4]}".rstrip()
        if len(full_line) <= width:
            lines.append(full_line)
        else:
            lines.append(line.rstrip())
            lines += ["    " + part for part in wrap_text(row[4], max(width - 4, 30)).split("\n")] if row[4] else []
    return lines
