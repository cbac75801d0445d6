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
from .rows import MEASURED_BY, demo_row, runtime_row
from .writing import NOT_FINISHED, Round

_TAIL = 240
_SIGNS = (
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
ABOUT = "run.json"
"""Of a folder of ``gate run``: which cases its round has, and of each the stamp that its files must have."""
REPORT, VERDICT = "llm_demo_report.json", "gate.json"
"""Of a case of ``llm_demo``; of what kvmnn judged, strict gates and hard checks included."""


def collect(directory: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> Round:
    """The cases below a folder: ``<case>/summary.md`` with a section *Quality Gate*, ``<case>/llm_demo_report.json``.

    A case of which there is only ``<case>.console.log`` ended before its report; the reason is looked for there. Where
    ``run.json`` says which cases a round of ``gate run`` has, those whose files are not of this round are not measured.

    Parameters
    ----------
    about
        What ``run.json`` says, where it is not written yet.

    Raises
    ------
    SourceError
        For a folder that is not there or holds no case, and for files that cannot be read.
    """
    root = Path(directory)
    if not root.is_dir():
        raise SourceError(f"{directory}: is no folder" if root.exists() else f"{directory}: does not exist")
    known = _cases_of_run(root, about)
    there = stamps_of(root, known)
    found = dict.fromkeys([*known, *_cases(root)])
    rows = [_row(root, case) if there.get(case, True) else _not_finished(case, known[case]) for case in found]
    if not rows:
        raise SourceError(f"{directory}: holds no case: expected CASE/summary.md or CASE/{REPORT}")
    return Round.of(os.fspath(directory), rows)


def stamps_of(root: Path, cases: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the files of each case that has a stamp have it as well."""
    stamps = {name: entry.get("stamp") for name, entry in cases.items() if isinstance(entry, Mapping)}
    return {name: _has_stamp(root / name, stamp) for name, stamp in stamps.items() if stamp is not None}


def _has_stamp(folder: Path, stamp: object) -> bool:
    for name in (VERDICT, REPORT):
        if (folder / name).is_file():
            return read_object(folder / name).get("stamp") == stamp
    return False


def _cases_of_run(root: Path, about: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Cases of the round by name, in its order; none where the folder is not of ``gate run``."""
    if about is None:
        about = read_object(root / ABOUT) if (root / ABOUT).is_file() else {}
    cases = about.get("cases")
    return cases if "kvmnn_gate_run" in about and isinstance(cases, Mapping) else {}


def _not_finished(case: str, about: Mapping[str, Any]) -> dict[str, Any]:
    make = runtime_row if case.split("+")[0] in RUNTIME_CASES else demo_row
    return make(case, str(about.get("mode", "")), {MEASURED_BY: "kvmnn gate run"}, passed=False,
                failure=NOT_FINISHED, return_code=1)  # fmt: skip


def _cases(root: Path) -> list[str]:
    """Names of cases: those of the suite in its order, then others sorted."""
    found = {path.parent.name for name in ("summary.md", REPORT) for path in root.glob(f"*/{name}")}
    found |= {path.name.removesuffix(".console.log") for path in root.glob("*.console.log")}
    suite = [*RUNTIME_CASES, *DEMO_CASES]
    return [name for name in suite if name in found] + sorted(found - set(suite))


def _row(root: Path, case: str) -> dict[str, Any]:
    console = root / f"{case}.console.log"
    console_log = str(console) if console.is_file() else ""
    report = root / case / REPORT
    if report.is_file() or (case in DEMO_CASES and not (root / case / "summary.md").is_file()):
        return _demo(root, case, console_log)
    return _runtime(root, case, console_log)


def _runtime(root: Path, case: str, console_log: str) -> dict[str, Any]:
    summary = root / case / "summary.md"
    text = read_log(summary) if summary.is_file() else ""
    gate = read_gate_section(text)
    passed = gate.get("overall_pass", "").lower() == "true"
    if not text:
        failure = failure_reason(console_log) if console_log else "summary missing"
    elif not gate:
        failure = "quality gate section missing"
    else:
        failure = "" if passed else f"quality gate failed: status={gate.get('quality_status', 'unknown')}"
    judged = root / case / VERDICT
    if text and judged.is_file():
        document = read_object(judged)
        passed, failure = document.get("overall_pass") is True, str(document.get("failure", ""))[:900]
    limits = RUNTIME_CASES.get(case)
    return runtime_row(
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


def _demo(root: Path, case: str, console_log: str) -> dict[str, Any]:
    path = root / case / REPORT
    report = read_object(path) if path.is_file() else {}
    passed = report.get("overall_pass") is True
    if not path.is_file():
        failure = failure_reason(console_log) if console_log else "report json missing"
    else:
        failure = "" if passed else str(report.get("failure") or "llm_demo gate failed")[:900]
    return demo_row(
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


def failure_reason(console_log: str) -> str:
    """The last line of the end of a log that names a failure, else its last line that is not empty."""
    lines = [line.strip() for line in read_log(Path(console_log)).split("\n")]
    tail = [line[:200] for line in lines[-_TAIL:] if line]
    named = [line for line in tail if any(sign in line for sign in _SIGNS)]
    return (named or tail or ["unknown failure"])[-1]
