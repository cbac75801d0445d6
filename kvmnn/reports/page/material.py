"""The documents that a page is made of: found in a folder or named, known by what they hold, read strictly."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import SourceError
from ...files.json_document import as_object, read_bounded, values_in
from . import records

NOT_FINISHED = "not measured: the round was not finished"
"""Reason of a case of a round of ``gate run`` that was begun, and whose files are of another round, or not there."""

_MAX_BYTES = 64 << 20
_MAX_FILES = 2000
_MAX_TEXT = 20_000
_MAX_NUMBER = 10**18
_HISTORY = "history.jsonl"
_OF_CASES = ("gate.json", "llm_demo_report.json", "runs.json")
_EXPECTED = (
    "expected what kvmnn eval, measure, replay, bench or gate leaves (-o RESULTS.json, --json > RESULTS.json, or a "
    "folder of gate run)"
)


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that was read: its name on the page, what it holds, its size and hash."""

    name: str
    kind: str
    nbytes: int
    sha256: str


@dataclass
class Material:
    """Everything that was found, each with the name of the file it is from."""

    rounds: list[tuple[str, records.Round]] = field(default_factory=list)
    verdicts: dict[str, tuple[str, records.CaseVerdict]] = field(default_factory=dict)
    runs: dict[str, records.CaseRuns] = field(default_factory=dict)
    about: list[tuple[str, records.About]] = field(default_factory=list)
    history: list[records.PastRound] = field(default_factory=list)
    evaluations: list[tuple[str, records.Evaluation]] = field(default_factory=list)
    measured: list[tuple[str, records.Measured]] = field(default_factory=list)
    replays: list[tuple[str, records.Replayed]] = field(default_factory=list)
    codecs: list[tuple[str, records.Codecs]] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)
    sources: list[SourceFile] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def runs_in_order(self) -> list[records.CaseRuns]:
        """Runs of cases, in the order of the round."""
        order = [row.case for row in self.round.rows] if self.round is not None else list(self.runs)
        return [self.runs[name] for name in order if name in self.runs]

    @property
    def round(self) -> records.Round | None:
        """The round that the page is about."""
        return self.rounds[0][1] if self.rounds else None


def read(paths: Sequence[str | os.PathLike[str]]) -> Material:
    """What folders and files hold.

    Of a folder: its ``*.json`` and ``history.jsonl``, and of each folder in it what a case has. A JSON file that is no
    result of kvmnn is left out, and named; one that is damaged is refused.

    Raises
    ------
    SourceError
        For what is not there, is no JSON, or says it is a result and is none; for two rounds of gates that differ; and
        where nothing was found.
    """
    found = Material()
    for path in map(Path, paths):
        if path.is_dir():
            _folder(found, path)
        else:
            _file(found, path, path.name, named=True)
    _settle(found)
    if not found.sources:
        left = f" ({len(found.left_out):,} other JSON files left out)" if found.left_out else ""
        raise SourceError(f"{os.fspath(paths[0])}: holds no result{left}: {_EXPECTED}")
    return found


def _folder(found: Material, root: Path) -> None:
    names = sorted(path for path in root.iterdir() if path.suffix.lower() == ".json" or path.name == _HISTORY)
    cases = sorted(path for path in root.iterdir() if path.is_dir())
    below = [case / name for case in cases for name in _OF_CASES if (case / name).is_file()]
    if len(names) + len(below) > _MAX_FILES:
        raise SourceError(f"{root}: holds {len(names) + len(below):,} JSON files: expected at most {_MAX_FILES:,}")
    for path in (*names, *below):
        if path.is_file():
            _file(found, path, path.relative_to(root).as_posix(), named=False)


