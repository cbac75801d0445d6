"""A round of cases as ``summary.json``, ``summary.md`` and ``cases.jsonl``, and the reader of these folders."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from .._util.dataclass import dataclass
from .._util.text import escape_markdown, pluralize, wrap_lines
from ..errors import REPLACE_HINT, MissingFileError, OptionError, OutputError, SourceError
from ..files.atomic import DirectoryOutput, FileOutput, wrap_os_errors
from ..files.schema import read_object
from .analysis import read_gate_section
from .checker import CaseResult
from .demo import DemoResult
from .latency_limits import LATENCY_LIMITS
from .limits import DEMO_CASES, RUNTIME_CASES
from .logs import parse_first_number, read_log
from .verdict import TerminalResult

MEASURED_BY_KEY = "measured_by"
"""A line that only sections of runs on a model have: what they lack was not measured, in those of the fork it is 0."""

PROMPTS_KEY = "prompts"
"""Key of the source of the prompts of a run on a model."""

TOTAL_LINE = "total_best"
"""Line, and key of rows, of runs that a total ratio is asked of: bytes of all tokens over those held at the end."""

RUNTIME_ROW_KEYS = (
    "lossy_best",
    "lossless_selected_value",
    "decode_gate_tps",
    "decode_best",
    "decode_baseline",
    "decode_drop_ratio",
    "decode_drop_target",
    "runtime_decomp_best_us",
    "runtime_async_wait_best_us",
    "runtime_async_wait_headroom_us",
    "runtime_async_wait_headroom_ratio",
    "runtime_queue_peak_best",
    "runtime_fallback_best",
    "runtime_backpressure_skip_best",
    "runtime_decode_cache_hit_best",
    "runtime_decode_cache_miss_best",
    "kv_invalid_log_count",
)
DEMO_ROW_KEYS = (
    "baseline_decode_tps_avg",
    "candidate_decode_tps_avg",
    "decode_drop_ratio",
    "decode_drop_target",
    "candidate_lossy_ratio_avg",
    "candidate_lossless_ratio_avg",
    "candidate_runtime_total_ratio_avg",
    "runtime_decomp_best_us",
    "decode_cache_hit_best",
)


def build_runtime_row(
    case: str,
    mode: str,
    gate: Mapping[str, str],
    *,
    passed: bool,
    failure: str,
    return_code: int = 0,
    summary: str = "",
    summary_exists: bool = True,
    console_log: str = "",
) -> dict[str, Any]:
    """Build the row of an ``llm_bench`` case from the lines of its section *Quality Gate*.

    What that of a run on a model leaves out is None.
    """
    is_own_run = MEASURED_BY_KEY in gate
    figures = {
        name: None if is_own_run and name not in gate else parse_first_number(gate.get(name, 0.0))
        for name in RUNTIME_ROW_KEYS
    }
    if "decode_gate_tps" not in gate:
        figures["decode_gate_tps"] = figures["decode_best"]
    flags = {
        name: None if is_own_run and name not in gate else gate.get(name, "").lower() == "true"
        for name in ("runtime_async_wait_headroom_warn", "kv_content_consistency_pass")
    }
    return {
        "suite": "runtime",
        "case": case,
        "mode": mode,
        "return_code": return_code,
        "summary_exists": summary_exists,
        "quality_gate_found": bool(gate),
        "failure_reason": failure,
        "overall_pass": passed,
        "summary": summary,
        "console_log": console_log,
        "quality_status": gate.get("quality_status", ""),
        "lossy_best": figures["lossy_best"],
        "lossless_selected_value": figures["lossless_selected_value"],
        "decode_aggregation": gate.get("decode_aggregation", "best"),
        **{name: figures[name] for name in RUNTIME_ROW_KEYS[2:11]},
        "runtime_async_wait_headroom_warn": flags["runtime_async_wait_headroom_warn"],
        **{name: figures[name] for name in RUNTIME_ROW_KEYS[11:16]},
        "kv_content_consistency_pass": flags["kv_content_consistency_pass"],
        "kv_invalid_log_count": figures["kv_invalid_log_count"],
        **({PROMPTS_KEY: gate[PROMPTS_KEY]} if PROMPTS_KEY in gate else {}),
        **({TOTAL_LINE: parse_first_number(gate[TOTAL_LINE])} if TOTAL_LINE in gate else {}),
        **_select_latencies(gate),
    }


def build_demo_row(
    case: str,
    mode: str,
    report: Mapping[str, Any],
    *,
    passed: bool,
    failure: str,
    return_code: int = 0,
    summary: str = "",
    report_json: str = "",
    console_log: str = "",
) -> dict[str, Any]:
    """Build the row of an ``llm_demo`` case from its report; figures that a run on a model lacks are None."""
    is_own_run = MEASURED_BY_KEY in report
    missing_value = None if is_own_run else 0.0
    return {
        "suite": "llm_demo",
        "case": case,
        "mode": mode,
        "return_code": return_code,
        "failure_reason": failure,
        "overall_pass": passed,
        "summary": summary,
        "report_json": report_json,
        "console_log": console_log,
        **{
            name: None if report.get(name, missing_value) is None else parse_first_number(report.get(name))
            for name in DEMO_ROW_KEYS
        },
        "decode_pass": None if is_own_run and "decode_pass" not in report else bool(report.get("decode_pass", False)),
        "run_order": str(report.get("run_order", ""))[:80],
        **_select_latencies(report),
    }


def _select_latencies(lines: Mapping[str, Any]) -> dict[str, float]:
    """Select the percentiles of latencies, which only runs on a model have."""
    return {entry.line: parse_first_number(lines[entry.line]) for entry in LATENCY_LIMITS if entry.line in lines}


_NOT_MEASURED_TEXT = "-"
"""Text for a figure that a run on a model has not measured."""

NOT_FINISHED_REASON = "not measured: the round was not finished"
"""Reason of a case of a round that was begun, whose files are still those of another round, or not there."""


@dataclass(frozen=True, kw_only=True)
class RoundSummary(TerminalResult):
    """Cases that were judged in one round."""

    json_keys = "generated_at overall_pass=has_passed total_cases runtime_cases llm_demo_cases rows"

    #: Directory of the files.
    directory: str
    #: `build_runtime_row` and `build_demo_row`, in order.
    rows: tuple[Mapping[str, Any], ...]
    #: Local time, to the second.
    generated_at: str

    @classmethod
    def from_rows(cls, directory: str, rows: Sequence[Mapping[str, Any]]) -> RoundSummary:
        """Create a summary with the current time."""
        return cls(directory=directory, rows=tuple(rows), generated_at=datetime.now().isoformat(timespec="seconds"))

    @property
    def has_passed(self) -> bool:
        """Return whether there are cases, and all passed."""
        return bool(self.rows) and all(row.get("overall_pass") is True for row in self.rows)

    @property
    def num_unfinished(self) -> int:
        """Number of cases of the round that have not been measured."""
        return sum(row.get("failure_reason") == NOT_FINISHED_REASON for row in self.rows)

    def select_suite(self, suite: str) -> list[Mapping[str, Any]]:
        """Return the cases of ``"runtime"`` or ``"llm_demo"``."""
        return [row for row in self.rows if row.get("suite") == suite]

    @property
    def total_cases(self) -> int:
        """Number of cases of both suites."""
        return len(self.rows)

    @property
    def runtime_cases(self) -> int:
        """Number of cases of ``"runtime"``."""
        return len(self.select_suite("runtime"))

    @property
    def llm_demo_cases(self) -> int:
        """Number of cases of ``"llm_demo"``."""
        return len(self.select_suite("llm_demo"))

    def render_files(self) -> dict[str, str]:
        """Render the three files; return their texts by name."""
        return {
            "summary.json": json.dumps(self.to_dict(), indent=2),
            "summary.md": self.to_markdown(),
            "cases.jsonl": "".join(json.dumps(dict(row)) + "\n" for row in self.rows),
        }

    def to_markdown(self) -> str:
        """Render ``summary.md``."""
        runtime, demo = self.select_suite("runtime"), self.select_suite("llm_demo")
        lines = [
            "# H2O final Summary",
            "",
            f"- overall_pass: {_format_flag(self.has_passed)}",
            f"- total_cases: {len(self.rows)}",
            f"- runtime_cases: {len(runtime)}",
            f"- llm_demo_cases: {len(demo)}",
            "",
        ]
        for heading, rows, format_line in (
            ("Runtime", runtime, _format_runtime_row),
            ("llm_demo", demo, _format_demo_row),
        ):
            if rows:
                lines += [f"## {heading}", ""]
                numbered_lines = (f"{line_number}. {format_line(row)}" for line_number, row in enumerate(rows, start=1))
                lines += [escape_markdown(text.replace("\n", " ")) for text in numbered_lines]
                lines.append("")
        lines += [f"- {name.replace('.', '_')}: `{self.directory}/{name}`" for name in ("summary.json", "cases.jsonl")]
        return "\n".join(lines) + "\n"

    def format_lines(self, width: int) -> list[str]:
        """Format the cases and why they do not pass, in `width` columns."""
        num_passed = sum(row.get("overall_pass") is True for row in self.rows)
        lines = [f"{'PASS' if self.has_passed else 'FAIL'}: {num_passed} of {pluralize(len(self.rows), 'case')} passed"]
        if self.num_unfinished:
            num_measured = len(self.rows) - self.num_unfinished
            lines = [
                f"NOT FINISHED: {num_measured} of {pluralize(len(self.rows), 'case')} measured, {num_passed} passed"
            ]
        case_width = max([len(str(row.get("case", ""))) for row in self.rows], default=0)
        for row in self.rows:
            reason = str(row.get("failure_reason", ""))
            status = "pass" if row.get("overall_pass") is True else "-" if reason == NOT_FINISHED_REASON else "fail"
            lines.append(f"  {status:<4}  {row.get('case', '')!s:<{case_width}}  {reason}".rstrip())
        return wrap_lines(lines, width)


def _format_runtime_row(row: Mapping[str, Any]) -> str:
    gate_speed, baseline_speed = _format_number(row["decode_gate_tps"]), _format_number(row["decode_baseline"])
    speeds_text = f"{gate_speed}/{baseline_speed}({row['decode_aggregation']})"
    drop_text = f"{_format_number(row['decode_drop_ratio'], 6)}/{_format_number(row['decode_drop_target'], 6)}"
    is_consistent = row["kv_content_consistency_pass"]
    figures = {
        "lossy": row["lossy_best"],
        "lossless": row["lossless_selected_value"],
        "decomp_us": row["runtime_decomp_best_us"],
        "async_wait_us": row["runtime_async_wait_best_us"],
        "async_wait_headroom": row["runtime_async_wait_headroom_ratio"],
        "queue": row["runtime_queue_peak_best"],
        "fallback": row["runtime_fallback_best"],
        "cache_hit": row["runtime_decode_cache_hit_best"],
        "cache_miss": row["runtime_decode_cache_miss_best"],
    }
    return (
        f"case={row['case']}, mode={row['mode']}, pass={_format_flag(row['overall_pass'])}, rc={row['return_code']}, "
        f"decode={speeds_text}, drop={drop_text}, "
        f"{', '.join(f'{name}={_format_number(value)}' for name, value in figures.items())}, "
        f"kv_consistency={_NOT_MEASURED_TEXT if is_consistent is None else _format_flag(is_consistent)}, "
        f"kv_invalid_logs={_format_number(row['kv_invalid_log_count'], 0)}, "
        f"summary=`{row['summary']}`{_format_reason(row)}"
    )


def _format_number(value: float | None, digits: int = 4) -> str:
    return _NOT_MEASURED_TEXT if value is None else f"{value:.{digits}f}"


def _format_demo_row(row: Mapping[str, Any]) -> str:
    return (
        f"case={row['case']}, mode={row['mode']}, pass={_format_flag(row['overall_pass'])}, rc={row['return_code']}, "
        f"decode={_format_number(row['baseline_decode_tps_avg'])}->{_format_number(row['candidate_decode_tps_avg'])}, "
        f"drop={_format_number(row['decode_drop_ratio'], 6)}/{_format_number(row['decode_drop_target'], 6)}, "
        f"lossy={_format_number(row['candidate_lossy_ratio_avg'])}, "
        f"lossless={_format_number(row['candidate_lossless_ratio_avg'])}, "
        f"total={_format_number(row['candidate_runtime_total_ratio_avg'])}, "
        f"decomp_us={_format_number(row['runtime_decomp_best_us'])}, "
        f"cache_hit={_format_number(row['decode_cache_hit_best'])}, run_order={row['run_order']}, "
        f"summary=`{row['summary']}`{_format_reason(row)}"
    )


def _format_reason(row: Mapping[str, Any]) -> str:
    return f", reason={row['failure_reason']}" if row.get("failure_reason") else ""


def _format_flag(value: object) -> str:
    return "true" if value is True else "false"


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
"""In a folder of ``gate run``: the cases of its round, each with the stamp that its files must have."""
DEMO_REPORT_FILE, GATE_FILE = "llm_demo_report.json", "gate.json"
"""The report of an ``llm_demo`` case; kvmnn's verdict, strict gates and hard checks included."""


