"""Rounds of a folder, one after another: pass rates, reasons, and how figures moved."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from ...errors import SourceError
from ...files.json_document import read_bounded
from ...text import pluralize
from ...text.folding import wrap_lines
from ..logs.demo_records import get_number, parse_json_line
from .past import HISTORY_FILE, MAX_HISTORY_FILE_BYTES, get_case_settings

_MAX_VALUES_SHOWN = 5
"""Newest values of a figure that are shown."""


@dataclass(frozen=True, kw_only=True)
class GateHistory:
    """The rounds of a folder, the oldest first, as its history has them."""

    directory: str
    rounds: tuple[Mapping[str, Any], ...]

    def group_by_case(self) -> dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]]:
        """What each case came to, round by round, each with its round."""
        entries_by_case: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
        for entry in self.rounds:
            for case in entry["cases"]:
                entries_by_case.setdefault(str(case.get("case", "")), []).append((entry, case))
        return entries_by_case

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        cases = {
            name: {
                "rounds": len(entries),
                "passed": sum(case.get("pass") is True for _, case in entries),
                "reasons": dict(
                    Counter(str(case.get("reason")) for _, case in entries if case.get("pass") is not True)
                ),
            }
            for name, entries in self.group_by_case().items()
        }
        return {"directory": self.directory, "rounds": [dict(entry) for entry in self.rounds], "cases": cases}

    def __str__(self) -> str:
        return "\n".join(self.format_lines(min(shutil.get_terminal_size((80, 24)).columns, 100)))

    def format_lines(self, width: int) -> list[str]:
        """The rounds, and how the figures of each case moved, in `width` columns."""
        lines = [
            f"{self.directory}: {pluralize(len(self.rounds), 'round')}",
            "",
            f"{'round':>5}  {'when':<19}  {'passed':>6}",
        ]
        for round_number, entry in enumerate(self.rounds, start=1):
            num_passed = sum(case.get("pass") is True for case in entry["cases"])
            rate = f"{num_passed}/{len(entry['cases'])}"
            lines.append(f"{round_number:>5}  {str(entry.get('generated_at', ''))[:19]:<19}  {rate:>6}")
            changes_text = entry.get("changed")
            if isinstance(changes_text, list) and changes_text:
                lines.append(f"       changed: {'; '.join(map(str, changes_text))}")
        has_settings_change = has_means = False
        for name, entries in self.group_by_case().items():
            num_passed = sum(case.get("pass") is True for _, case in entries)
            lines += ["", f"{name}: {num_passed} of {len(entries)} passed"]
            settings_of_rounds = [get_case_settings(entry, case) for entry, case in entries]
            has_settings_change |= any(
                previous != following for previous, following in pairwise(settings_of_rounds[-_MAX_VALUES_SHOWN:])
            )
            for label, key, digits in (
                ("lossy", "lossy", 3),
                ("lossless", "lossless", 3),
                ("decode tok/s", "decode_tps", 2),
            ):
                values = [get_number(case, key) or None for _, case in entries]  # none of them can be 0
                line, has_mean = _format_trend(values, settings_of_rounds, digits)
                lines.append(f"  {label:<13}{line}")
                has_means |= has_mean
            last_case = entries[-1][1]
            if last_case.get("pass") is not True:
                lines.append(f"  last failure  {str(last_case.get('reason', ''))[:900]}")
        if has_settings_change:
            lines += ["", f"|: under other settings from here on{'; means are over rounds of the same' * has_means}."]
        return wrap_lines(lines, width)


def read_history(directory: str) -> GateHistory:
    """The history of a folder.

    Raises
    ------
    SourceError
        For a folder without one, and for lines that are none.
    """
    path = Path(directory, HISTORY_FILE)
    try:
        text = read_bounded(path, MAX_HISTORY_FILE_BYTES).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{directory}: has no {HISTORY_FILE}: expected a folder of kvmnn gate run") from None
    rounds = []
    for line_number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            entry = parse_json_line(line, f"{path}: line {line_number}")
            cases = entry.get("cases")
            if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
                raise SourceError(f"{path}: line {line_number}: cases: expected a list of objects")
            rounds.append(entry)
    if not rounds:
        raise SourceError(f"{path}: holds no rounds")
    return GateHistory(directory=directory, rounds=tuple(rounds))


def _format_trend(values: list[float | None], settings_of_rounds: list[object], digits: int) -> tuple[str, bool]:
    """The newest values, a bar where settings changed, and how the last one lies to the mean of those before it.

    Also whether there is such a mean. What was not measured is a dash.
    """
    cells: list[str] = []
    for round_index in range(max(0, len(values) - _MAX_VALUES_SHOWN), len(values)):
        if cells and settings_of_rounds[round_index] != settings_of_rounds[round_index - 1]:
            cells.append("|")
        value = values[round_index]
        cells.append("-" if value is None else f"{value:.{digits}f}")
    comparable = list(
        takewhile(
            lambda pair: pair[1] == settings_of_rounds[-1], zip(values[-2::-1], settings_of_rounds[-2::-1], strict=True)
        )
    )
    earlier_values = [value for value, _ in comparable if value is not None]
    last_value = values[-1]
    if not earlier_values or last_value is None:
        return " ".join(cells), False
    mean = sum(earlier_values) / len(earlier_values)
    return f"{' '.join(cells)}  ({last_value / mean - 1:+.1%} to the mean before)", True
