"""`mnn-offline-lossless-vectors-1`: the offline evaluation of dumps, its two documents, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvmnn import KvmnnError
from kvmnn.analysis import (
    MeasureResult,
    build_reference_document,
    format_reference_json,
    format_reference_markdown,
    measure_dumps,
    select_dumps,
)
from kvmnn.analysis.options import ArgumentsError
from kvmnn.cli.commands.measure import parse_measure_options

from .common import CaseResult, Checker, run_list, unknown_lists

_FIELDS = {
    *("id", "dump", "args", "rc", "expected", "expected_md", "stderr", "lossless_ratio"),
    # what other versions of zstd and of the script gave, for those who use them
    *("same_with_zstd_1_5_7", "same_in_h2o_v5_script", "h2o_v5_diff"),
}


def run(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    entries = index.get("cases", ())
    named = [{**case, "name": case.get("id", "")} if isinstance(case, dict) else case for case in entries]
    yield from run_list(named, "cases", lambda case, check: _case(folder, case, check))
    yield from unknown_lists(index, ("cases",))


def _case(folder: Path, case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_FIELDS | {"name"})
    try:
        options = parse_measure_options(case["args"])
        measured = measure_dumps([case["dump"]], select_dumps([folder / case["dump"]], options.scope), options)
    except ArgumentsError as error:
        if check.equal("rc", 2, case["rc"]):  # with a usage text around it that has the script's own name
            check.equal("stderr", str(error) in case["stderr"], True)
        return
    except KvmnnError as error:
        if check.equal("rc", 1, case["rc"]):
            check.field("stderr", str(error))
        return
    if not check.equal("rc", 0, case["rc"]):
        return
    if "stderr" in case:
        check.field("stderr", "")
    _compare(folder, case, check, measured)


def _compare(folder: Path, case: dict[str, Any], check: Checker, measured: MeasureResult) -> None:
    made, expected = (
        build_reference_document(measured),
        json.loads((folder / case["expected"]).read_text(encoding="utf-8")),
    )
    check.field("lossless_ratio", made["lossless_ratio"])
    for key in {**expected, **made}:
        check.equal(key, _typed(made.get(key)), _typed(expected.get(key)))
    check.equal("order of keys", list(made), list(expected))
    check.equal("JSON text", format_reference_json(measured), json.dumps(expected, indent=2))
    check.equal(
        "Markdown", format_reference_markdown(measured), (folder / case["expected_md"]).read_text(encoding="utf-8")
    )


def _typed(value: Any) -> Any:
    """A value that is equal only to one of its own type and, for objects, in its own order."""
    if isinstance(value, dict):
        return [[key, _typed(entry)] for key, entry in value.items()]
    if isinstance(value, list):
        return [_typed(entry) for entry in value]
    return [type(value).__name__, value]