def collect_cases(directory: str | os.PathLike[str], run_info: Mapping[str, Any] | None = None) -> RoundSummary:
    """Collect the cases of a folder from ``<case>/summary.md`` (section *Quality Gate*) and
    ``<case>/llm_demo_report.json``.

    A case with only ``<case>.console.log`` ended before its report; its reason is taken from that log. If ``run.json``
    lists the cases of a round of ``gate run``, cases whose files are not of this round are not measured.

    Parameters
    ----------
    run_info
        Contents of ``run.json``, if it is not written yet.

    Raises
    ------
    SourceError
        For a folder that is not there or contains no case, and for files that cannot be read.
    """
    root = Path(directory)
    if not root.is_dir():
        if not root.exists():
            raise MissingFileError(f"{directory}: does not exist")
        raise SourceError(f"{directory}: is no folder")
    cases_of_run = _read_cases_of_run(root, run_info)
    has_stamp_by_case = compare_case_stamps(root, cases_of_run)
    case_names = dict.fromkeys([*cases_of_run, *_list_cases(root)])
    rows = [
        _build_row(root, case) if has_stamp_by_case.get(case, True) else _build_unfinished_row(case, cases_of_run[case])
        for case in case_names
    ]
    if not rows:
        raise SourceError(f"{directory}: holds no case: expected CASE/summary.md or CASE/{DEMO_REPORT_FILE}")
    return RoundSummary.from_rows(os.fspath(directory), rows)


