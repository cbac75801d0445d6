"""History of rounds: pass rates, reasons and figures of each, and changes since the previous one."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from ..._util.dataclass import dataclass
from ..._util.text import pluralize, wrap_lines
from ...errors import SourceError
from ...files.atomic import FileOutput
from ...files.schema import json_key, loads_strict, read_bounded
from ..latency_limits import LATENCY_LIMITS
from ..logs import get_number, parse_json_line
from ..summary import TOTAL_LINE, RoundSummary
from ..verdict import TerminalResult

HISTORY_FILE = "history.jsonl"

MAX_HISTORY_FILE_BYTES = 64 << 20
_MAX_CHANGES = 12

HistoryEntry = dict[str, Any]


def build_history_entry(
    round_summary: RoundSummary,
    rerun_number: int,
    about: Mapping[str, Any],
    settings_by_case: Mapping[str, Mapping[str, Any]],
) -> HistoryEntry:
    """Build the history line of a round."""
    return {
        "generated_at": round_summary.generated_at,
        "overall_pass": round_summary.has_passed,
        "take": rerun_number,
        "about": dict(about),
        "settings": dict(settings_by_case.get("", {})),
        "cases": [
            {
                "case": row["case"],
                "pass": row["overall_pass"],
                "reason": row["failure_reason"],
                "lossy": _get_first(row, "lossy_best", "candidate_lossy_ratio_avg"),
                "lossless": _get_first(row, "lossless_selected_value", "candidate_lossless_ratio_avg"),
                "decode_tps": _get_first(row, "decode_gate_tps", "candidate_decode_tps_avg"),
                "drop": _get_first(row, "decode_drop_ratio"),
                **({"total": row[TOTAL_LINE]} if TOTAL_LINE in row else {}),
                **{entry.line: row[entry.line] for entry in LATENCY_LIMITS if entry.line in row},
                "settings": dict(settings_by_case.get(row["case"], {})),
            }
            for row in round_summary.rows
        ],
    }


def _get_first(row: Mapping[str, Any], *names: str) -> float | None:
    """Return the first value that is present; None if none was measured."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def append_round(directory: str | os.PathLike[str], entry: HistoryEntry) -> None:
    """Append a line, or replace the earlier one of the same round.

    A round is the same if model, version, machine, settings and rerun number are equal: its runs were reused, not
    measured again. Cases of the earlier line that did not run this time stay in it. Damaged lines are left unchanged.
    """
    lines = _read_lines(directory)
    entries = [_parse_entry(line) for line in lines]
    for line_index in reversed(range(len(lines))):
        if is_same_round(entries[line_index], entry):
            case_by_name = {case["case"]: case for case in entries[line_index].get("cases", [])}
            entry = {
                **entry,
                "cases": list({**case_by_name, **{case["case"]: case for case in entry["cases"]}}.values()),
            }
            entry["overall_pass"] = all(case.get("pass") is True for case in entry["cases"])
            del lines[line_index], entries[line_index]
            break
    previous_entry = next((candidate for candidate in reversed(entries) if candidate), {})
    entry["changed"] = describe_changes(previous_entry, entry)
    with FileOutput(Path(directory, HISTORY_FILE), force=True) as output:
        output.file.write(("\n".join([*lines, json.dumps(entry)]) + "\n").encode("utf-8", "replace"))
        output.commit()


def has_finished_rerun(directory: str | os.PathLike[str], rerun_number: int) -> bool:
    """Return whether a round with this rerun number was finished."""
    return any(_parse_entry(line).get("take") == rerun_number for line in _read_lines(directory))


def _read_lines(directory: str | os.PathLike[str]) -> list[str]:
    """Read the lines of a history; none if there is no such file."""
    try:
        text = read_bounded(Path(directory, HISTORY_FILE), MAX_HISTORY_FILE_BYTES).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [line for line in text.split("\n") if line.strip()]


def _parse_entry(line: str) -> HistoryEntry:
    """Parse a line as an entry; return an empty one if it is damaged."""
    try:
        document = loads_strict(line)
    except (ValueError, RecursionError):
        return {}
    cases = document.get("cases") if isinstance(document, dict) else None
    if not isinstance(cases, list) or not all(isinstance(case, dict) and "case" in case for case in cases):
        return {}
    return dict(document)


