"""Lines of a history: what a round came to, what it ran under, and what had changed since the round before."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files.json_document import loads, read_bounded
from ...files.output import FileOutput
from ..summary.writing import Round

HISTORY = "history.jsonl"

MAX_BYTES = 64 << 20
_MOST_CHANGES = 12

Entry = dict[str, Any]


def entry_of(made: Round, take: int, about: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> Entry:
    """The line of a round.

    Parameters
    ----------
    take
        How often everything was measured anew (``--again``).
    about
        Version, model and machine.
    settings
        Of each case, those that are not the suite's; under ``""`` those of all cases.
    """
    return {
        "generated_at": made.generated_at,
        "overall_pass": made.passed,
        "take": take,
        "about": dict(about),
        "settings": dict(settings.get("", {})),
        "cases": [
            {
                "case": row["case"],
                "pass": row["overall_pass"],
                "reason": row["failure_reason"],
                "lossy": _first(row, "lossy_best", "candidate_lossy_ratio_avg"),
                "lossless": _first(row, "lossless_selected_value", "candidate_lossless_ratio_avg"),
                "decode_tps": _first(row, "decode_gate_tps", "candidate_decode_tps_avg"),
                "drop": _first(row, "decode_drop_ratio"),
                "settings": dict(settings.get(row["case"], {})),
            }
            for row in made.rows
        ],
    }


def _first(row: Mapping[str, Any], *names: str) -> float | None:
    """The first that is there; None where it was not measured."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def note_round(directory: str | os.PathLike[str], entry: Entry) -> None:
    """Add a line, in the place of an earlier one of the same round.

    It is the same round where model, version, machine, settings and the number of takes are the same: its runs were
    taken up, not measured again. Cases of the earlier line that did not run this time stay in it. Lines that are
    damaged are left as they are.

    Raises
    ------
    OutputError
        Where the file cannot be written.
    """
    path = Path(directory, HISTORY)
    try:
        lines = [line for line in read_bounded(path, MAX_BYTES).decode("utf-8", "replace").split("\n") if line.strip()]
    except (FileNotFoundError, NotADirectoryError):
        lines = []
    entries = [_entry(line) for line in lines]
    for place in reversed(range(len(lines))):
        if is_same(entries[place], entry):
            there = {case["case"]: case for case in entries[place].get("cases", [])}
            entry = {**entry, "cases": list({**there, **{case["case"]: case for case in entry["cases"]}}.values())}
            entry["overall_pass"] = all(case.get("pass") is True for case in entry["cases"])
            del lines[place], entries[place]
            break
    before = next((one for one in reversed(entries) if one), {})
    entry["changed"] = changes(before, entry)
    with FileOutput(path, force=True) as output:
        output.file.write(("\n".join([*lines, json.dumps(entry)]) + "\n").encode("utf-8", "replace"))
        output.commit()


def has_take(directory: str | os.PathLike[str], take: int) -> bool:
    """Whether a round of this take came to its end."""
    try:
        text = read_bounded(Path(directory, HISTORY), MAX_BYTES).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return any(_entry(line).get("take") == take for line in text.split("\n"))


def _entry(line: str) -> Entry:
    """The object in a line; an empty one where it is damaged."""
    try:
        found = loads(line)
    except (ValueError, RecursionError):
        return {}
    cases = found.get("cases") if isinstance(found, dict) else None
    if not isinstance(cases, list) or not all(isinstance(case, dict) and "case" in case for case in cases):
        return {}
    return dict(found)


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two lines are of one round."""
    if "settings" not in one or any(one.get(name) != other[name] for name in ("take", "about", "settings")):
        return False
    mine, theirs = _by_case(one), _by_case(other)
    return all(mine[case] == theirs[case] for case in mine.keys() & theirs.keys())


def asked(entry: Mapping[str, Any], case: Mapping[str, Any]) -> object:
    """What a case ran under, to compare with other rounds; None where the line does not say."""
    return None if "settings" not in entry else [entry["settings"], case.get("settings")]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What a round has otherwise than the one before it, in words; nothing where that one does not say."""
    if "settings" not in before:
        return []
    found = [
        line for part in ("about", "settings") for line in _differences(_of(before, part), _of(after, part), _SHORT)
    ]
    mine, theirs = _by_case(before), _by_case(after)
    both = [case for case in theirs if case in mine]
    of_cases: dict[str, list[str]] = {}
    for case in both:
        for line in _differences(mine[case], theirs[case], {}):
            of_cases.setdefault(line, []).append(case)
    found += [line if len(names) == len(both) else f"{line} ({', '.join(names)})" for line, names in of_cases.items()]
    more = len(found) - _MOST_CHANGES
    return found if more <= 0 else [*found[:_MOST_CHANGES], f"and {more} more"]


_SHORT = {"model_sha256": 12, "texts_sha256": 12}
"""Letters of a hash that are enough to tell two apart."""


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], short: Mapping[str, int]) -> Sequence[str]:
    names = dict.fromkeys([*one, *other])
    return [
        f"{name} {_shown(one.get(name), short.get(name, 60))} -> {_shown(other.get(name), short.get(name, 60))}"
        for name in names
        if one.get(name) != other.get(name)
    ]


def _shown(value: object, letters: int) -> str:
    if value is None:
        return "default"
    return (value if isinstance(value, str) else json.dumps(value))[:letters]


def _by_case(entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {str(case["case"]): _of(case, "settings") for case in entry.get("cases", [])}


def _of(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = entry.get(name)
    return found if isinstance(found, dict) else {}
