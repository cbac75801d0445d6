"""Lines of a history: what a round came to, what it ran under, and what had changed since the round before."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files.json_document import loads_strict, read_bounded
from ...files.output import FileOutput
from ..summary.writing import RoundSummary

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
    """The line of a round.

    Parameters
    ----------
    rerun_number
        How often everything was measured anew (``--again``).
    about
        Version, model and machine.
    settings_by_case
        Of each case, those that are not the suite's; under ``""`` those of all cases.
    """
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
                "settings": dict(settings_by_case.get(row["case"], {})),
            }
            for row in round_summary.rows
        ],
    }


def _get_first(row: Mapping[str, Any], *names: str) -> float | None:
    """The first that is there; None where it was not measured."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def append_round(directory: str | os.PathLike[str], entry: HistoryEntry) -> None:
    """Add a line, in the place of an earlier one of the same round.

    It is the same round where model, version, machine, settings and the number of takes are the same: its runs were
    taken up, not measured again. Cases of the earlier line that did not run this time stay in it. Lines that are
    damaged are left as they are.

    Raises
    ------
    OutputError
        Where the file cannot be written.
    """
    path = Path(directory, HISTORY_FILE)
    try:
        lines = [
            line
            for line in read_bounded(path, MAX_HISTORY_FILE_BYTES).decode("utf-8", "replace").split("\n")
            if line.strip()
        ]
    except (FileNotFoundError, NotADirectoryError):
        lines = []
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
    with FileOutput(path, force=True) as output:
        output.file.write(("\n".join([*lines, json.dumps(entry)]) + "\n").encode("utf-8", "replace"))
        output.commit()


def has_finished_rerun(directory: str | os.PathLike[str], rerun_number: int) -> bool:
    """Whether a round of this take came to its end."""
    try:
        text = read_bounded(Path(directory, HISTORY_FILE), MAX_HISTORY_FILE_BYTES).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return any(_parse_entry(line).get("take") == rerun_number for line in text.split("\n"))


def _parse_entry(line: str) -> HistoryEntry:
    """The object in a line; an empty one where it is damaged."""
    try:
        document = loads_strict(line)
    except (ValueError, RecursionError):
        return {}
    cases = document.get("cases") if isinstance(document, dict) else None
    if not isinstance(cases, list) or not all(isinstance(case, dict) and "case" in case for case in cases):
        return {}
    return dict(document)


def is_same_round(stored: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two lines are of one round."""
    if "settings" not in stored or any(stored.get(name) != new[name] for name in ("take", "about", "settings")):
        return False
    stored_settings, new_settings = _group_settings_by_case(stored), _group_settings_by_case(new)
    return all(stored_settings[case] == new_settings[case] for case in stored_settings.keys() & new_settings.keys())


def get_case_settings(entry: Mapping[str, Any], case: Mapping[str, Any]) -> object:
    """What a case ran under, to compare with other rounds; None where the line does not say."""
    return None if "settings" not in entry else [entry["settings"], case.get("settings")]


def describe_changes(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What a round has otherwise than the one before it, in words; nothing where that one does not say."""
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