def _file(found: Material, path: Path, name: str, *, named: bool) -> None:
    try:
        data = read_bounded(path, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{path}: does not exist: {_EXPECTED}") from None
    if path.name.endswith(".jsonl"):
        kind = _history(found, data, str(path))
    else:
        document = as_object(data, str(path))
        _check(document, str(path))
        kind = _document(found, document, str(path), name)
    if kind:
        found.sources.append(
            SourceFile(name=name, kind=kind, nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        )
    elif named:
        raise SourceError(f"{path}: is no result that a report knows: {_EXPECTED}")
    else:
        found.left_out.append((name, "not a result that a report knows"))


def _document(found: Material, document: dict[str, Any], where: str, name: str) -> str:
    """Take a document in; returns what it is, or nothing where it is none of those known."""
    for kind, is_one, take in _KINDS:
        if is_one(document):
            take(found, document, where, name)
            return kind
    return ""


def _round(found: Material, document: dict[str, Any], where: str, name: str) -> None:
    made = records.Round.from_dict(document, where)
    if made.total_cases != len(made.rows):
        raise SourceError(f"{where}.rows: has {len(made.rows):,} cases, expected total_cases, {made.total_cases:,}")
    found.rounds.append((name, made))
    cases = document.get("cases")
    for place, case in enumerate(cases if isinstance(cases, list) else ()):
        _take_verdict(found, records.CaseVerdict.from_dict(case, f"{where}.cases[{place}]"), where, name)


def _verdict(found: Material, document: dict[str, Any], where: str, name: str) -> None:
    made = records.CaseVerdict.from_dict(document, where)
    _take_verdict(found, made, where, name, default=Path(where).absolute().parent.name)


def _take_verdict(found: Material, made: records.CaseVerdict, where: str, name: str, default: str = "") -> None:
    case = made.case or default
    lines = [gate.verdict for gate in made.lines]
    worst = next((verdict for verdict in ("fail", "not measured", "unclear") if verdict in lines), "pass")
    if lines and (made.overall_pass is not (worst == "pass") or (made.verdict or worst) != worst):
        raise SourceError(f"{where}: {case}: says {made.verdict or made.overall_pass}, but its gates say {worst}")
    there = found.verdicts.get(case)
    if there is not None and there[1] != made:
        raise SourceError(f"{where}: another verdict on {case} is in {there[0]}: expected one")
    if there is None or made.stamp:
        found.verdicts[case] = (name, made)


def _runs(found: Material, document: dict[str, Any], where: str, name: str) -> None:
    made = records.CaseRuns.from_dict(document, where)
    if made.case in found.runs and found.runs[made.case] != made:
        raise SourceError(f"{where}: other runs of {made.case} were found before: expected those of one round")
    found.runs[made.case] = made


def _about(found: Material, document: dict[str, Any], where: str, name: str) -> None:
    found.about.append((name, records.About.from_dict(document, where)))


def _evaluation(found: Material, document: dict[str, Any], where: str, name: str) -> None:
    found.evaluations.append((name, records.Evaluation.from_dict(document, where)))


def _measured(found: Material, document: dict[str, Any], where: str, name: str) -> None:
    whole = document if "evaluation" in document else {"evaluation": document}
    found.measured.append((name, records.Measured.from_dict(whole, where)))


def _replay(found: Material, document: dict[str, Any], where: str, name: str) -> None:
    found.replays.append((name, records.Replayed.from_dict(document, where)))


def _codecs(found: Material, document: dict[str, Any], where: str, name: str) -> None:
    found.codecs.append((name, records.Codecs.from_dict(document, where)))


def _rounds(found: Material, document: dict[str, Any], where: str, name: str) -> None:
    rounds = [records.PastRound.from_dict(one, f"{where}.rounds[{i}]") for i, one in enumerate(document["rounds"])]
    _take_history(found, rounds, where)


def _history(found: Material, data: bytes, where: str) -> str:
    rounds = []
    for place, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            document = as_object(line, f"{where}: line {place}")
            _check(document, f"{where}: line {place}")
            rounds.append(records.PastRound.from_dict(document, f"{where}: line {place}"))
    _take_history(found, rounds, where)
    return "rounds of gate run"


def _take_history(found: Material, rounds: list[records.PastRound], where: str) -> None:
    if found.history and rounds != found.history:
        raise SourceError(f"{where}: another history was found before: expected one")
    found.history = rounds


def _has(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda document: all(name in document for name in names)


def _is_evaluation(document: dict[str, Any]) -> bool:
    settings = document.get("settings")
    return "rows" in document and isinstance(settings, dict) and "numbers_version" in settings


def _is_offline(document: dict[str, Any]) -> bool:
    inner = document.get("evaluation", document)
    return isinstance(inner, dict) and "schema_version" in inner and "weighted_lossless_ratio" in inner


def _is_history(document: dict[str, Any]) -> bool:
    return isinstance(document.get("rounds"), list) and isinstance(document.get("cases"), dict)


_KINDS: tuple[tuple[str, Callable[[dict[str, Any]], bool], Callable[..., None]], ...] = (
    ("settings and machine of gate run", _has("kvmnn_gate_run"), _about),
    ("runs of a case", _has("kvmnn_gate_runs"), _runs),
    ("round of gates", _has("total_cases", "overall_pass", "rows"), _round),
    ("rounds of gate run", _is_history, _rounds),
    ("verdict on a case", _has("overall_pass", "gates"), _verdict),
    ("verdict on a case", _has("overall_pass", "bucket_report"), _verdict),
    ("evaluation", _is_evaluation, _evaluation),
    ("measurement", _is_offline, _measured),
    ("replay", _has("behaviour", "wrong_calls", "points"), _replay),
    ("codecs", _has("machine", "threads", "arrays"), _codecs),
)
"""What documents are called, how they are known, and what takes them in; the first that fits."""


def _settle(found: Material) -> None:
    """One round, and of cases only those that are in it."""
    for name, other in found.rounds[1:]:
        if other != found.rounds[0][1]:
            raise SourceError(f"{name}: is another round of gates than {found.rounds[0][0]}: expected one")
    if found.round is None:
        return
    _drop_other_rounds(found)
    passed = {row.case: row.overall_pass for row in found.round.rows}
    for case, (name, verdict) in list(found.verdicts.items()):
        if case not in passed:
            del found.verdicts[case]
            _leave_out(found, name)
        elif verdict.overall_pass is not passed[case]:
            said = "pass" if passed[case] else "fail"
            raise SourceError(f"{name}: does not fit {found.rounds[0][0]}, which says {said} of {case}")
    for case in [case for case in found.runs if case not in passed]:
        del found.runs[case]
        _leave_out(found, f"{case}/runs.json")
    if found.round.overall_pass is not (bool(passed) and all(passed.values())):
        raise SourceError(f"{found.rounds[0][0]}: overall_pass is not what its cases say")


def _drop_other_rounds(found: Material) -> None:
    """Of the cases that ``run.json`` has a stamp of, only files with this stamp are of its round."""
    stamps: dict[str, set[object]] = {}
    for _, about in found.about:
        for case, entry in about.cases.items():
            if isinstance(entry, Mapping) and "stamp" in entry:
                stamps.setdefault(case, set()).add(entry["stamp"])
    if found.round is None or not stamps:
        return
    for case, known in stamps.items():
        name, verdict = found.verdicts.get(case, ("", None))
        if verdict is not None and verdict.stamp in known and case not in _said_unfinished(found.round):
            if case in found.runs and found.runs[case].stamp not in known:
                del found.runs[case]
                _leave_out(found, f"{case}/runs.json", "of another round than run.json")
            continue
        found.unfinished.add(case)
        for source in [name] if name and name not in (place for place, _ in found.rounds) else []:
            _leave_out(found, source, "of another round than run.json")
        if found.runs.pop(case, None) is not None:
            _leave_out(found, f"{case}/runs.json", "of another round than run.json")
        found.verdicts.pop(case, None)
    _not_passed(found)


def _said_unfinished(made: records.Round) -> set[str]:
    return {row.case for row in made.rows if row.failure_reason == NOT_FINISHED}


def _not_passed(found: Material) -> None:
    """Rows of what is not measured, in the order of ``run.json``."""
    name, made = found.rounds[0]
    rows = [row for row in made.rows if row.case not in found.unfinished]
    rows += [
        records.RoundRow(suite="runtime", case=case, overall_pass=False, failure_reason=NOT_FINISHED)
        for _, about in found.about
        for case in about.cases
        if case in found.unfinished and case not in {row.case for row in rows}
    ]
    order = [case for _, about in found.about for case in about.cases]
    rows.sort(key=lambda row: order.index(row.case) if row.case in order else len(order))
    passed = bool(rows) and all(row.overall_pass for row in rows)
    if found.unfinished:
        found.rounds[0] = name, replace(made, overall_pass=passed, total_cases=len(rows), rows=tuple(rows))


def _leave_out(found: Material, name: str, why: str = "a case that the last round does not have") -> None:
    found.sources = [source for source in found.sources if source.name != name]
    found.left_out.append((name, why))


def _check(document: object, where: str) -> None:
    """Refuse numbers that are none, and texts far beyond any result."""
    for value in values_in(document):
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            raise SourceError(f"{where}: holds a text of {len(value):,} characters: expected at most {_MAX_TEXT:,}")
        if isinstance(value, int | float) and not abs(value) <= _MAX_NUMBER:
            raise SourceError(f"{where}: holds a number beyond 10^18, which nobody measured")
