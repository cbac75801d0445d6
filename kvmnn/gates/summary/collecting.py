"""A round out of the folders of its cases, those that the fork's scripts made as well."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import SourceError
from ...files.json_document import read_object
from ..checking.cases import DEMO_CASES, RUNTIME_CASES
from ..checking.markdown import read_gate_section
from ..logs.log_files import read_log
from .rows import MEASURED_BY_KEY, build_demo_row, build_runtime_row
from .writing import NOT_FINISHED_REASON, RoundSummary

_MAX_TAIL_LINES = 240
_FAILURE_MARKS = (
    "FAIL:",
    "error:",
    "Error:",
    "Traceback",
    "No such file",
    "not executable",
    "not found",
    "Segmentation fault",
    "Aborted",
)
RUN_INFO_FILE = "run.json"
"""Of a folder of ``gate run``: which cases its round has, and of each the stamp that its files must have."""
DEMO_REPORT_FILE, GATE_FILE = "llm_demo_report.json", "gate.json"
"""Of a case of ``llm_demo``; of what kvmnn judged, strict gates and hard checks included."""


def collect_cases(directory: str | os.PathLike[str], run_info: Mapping[str, Any] | None = None) -> RoundSummary:
    """The cases below a folder: ``<case>/summary.md`` with a section *Quality Gate*, ``<case>/llm_demo_report.json``.

    A case of which there is only ``<case>.console.log`` ended before its report; the reason is looked for there. Where
    ``run.json`` says which cases a round of ``gate run`` has, those whose files are not of this round are not measured.

    Parameters
    ----------
    run_info
        What ``run.json`` says, where it is not written yet.

    Raises
    ------
    SourceError
        For a folder that is not there or holds no case, and for files that cannot be read.
    """
    root = Path(directory)
    if not root.is_dir():
        raise SourceError(f"{directory}: is no folder" if root.exists() else f"{directory}: does not exist")
    cases_of_run = _read_cases_of_run(root, run_info)
    has_stamp_by_case = match_stamps(root, cases_of_run)
    case_names = dict.fromkeys([*cases_of_run, *_list_cases(root)])
    rows = [
        _build_row(root, case) if has_stamp_by_case.get(case, True) else _build_unfinished_row(case, cases_of_run[case])
        for case in case_names
    ]
    if not rows:
        raise SourceError(f"{directory}: holds no case: expected CASE/summary.md or CASE/{DEMO_REPORT_FILE}")
    return RoundSummary.from_rows(os.fspath(directory), rows)


def match_stamps(root: Path, cases: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the files of each case that has a stamp have it as well."""
    stamps = {name: entry.get("stamp") for name, entry in cases.items() if isinstance(entry, Mapping)}
    return {name: _has_stamp(root / name, stamp) for name, stamp in stamps.items() if stamp is not None}


def _has_stamp(folder: Path, stamp: object) -> bool:
    for name in (GATE_FILE, DEMO_REPORT_FILE):
        if (folder / name).is_file():
            return read_object(folder / name).get("stamp") == stamp
    return False


def _read_cases_of_run(root: Path, run_info: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Cases of the round by name, in its order; none where the folder is not of ``gate run``."""
    if run_info is None:
        run_info = read_object(root / RUN_INFO_FILE) if (root / RUN_INFO_FILE).is_file() else {}
    cases = run_info.get("cases")
    return cases if "kvmnn_gate_run" in run_info and isinstance(cases, Mapping) else {}


def _build_unfinished_row(case: str, case_info: Mapping[str, Any]) -> dict[str, Any]:
    build_row = build_runtime_row if case.split("+")[0] in RUNTIME_CASES else build_demo_row
    return build_row(case, str(case_info.get("mode", "")), {MEASURED_BY_KEY: "kvmnn gate run"}, passed=False,
                failure=NOT_FINISHED_REASON, return_code=1)  # fmt: skip


def _list_cases(root: Path) -> list[str]:
    """Names of cases: those of the suite in its order, then others sorted."""
    names = {path.parent.name for name in ("summary.md", DEMO_REPORT_FILE) for path in root.glob(f"*/{name}")}
    names |= {path.name.removesuffix(".console.log") for path in root.glob("*.console.log")}
    suite_names = [*RUNTIME_CASES, *DEMO_CASES]
    return [name for name in suite_names if name in names] + sorted(names - set(suite_names))


def _build_row(root: Path, case: str) -> dict[str, Any]:
    console_path = root / f"{case}.console.log"
    console_log = str(console_path) if console_path.is_file() else ""
    report = root / case / DEMO_REPORT_FILE
    if report.is_file() or (case in DEMO_CASES and not (root / case / "summary.md").is_file()):
        return _build_demo_row(root, case, console_log)
    return _build_runtime_row(root, case, console_log)


def _build_runtime_row(root: Path, case: str, console_log: str) -> dict[str, Any]:
    summary = root / case / "summary.md"
    text = read_log(summary) if summary.is_file() else ""
    gate = read_gate_section(text)
    passed = gate.get("overall_pass", "").lower() == "true"
    if not text:
        failure = find_failure_reason(console_log) if console_log else "summary missing"
    elif not gate:
        failure = "quality gate section missing"
    else:
        failure = "" if passed else f"quality gate failed: status={gate.get('quality_status', 'unknown')}"
    verdict_path = root / case / GATE_FILE
    if text and verdict_path.is_file():
        document = read_object(verdict_path)
        passed, failure = document.get("overall_pass") is True, str(document.get("failure", ""))[:900]
    limits = RUNTIME_CASES.get(case)
    return build_runtime_row(
        case,
        gate.get("runtime_mode") or (limits.runtime_mode if limits else ""),
        gate,
        passed=passed,
        failure=failure,
        return_code=0 if text else 1,
        summary=str(summary),
        summary_exists=bool(text),
        console_log=console_log,
    )


def _build_demo_row(root: Path, case: str, console_log: str) -> dict[str, Any]:
    path = root / case / DEMO_REPORT_FILE
    report = read_object(path) if path.is_file() else {}
    passed = report.get("overall_pass") is True
    if not path.is_file():
        failure = find_failure_reason(console_log) if console_log else "report json missing"
    else:
        failure = "" if passed else str(report.get("failure") or "llm_demo gate failed")[:900]
    return build_demo_row(
        case,
        DEMO_CASES.get(case, str(report.get("mode", ""))[:40]),
        report,
        passed=passed,
        failure=failure,
        return_code=0 if path.is_file() else 1,
        summary=str(path.with_suffix(".md")),
        report_json=str(path),
        console_log=console_log,
    )


def find_failure_reason(console_log: str) -> str:
    """The last line of the end of a log that names a failure, else its last line that is not empty."""
    lines = [line.strip() for line in read_log(Path(console_log)).split("\n")]
    tail = [line[:200] for line in lines[-_MAX_TAIL_LINES:] if line]
    failure_lines = [line for line in tail if any(sign in line for sign in _FAILURE_MARKS)]
    return (failure_lines or tail or ["unknown failure"])[-1]
