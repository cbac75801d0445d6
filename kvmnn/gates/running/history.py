"""Rounds of a folder, one after another: pass rates, reasons, and how figures moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import SourceError
from ...files.json_document import read_bounded
from ...text import count
from ..logs.demo_records import json_line, quantity
from .rounds import HISTORY

_MAX_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class History:
    """The rounds of a folder, the oldest first, as its history has them."""

    directory: str
    rounds: tuple[Mapping[str, Any], ...]

    def by_case(self) -> dict[str, list[Mapping[str, Any]]]:
        """What each case came to, round by round."""
        found: dict[str, list[Mapping[str, Any]]] = {}
        for entry in self.rounds:
            for case in entry["cases"]:
                found.setdefault(str(case.get("case", "")), []).append(case)
        return found

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        cases = {
            name: {
                "rounds": len(entries),
                "passed": sum(entry.get("pass") is True for entry in entries),
                "reasons": dict(
                    Counter(str(entry.get("reason")) for entry in entries if entry.get("pass") is not True)
                ),
            }
            for name, entries in self.by_case().items()
        }
        return {"directory": self.directory, "rounds": [dict(entry) for entry in self.rounds], "cases": cases}

    def __str__(self) -> str:
        lines = [
            f"{self.directory}: {count(len(self.rounds), 'round')}",
            "",
            f"{'round':>5}  {'when':<19}  {'passed':>6}",
        ]
        for place, entry in enumerate(self.rounds, start=1):
            passed = sum(case.get("pass") is True for case in entry["cases"])
            rate = f"{passed}/{len(entry['cases'])}"
            lines.append(f"{place:>5}  {str(entry.get('generated_at', ''))[:19]:<19}  {rate:>6}")
        for name, entries in self.by_case().items():
            passed = sum(entry.get("pass") is True for entry in entries)
            lines += ["", f"{name}: {passed} of {len(entries)} passed"]
            for label, key, digits in (
                ("lossy", "lossy", 3),
                ("lossless", "lossless", 3),
                ("decode tok/s", "decode_tps", 2),
            ):
                values = [quantity(entry, key) for entry in entries]
                lines.append(f"  {label:<13}{_trend(values, digits)}")
            last = entries[-1]
            if last.get("pass") is not True:
                lines.append(f"  last failure  {str(last.get('reason', ''))[:200]}")
        return "\n".join(lines)


def read_history(directory: str) -> History:
    """The history of a folder.

    Raises
    ------
    SourceError
        For a folder without one, and for lines that are none.
    """
    path = Path(directory, HISTORY)
    try:
        text = read_bounded(path, _MAX_BYTES).decode("utf-8", "replace")
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


def _trend(values: list[float], digits: int) -> str:
    """The newest values, and how the last one lies to the mean of those before it."""
    shown = " ".join(f"{value:.{digits}f}" for value in values[-5:])
    before = [value for value in values[:-1] if value > 0]
    if not before:
        return shown
    mean = sum(before) / len(before)
    return f"{shown}  ({values[-1] / mean - 1:+.1%} to the mean before)"