def is_same_round(stored: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether two lines belong to one round."""
    if "settings" not in stored or any(stored.get(name) != new[name] for name in ("take", "about", "settings")):
        return False
    stored_settings, new_settings = _group_settings_by_case(stored), _group_settings_by_case(new)
    return all(stored_settings[case] == new_settings[case] for case in stored_settings.keys() & new_settings.keys())


def get_case_settings(entry: Mapping[str, Any], case: Mapping[str, Any]) -> object:
    """Return the settings that a case ran with, for comparison with other rounds; None if the line lacks them."""
    return None if "settings" not in entry else [entry["settings"], case.get("settings")]


def describe_changes(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Describe what changed between two rounds; empty if the first lacks its settings."""
    if "settings" not in previous:
        return []
    lines = [
        line
        for part in ("about", "settings")
        for line in _describe_differences(_get_object(previous, part), _get_object(current, part), _MAX_HASH_LETTERS)
    ]
    previous_settings, current_settings = _group_settings_by_case(previous), _group_settings_by_case(current)
    common_cases = [case for case in current_settings if case in previous_settings]
    cases_by_line: dict[str, list[str]] = {}
    for case in common_cases:
        for line in _describe_differences(previous_settings[case], current_settings[case], {}):
            cases_by_line.setdefault(line, []).append(case)
    lines += [
        line if len(names) == len(common_cases) else f"{line} ({', '.join(names)})"
        for line, names in cases_by_line.items()
    ]
    num_more = len(lines) - _MAX_CHANGES
    return lines if num_more <= 0 else [*lines[:_MAX_CHANGES], f"and {num_more} more"]


_MAX_HASH_LETTERS = {"model_sha256": 12, "texts_sha256": 12}
"""Letters of a hash that are enough to tell two apart."""


def _describe_differences(
    previous: Mapping[str, Any], current: Mapping[str, Any], max_letters: Mapping[str, int]
) -> Sequence[str]:
    names = dict.fromkeys([*previous, *current])
    return [
        f"{name} {_format_setting(previous.get(name), max_letters.get(name, 60))} -> "
        f"{_format_setting(current.get(name), max_letters.get(name, 60))}"
        for name in names
        if previous.get(name) != current.get(name)
    ]


def _format_setting(value: object, letters: int) -> str:
    if value is None:
        return "default"
    return (value if isinstance(value, str) else json.dumps(value))[:letters]


def _group_settings_by_case(entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {str(case["case"]): _get_object(case, "settings") for case in entry.get("cases", [])}


def _get_object(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = entry.get(name)
    return value if isinstance(value, dict) else {}


_SHOWN_WITHOUT_VALUES = ("lossy", "lossless", "decode_tps")

_MAX_VALUES_SHOWN = 5
"""Newest values of a figure that are shown."""


@dataclass(frozen=True, kw_only=True)
class GateHistory(TerminalResult):
    """The rounds in a folder's history, oldest first."""

    directory: str
    rounds: tuple[Mapping[str, Any], ...]

    def group_by_case(self) -> dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]]:
        """Group the results of each case, each with its round."""
        entries_by_case: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
        for entry in self.rounds:
            for case in entry["cases"]:
                entries_by_case.setdefault(str(case.get("case", "")), []).append((entry, case))
        return entries_by_case

    @property
    @json_key()
    def cases(self) -> dict[str, Any]:
        """How often each case was measured and passed, and why it did not pass."""
        return {
            name: {
                "rounds": len(entries),
                "passed": sum(case.get("pass") is True for _, case in entries),
                "reasons": dict(
                    Counter(str(case.get("reason")) for _, case in entries if case.get("pass") is not True)
                ),
            }
            for name, entries in self.group_by_case().items()
        }

    def format_lines(self, width: int) -> list[str]:
        """Format the rounds, and the trend of each case's figures, in `width` columns."""
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
                ("total", "total", 3),
                ("decode tok/s", "decode_tps", 2),
                ("restore p95", "runtime_decomp_p95_us", 0),
            ):
                values = [get_number(case, key) or None for _, case in entries]  # none of them can be 0
                if key not in _SHOWN_WITHOUT_VALUES and not any(values):
                    continue
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
    """Read the history of a folder."""
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
    """Format the newest values, with a bar where settings changed, and the last one relative to the mean of the others.

    Also return whether there is such a mean. A value that was not measured is a dash.
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
