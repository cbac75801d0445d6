"""Read and validate the documents of a page, recognised by their contents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from ..._util.dataclass import dataclass
from ...bench.benchmark import BenchReport
from ...errors import MissingFileError, SourceError
from ...evaluation.result import EvaluationResult
from ...files.schema import Record, iter_values, parse_object, read_bounded
from ...gates.suite.results import CaseRuns
from ...gates.summary import NOT_FINISHED_REASON
from ...runtime.replay import ReplayResult
from ..break_even import BreakEvenReport
from . import records

_MAX_FILE_BYTES = 64 << 20
_MAX_FILES = 2000
_MAX_TEXT_CHARS = 20_000
_MAX_NUMBER = 10**18
_HISTORY_NAME = "history.jsonl"
_CASE_FILE_NAMES = ("gate.json", "llm_demo_report.json", "runs.json")
_EXPECTED_TEXT = (
    "expected what kvmnn eval, measure, replay, bench or gate leaves (-o RESULTS.json, --json > RESULTS.json, or a "
    "folder of gate run)"
)


_KINDS_WITH_COMMAND = (
    "settings and machine of gate run", "round of gates", "evaluation", "measurement", "replay", "codecs"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that was read: its name on the page, its kind, size and hash."""

    name: str
    kind: str
    nbytes: int
    sha256: str


@dataclass
class ReportInputs:
    """All documents that were read, each with the name of its file."""

    rounds: list[tuple[str, records.GateRound]] = field(default_factory=list)
    verdicts: dict[str, tuple[str, records.CaseVerdict]] = field(default_factory=dict)
    runs: dict[str, CaseRuns] = field(default_factory=dict)
    run_infos: list[tuple[str, records.RunInfo]] = field(default_factory=list)
    history: list[records.HistoryRound] = field(default_factory=list)
    evaluations: list[tuple[str, EvaluationResult]] = field(default_factory=list)
    measurements: list[tuple[str, records.MeasurementRecord]] = field(default_factory=list)
    replays: list[tuple[str, ReplayResult]] = field(default_factory=list)
    codecs: list[tuple[str, BenchReport]] = field(default_factory=list)
    break_evens: list[tuple[str, BreakEvenReport]] = field(default_factory=list)
    commands: dict[str, list[tuple[str, str]]] = field(
        default_factory=lambda: {kind: [] for kind in _KINDS_WITH_COMMAND}
    )
    unfinished_cases: set[str] = field(default_factory=set)
    sources: list[SourceFile] = field(default_factory=list)
    ignored_files: list[tuple[str, str]] = field(default_factory=list)

    def list_runs_in_order(self) -> list[CaseRuns]:
        """List the runs of cases in the order of the round."""
        order = [row.case for row in self.round.rows] if self.round is not None else list(self.runs)
        return [self.runs[name] for name in order if name in self.runs]

    @property
    def round(self) -> records.GateRound | None:
        """The round that the page reports."""
        return self.rounds[0][1] if self.rounds else None


def read_inputs(paths: Sequence[str | os.PathLike[str]]) -> ReportInputs:
    """Read the results in folders and files.

    Of a folder these are its ``*.json`` and ``history.jsonl``, and the files of each case in a subfolder. A JSON file
    of another program is skipped and named; a damaged one is refused.
    """
    inputs = ReportInputs()
    for path in map(Path, paths):
        if path.is_dir():
            _read_folder(inputs, path)
        else:
            _read_file(inputs, path, path.name, is_named=True)
    _reconcile(inputs)
    if not inputs.sources:
        ignored_text = f" ({len(inputs.ignored_files):,} other JSON files left out)" if inputs.ignored_files else ""
        raise SourceError(f"{os.fspath(paths[0])}: holds no result{ignored_text}: {_EXPECTED_TEXT}")
    return inputs