def compare_case_stamps(root: Path, cases: Mapping[str, Any]) -> dict[str, bool]:
    """Return, for each case that has a stamp, whether its files have the same one."""
    stamps = {name: entry.get("stamp") for name, entry in cases.items() if isinstance(entry, Mapping)}
    return {name: _has_stamp(root / name, stamp) for name, stamp in stamps.items() if stamp is not None}


def _has_stamp(folder: Path, stamp: object) -> bool:
    for name in (GATE_FILE, DEMO_REPORT_FILE):
        if (folder / name).is_file():
            return read_object(folder / name).get("stamp") == stamp
    return False


def _read_cases_of_run(root: Path, run_info: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Read the cases of the round in order; empty if the folder is not one of ``gate run``."""
    if run_info is None:
        run_info = read_object(root / RUN_INFO_FILE) if (root / RUN_INFO_FILE).is_file() else {}
    cases = run_info.get("cases")
    return cases if "kvmnn_gate_run" in run_info and isinstance(cases, Mapping) else {}


def _build_unfinished_row(case: str, case_info: Mapping[str, Any]) -> dict[str, Any]:
    base = str(case_info.get("base", case.split("+")[0]))
    build_row = build_runtime_row if base in RUNTIME_CASES else build_demo_row
    return build_row(case, str(case_info.get("mode", "")), {MEASURED_BY_KEY: "kvmnn gate run"}, passed=False,
                failure=NOT_FINISHED_REASON, return_code=1)  # fmt: skip


def _list_cases(root: Path) -> list[str]:
    """List the names of cases: those of the suite in order, then others sorted."""
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
    """Return the last line near the end of a log that names a failure, else its last line that is not empty."""
    lines = [line.strip() for line in read_log(Path(console_log)).split("\n")]
    tail = [line[:200] for line in lines[-_MAX_TAIL_LINES:] if line]
    failure_lines = [line for line in tail if any(sign in line for sign in _FAILURE_MARKS)]
    return (failure_lines or tail or ["unknown failure"])[-1]


def save_case_result(
    directory: str,
    case_result: CaseResult | DemoResult,
    *,
    force: bool = False,
    extra_files: Mapping[str, str] | None = None,
    stamp: str = "",
) -> RoundSummary:
    """Write the files of a case into a round, and update the round's own files."""
    is_demo = isinstance(case_result, DemoResult)
    report_name, verdict_name = ("llm_demo_report.md", DEMO_REPORT_FILE) if is_demo else ("summary.md", GATE_FILE)
    document = case_result.to_dict() | ({"stamp": stamp} if stamp else {})
    texts = {report_name: case_result.to_markdown(), verdict_name: json.dumps(document, indent=2)}
    validate_case_name(case_result.case)
    check_round_directory(directory, force=force)
    with wrap_os_errors(directory):
        Path(directory).mkdir(parents=True, exist_ok=True)
    with DirectoryOutput(os.path.join(directory, case_result.case), force=force, index=verdict_name) as output:
        for name, text in {**(extra_files or {}), **texts}.items():
            output.open_file(name).write(text.encode("utf-8", "surrogateescape"))
        output.commit()
    round_summary = collect_cases(directory)
    write_round_files(round_summary)
    return round_summary


def validate_case_name(case: str) -> None:
    """Raise an error for a case name that is not a plain folder name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,199}", case):
        raise OptionError(f"{case[:100]!r} is no name of a case: expected letters, digits, and . _ + = - between them")


def check_round_directory(directory: str, *, force: bool) -> None:
    """Raise an error for a folder whose ``summary.json`` is not that of a round, unless forced."""
    root = Path(directory)
    if root.exists() and not root.is_dir():
        raise OutputError(f"{directory}: exists already and is not a directory")
    for name in ("summary.json", "summary.md", "cases.jsonl"):
        if (root / name).exists() and not force and not _is_round_directory(root):
            raise OutputError(f"{root / name}: exists already and is not of a round ({REPLACE_HINT} replaces it)")


def write_round_files(round_summary: RoundSummary) -> None:
    """Write the three files of a round, replacing earlier ones."""
    for name, text in round_summary.render_files().items():
        with FileOutput(os.path.join(round_summary.directory, name), force=True) as output:
            output.file.write(text.encode())
            output.commit()


def _is_round_directory(root: Path) -> bool:
    try:
        return "total_cases" in read_object(root / "summary.json")
    except (OSError, SourceError):
        return False
