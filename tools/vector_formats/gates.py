"""`h2o-gate-vectors-1`: rows judged by the fork's analyser, and logs read by its parser."""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvmnn import KvmnnError
from kvmnn.cli.commands import gate as gate_options
from kvmnn.gates import GateLimits, parse_logs
from kvmnn.gates.analysis import format_case_markdown, read_gate_section, warn_missing_columns
from kvmnn.gates.case_inputs import read_csv
from kvmnn.gates.checker import CaseResult as GateCaseResult
from kvmnn.gates.checker import check

from .common import CaseResult, Checker, run_list, unknown_lists

_ANALYSE = {
    *("name", "csv_header", "csv_rows", "args", "online_json", "upper_json", "log"),
    *("rc", "warn", "stderr_last", "gate", "note"),
}
_PARSE = {"name", "log", "rc", "csv", "stderr_last", "note"}
_PATH = "<path>"
"""Stands for what names a file of the machine that the vectors were made on."""


def run(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    yield from run_list(index.get("analyze", ()), "analyze", _analyse)
    yield from run_list(index.get("parse", ()), "parse", _parse)
    yield from unknown_lists(index, ("analyze", "parse"))


def _analyse(case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_ANALYSE)
    with tempfile.TemporaryDirectory() as name:
        try:
            checked = _judged(case, Path(name))
        except (argparse.ArgumentError, SystemExit):  # words that no analyser takes
            check.field("rc", 2)
            return
        except KvmnnError as error:
            _refused(case, check, error)
            check.field("gate", {})
            check.field("warn", warn_missing_columns(case["csv_header"]))
            return
    check.field("rc", 0)
    check.field("stderr_last", "")
    check.field("warn", list(checked.analysis.warnings))
    made, expected = dict(checked.analysis.section_lines), case["gate"]
    check.equal("names of the gate", list(made), list(expected))
    for key in {**expected, **made}:
        if expected.get(key) != _PATH:
            check.equal(key, made.get(key), expected.get(key))
        else:
            check.equal(f"{key} names a file", name in made.get(key, ""), True)
    check.equal("verdict", checked.has_passed, expected.get("quality_status") == "PASS")
    check.equal("gates", all(gate.verdict != "fail" for gate in checked.gates), expected.get("overall_pass") == "true")
    section = read_gate_section(format_case_markdown(checked.analysis))
    check.equal("report", section, {key: text.strip().strip("`") for key, text in made.items()})


def _judged(case: dict[str, Any], folder: Path) -> GateCaseResult:
    """The case as files, judged by its words."""
    words = gate_options.parse_words(case["args"])
    paths = {}
    for name in ("online_json", "upper_json"):
        if case.get(name) is not None:
            paths[name] = folder / f"{name}.json"
            paths[name].write_text(json.dumps(case[name]), encoding="utf-8")
    logs = []
    if case.get("log") is not None:
        logs.append(folder / "bench_stdout.log")
        logs[0].write_text(case["log"], encoding="utf-8")
    table = folder / "metrics.csv"
    with table.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([case["csv_header"], *case["csv_rows"]])
    limits = gate_options.override_limits(words, GateLimits())
    return check(
        read_csv(table), limits, online_json=paths.get("online_json"), upper_json=paths.get("upper_json"), logs=logs
    )


def _parse(case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_PARSE)
    with tempfile.TemporaryDirectory() as name:
        log = Path(name, "a.log")
        log.write_bytes(case["log"].encode())
        try:
            parsed = parse_logs([log])
        except KvmnnError as error:
            _refused(case, check, error)
            check.field("csv", None)
            return
    check.field("rc", 0)
    check.field("stderr_last", "")
    check.field("csv", parsed.to_csv().replace(name, "<dir>"))


def _refused(case: dict[str, Any], check: Checker, error: KvmnnError) -> None:
    """An error here is exit code 1 there, with the same last words; those here begin with the file."""
    check.field("rc", 1)
    said = case["stderr_last"]
    check.equal("stderr_last", bool(said) and said.partition(_PATH)[0] in str(error), True)