def _read_folder(inputs: ReportInputs, root: Path) -> None:
    names = sorted(path for path in root.iterdir() if path.suffix.lower() == ".json" or path.name == _HISTORY_NAME)
    cases = sorted(path for path in root.iterdir() if path.is_dir())
    case_files = [case / name for case in cases for name in _CASE_FILE_NAMES if (case / name).is_file()]
    if len(names) + len(case_files) > _MAX_FILES:
        raise SourceError(f"{root}: holds {len(names) + len(case_files):,} JSON files: expected at most {_MAX_FILES:,}")
    for path in (*names, *case_files):
        if path.is_file():
            _read_file(inputs, path, path.relative_to(root).as_posix(), is_named=False)


def _read_file(inputs: ReportInputs, path: Path, name: str, *, is_named: bool) -> None:
    try:
        data = read_bounded(path, _MAX_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{path}: does not exist: {_EXPECTED_TEXT}") from None
    if path.name.endswith(".jsonl"):
        kind = _add_history_file(inputs, data, str(path))
    else:
        document = parse_object(data, str(path))
        _check_values(document, str(path))
        kind = _add_document(inputs, document, str(path), name)
    if kind:
        inputs.sources.append(
            SourceFile(name=name, kind=kind, nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        )
    elif is_named:
        raise SourceError(f"{path}: is no result that a report knows: {_EXPECTED_TEXT}")
    else:
        inputs.ignored_files.append((name, "not a result that a report knows"))


def _add_document(inputs: ReportInputs, document: dict[str, Any], where: str, name: str) -> str:
    """Add a document; return its kind, or nothing if it is unknown."""
    if isinstance(document.get("break_even"), dict):  # of bench, measure and store stat
        report = BreakEvenReport.from_dict(document["break_even"], f"{where}.break_even")
        inputs.break_evens.append((name, report))
    for kind, matches, add in _DOCUMENT_KINDS:
        if matches(document):
            add(inputs, document, where, name)
            if kind in inputs.commands:
                command = records.CommandRecord.from_dict(document, where, complete=kind == "replay").command
                inputs.commands[kind] += [(name, command)] if command or kind != "round of gates" else []
            return kind
    return ""


def _add_round(inputs: ReportInputs, document: dict[str, Any], where: str, name: str) -> None:
    gate_round = records.GateRound.from_dict(document, where)
    if gate_round.total_cases != len(gate_round.rows):
        raise SourceError(
            f"{where}.rows: has {len(gate_round.rows):,} cases, expected total_cases, {gate_round.total_cases:,}"
        )
    inputs.rounds.append((name, gate_round))
    cases = document.get("cases")
    for case_index, case in enumerate(cases if isinstance(cases, list) else ()):
        _add_verdict(inputs, records.CaseVerdict.from_dict(case, f"{where}.cases[{case_index}]"), where, name)


def _add_verdict_document(inputs: ReportInputs, document: dict[str, Any], where: str, name: str) -> None:
    case_verdict = records.CaseVerdict.from_dict(document, where)
    _add_verdict(inputs, case_verdict, where, name, default=Path(where).absolute().parent.name)


def _add_verdict(
    inputs: ReportInputs, case_verdict: records.CaseVerdict, where: str, name: str, default: str = ""
) -> None:
    case = case_verdict.case or default
    lines = [gate.verdict for gate in case_verdict.all_checks]
    worst = next((verdict for verdict in ("fail", "not measured", "unclear") if verdict in lines), "pass")
    if lines and (case_verdict.overall_pass is not (worst == "pass") or (case_verdict.verdict or worst) != worst):
        raise SourceError(
            f"{where}: {case}: says {case_verdict.verdict or case_verdict.overall_pass}, but its gates say {worst}"
        )
    earlier = inputs.verdicts.get(case)
    if earlier is not None and earlier[1] != case_verdict:
        raise SourceError(f"{where}: another verdict on {case} is in {earlier[0]}: expected one")
    if earlier is None or case_verdict.stamp:
        inputs.verdicts[case] = (name, case_verdict)


def _add_runs(inputs: ReportInputs, document: dict[str, Any], where: str, name: str) -> None:
    case_runs = CaseRuns.from_dict(document, where)
    if case_runs.case in inputs.runs and inputs.runs[case_runs.case] != case_runs:
        raise SourceError(f"{where}: other runs of {case_runs.case} were found before: expected those of one round")
    inputs.runs[case_runs.case] = case_runs


def _make_record_adder(attribute: str, record_type: type[Record], *, complete: bool = False) -> Callable[..., None]:
    """Return the function that takes in a document of one record: a pair of its file's name and the record."""

    def add_record(inputs: ReportInputs, document: dict[str, Any], where: str, name: str) -> None:
        getattr(inputs, attribute).append((name, record_type.from_dict(document, where, complete=complete)))

    return add_record


def _add_measurement(inputs: ReportInputs, document: dict[str, Any], where: str, name: str) -> None:
    full_document = document if "evaluation" in document else {"evaluation": document}
    inputs.measurements.append((name, records.MeasurementRecord.from_dict(full_document, where)))


def _add_rounds(inputs: ReportInputs, document: dict[str, Any], where: str, name: str) -> None:
    rounds = [
        records.HistoryRound.from_dict(round_document, f"{where}.rounds[{i}]")
        for i, round_document in enumerate(document["rounds"])
    ]
    _set_history(inputs, rounds, where)


def _add_history_file(inputs: ReportInputs, data: bytes, where: str) -> str:
    rounds = []
    for line_number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            document = parse_object(line, f"{where}: line {line_number}")
            _check_values(document, f"{where}: line {line_number}")
            rounds.append(records.HistoryRound.from_dict(document, f"{where}: line {line_number}"))
    _set_history(inputs, rounds, where)
    return "rounds of gate run"


def _set_history(inputs: ReportInputs, rounds: list[records.HistoryRound], where: str) -> None:
    if inputs.history and rounds != inputs.history:
        raise SourceError(f"{where}: another history was found before: expected one")
    inputs.history = rounds


def _make_key_test(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda document: all(name in document for name in names)


def _is_evaluation(document: dict[str, Any]) -> bool:
    settings = document.get("settings")
    return "rows" in document and isinstance(settings, dict) and "numbers_version" in settings


def _is_measurement(document: dict[str, Any]) -> bool:
    inner = document.get("evaluation", document)
    return isinstance(inner, dict) and "schema_version" in inner and "weighted_lossless_ratio" in inner


def _is_history(document: dict[str, Any]) -> bool:
    return isinstance(document.get("rounds"), list) and isinstance(document.get("cases"), dict)


_DOCUMENT_KINDS: tuple[tuple[str, Callable[[dict[str, Any]], bool], Callable[..., None]], ...] = (
    (
        "settings and machine of gate run",
        _make_key_test("kvmnn_gate_run"),
        _make_record_adder("run_infos", records.RunInfo),
    ),
    ("runs of a case", _make_key_test("kvmnn_gate_runs"), _add_runs),
    ("round of gates", _make_key_test("total_cases", "overall_pass", "rows"), _add_round),
    ("rounds of gate run", _is_history, _add_rounds),
    ("verdict on a case", _make_key_test("overall_pass", "gates"), _add_verdict_document),
    ("verdict on a case", _make_key_test("overall_pass", "bucket_report"), _add_verdict_document),
    ("evaluation", _is_evaluation, _make_record_adder("evaluations", EvaluationResult)),
    ("measurement", _is_measurement, _add_measurement),
    (
        "replay",
        _make_key_test("behaviour", "wrong_calls", "points"),
        _make_record_adder("replays", ReplayResult, complete=True),
    ),
    ("codecs", _make_key_test("machine", "threads", "arrays"), _make_record_adder("codecs", BenchReport)),
    ("break-even", _make_key_test("break_even"), lambda *_: None),
)
"""Kinds of documents, each with a predicate and a function that adds it; the first match is used."""


def _reconcile(inputs: ReportInputs) -> None:
    """Require that all inputs are of one round, and drop cases that are not in it."""
    for name, other_round in inputs.rounds[1:]:
        if other_round != inputs.rounds[0][1]:
            raise SourceError(f"{name}: is another round of gates than {inputs.rounds[0][0]}: expected one")
    if inputs.round is None:
        return
    _drop_files_of_other_rounds(inputs)
    passed_by_case = {row.case: row.overall_pass for row in inputs.round.rows}
    for case, (name, verdict) in list(inputs.verdicts.items()):
        if case not in passed_by_case:
            del inputs.verdicts[case]
            _ignore_file(inputs, name)
        elif verdict.overall_pass is not passed_by_case[case]:
            verdict_text = "pass" if passed_by_case[case] else "fail"
            raise SourceError(f"{name}: does not fit {inputs.rounds[0][0]}, which says {verdict_text} of {case}")
    for case in [case for case in inputs.runs if case not in passed_by_case]:
        del inputs.runs[case]
        _ignore_file(inputs, f"{case}/runs.json")
    if inputs.round.overall_pass is not (bool(passed_by_case) and all(passed_by_case.values())):
        raise SourceError(f"{inputs.rounds[0][0]}: overall_pass is not what its cases say")


def _drop_files_of_other_rounds(inputs: ReportInputs) -> None:
    """Drop files of a case whose stamp differs from the one in ``run.json``."""
    stamps: dict[str, set[object]] = {}
    for _, about in inputs.run_infos:
        for case, entry in about.cases.items():
            if isinstance(entry, Mapping) and "stamp" in entry:
                stamps.setdefault(case, set()).add(entry["stamp"])
    if inputs.round is None or not stamps:
        return
    for case, known_stamps in stamps.items():
        name, verdict = inputs.verdicts.get(case, ("", None))
        if verdict is not None and verdict.stamp in known_stamps and case not in _list_unfinished_cases(inputs.round):
            if case in inputs.runs and inputs.runs[case].stamp not in known_stamps:
                del inputs.runs[case]
                _ignore_file(inputs, f"{case}/runs.json", "of another round than run.json")
            continue
        inputs.unfinished_cases.add(case)
        for source in [name] if name and name not in (round_name for round_name, _ in inputs.rounds) else []:
            _ignore_file(inputs, source, "of another round than run.json")
        if inputs.runs.pop(case, None) is not None:
            _ignore_file(inputs, f"{case}/runs.json", "of another round than run.json")
        inputs.verdicts.pop(case, None)
    _mark_unfinished(inputs)


def _list_unfinished_cases(gate_round: records.GateRound) -> set[str]:
    return {row.case for row in gate_round.rows if row.failure_reason == NOT_FINISHED_REASON}


def _mark_unfinished(inputs: ReportInputs) -> None:
    """Add rows for cases that were not measured, in the order of ``run.json``."""
    name, gate_round = inputs.rounds[0]
    rows = [row for row in gate_round.rows if row.case not in inputs.unfinished_cases]
    rows += [
        records.RoundRow(suite="runtime", case=case, overall_pass=False, failure_reason=NOT_FINISHED_REASON)
        for _, about in inputs.run_infos
        for case in about.cases
        if case in inputs.unfinished_cases and case not in {row.case for row in rows}
    ]
    order = [case for _, about in inputs.run_infos for case in about.cases]
    rows.sort(key=lambda row: order.index(row.case) if row.case in order else len(order))
    is_passed = bool(rows) and all(row.overall_pass for row in rows)
    if inputs.unfinished_cases:
        inputs.rounds[0] = name, replace(gate_round, overall_pass=is_passed, total_cases=len(rows), rows=tuple(rows))


def _ignore_file(inputs: ReportInputs, name: str, reason: str = "a case that the last round does not have") -> None:
    inputs.sources = [source for source in inputs.sources if source.name != name]
    inputs.ignored_files.append((name, reason))


def _check_values(document: object, where: str) -> None:
    """Raise an error for numbers beyond 10^18, and for texts far longer than in any result."""
    for value in iter_values(document):
        if isinstance(value, str) and len(value) > _MAX_TEXT_CHARS:
            raise SourceError(
                f"{where}: holds a text of {len(value):,} characters: expected at most {_MAX_TEXT_CHARS:,}"
            )
        if isinstance(value, int | float) and not abs(value) <= _MAX_NUMBER:
            raise SourceError(f"{where}: holds a number beyond 10^18, which nobody measured")
