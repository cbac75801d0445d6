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
from ...text import count
from ...text.folding import folded_lines
from ..logs.demo_records import json_line, quantity
from .past import HISTORY, MAX_BYTES, asked

_SHOWN = 5
"""Newest values of a figure that are shown."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The rounds of a folder, the oldest first, as its history has them."""

    directory: str
    rounds: tuple[Mapping[str, Any], ...]

    def by_case(self) -> dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]]:
        """What each case came to, round by round, each with its round."""
        found: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
        for entry in self.rounds:
            for case in entry["cases"]:
                found.setdefault(str(case.get("case", "")), []).append((entry, case))
        return found

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
            for name, entries in self.by_case().items()
        }
        return {"directory": self.directory, "rounds": [dict(entry) for entry in self.rounds], "cases": cases}

    def __str__(self) -> str:
        return "\n".join(self.lines(min(shutil.get_terminal_size((80, 24)).columns, 100)))

    def lines(self, width: int) -> list[str]:
        """The rounds, and how the figures of each case moved, in `width` columns."""
        found = [
            f"{self.directory}: {count(len(self.rounds), 'round')}",
            "",
            f"{'round':>5}  {'when':<19}  {'passed':>6}",
        ]
        for place, entry in enumerate(self.rounds, start=1):
            passed = sum(case.get("pass") is True for case in entry["cases"])
            rate = f"{passed}/{len(entry['cases'])}"
            found.append(f"{place:>5}  {str(entry.get('generated_at', ''))[:19]:<19}  {rate:>6}")
            changed = entry.get("changed")
            if isinstance(changed, list) and changed:
                found.append(f"       changed: {'; '.join(map(str, changed))}")
        barred = means = False
        for name, entries in self.by_case().items():
            passed = sum(case.get("pass") is True for _, case in entries)
            found += ["", f"{name}: {passed} of {len(entries)} passed"]
            known = [asked(entry, case) for entry, case in entries]
            barred |= any(one != other for one, other in pairwise(known[-_SHOWN:]))
            for label, key, digits in (
                ("lossy", "lossy", 3),
                ("lossless", "lossless", 3),
                ("decode tok/s", "decode_tps", 2),
            ):
                values = [quantity(case, key) or None for _, case in entries]  # none of them can be 0
                line, has_mean = _trend(values, known, digits)
                found.append(f"  {label:<13}{line}")
                means |= has_mean
            last = entries[-1][1]
            if last.get("pass") is not True:
                found.append(f"  last failure  {str(last.get('reason', ''))[:900]}")
        if barred:
            found += ["", f"|: under other settings from here on{'; means are over rounds of the same' * means}."]
        return folded_lines(found, width)


def read_history(directory: str) -> History:
    """The history of a folder.

    Raises
    ------
    SourceError
        For a folder without one, and for lines that are none.
    """
    path = Path(directory, HISTORY)
    try:
        text = read_bounded(path, MAX_BYTES).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{directory}: has no {HISTORY}: expected a folder of kvmnn gate run") from None
    rounds = []
    for place, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            entry = json_line(line, f"{path}: line {place}")
            cases = entry.get("cases")
            if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
                raise SourceError(f"{path}: line {place}: cases: expected a list of objects")
            rounds.append(entry)
    if not rounds:
        raise SourceError(f"{path}: holds no rounds")
    return History(directory=directory, rounds=tuple(rounds))


def _trend(values: list[float | None], known: list[object], digits: int) -> tuple[str, bool]:
    """The newest values, a bar where settings changed, and how the last one lies to the mean of those before it.

    Also whether there is such a mean. What was not measured is a dash.
    """
    shown: list[str] = []
    for place in range(max(0, len(values) - _SHOWN), len(values)):
        if shown and known[place] != known[place - 1]:
            shown.append("|")
        value = values[place]
        shown.append("-" if value is None else f"{value:.{digits}f}")
    same = list(takewhile(lambda pair: pair[1] == known[-1], zip(values[-2::-1], known[-2::-1], strict=True)))
    before = [value for value, _ in same if value is not None]
    last = values[-1]
    if not before or last is None:
        return " ".join(shown), False
    mean = sum(before) / len(before)
    return f"{' '.join(shown)}  ({last / mean - 1:+.1%} to the mean before)", True
