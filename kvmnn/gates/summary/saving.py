"""Files of cases and rounds on disk."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import OptionError, OutputError, SourceError
from ...files.json_document import read_object
from ...files.output import DirectoryOutput, FileOutput, wrap_os_errors
from ..checking.checking import CaseResult
from ..demo.judging import DemoResult
from .collecting import DEMO_REPORT_FILE, GATE_FILE, collect_cases
from .writing import RoundSummary


def save_case_result(
    directory: str,
    case_result: CaseResult,
    *,
    force: bool = False,
    extra_files: Mapping[str, str] | None = None,
    stamp: str = "",
) -> RoundSummary:
    """Write the files of a case of ``llm_bench`` into a round, and the round's own anew.

    Parameters
    ----------
    extra_files
        Further files of the case, by their names.
    stamp
        Of the round that it is of (``run.json``); empty: of none of ``gate run``.

    Raises
    ------
    OutputError
        Where the case is there already and not to be replaced, or a file cannot be written.
    """
    texts = {
        **(extra_files or {}),
        "summary.md": case_result.to_markdown(),
        GATE_FILE: _dump_with_stamp(case_result.to_dict(), stamp),
    }
    return _save_case_files(directory, case_result.case, texts, force, GATE_FILE)


def save_demo_result(
    directory: str,
    demo_result: DemoResult,
    *,
    force: bool = False,
    extra_files: Mapping[str, str] | None = None,
    stamp: str = "",
) -> RoundSummary:
    """`save_case_result` for a case of ``llm_demo``."""
    texts = {
        **(extra_files or {}),
        "llm_demo_report.md": demo_result.to_markdown(),
        DEMO_REPORT_FILE: _dump_with_stamp(demo_result.to_dict(), stamp),
    }
    return _save_case_files(directory, demo_result.case, texts, force, DEMO_REPORT_FILE)


def _dump_with_stamp(document: dict[str, Any], stamp: str) -> str:
    return json.dumps({**document, "stamp": stamp} if stamp else document, indent=2)


def validate_case_name(case: str) -> None:
    """Refuse a name that is no plain folder's."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,199}", case):
        raise OptionError(f"{case[:100]!r} is no name of a case: expected letters, digits, and . _ + = - between them")


def check_round_directory(directory: str, *, force: bool) -> None:
    """Refuse a folder whose ``summary.json`` is not that of a round, unless forced."""
    root = Path(directory)
    if root.exists() and not root.is_dir():
        raise OutputError(f"{directory}: exists already and is not a directory")
    for name in ("summary.json", "summary.md", "cases.jsonl"):
        if (root / name).exists() and not force and not _is_round_directory(root):
            raise OutputError(f"{root / name}: exists already and is not of a round (-f or --force replaces it)")


def write_round_files(round_summary: RoundSummary) -> None:
    """Write the three files of a round, in the place of those that are there."""
    for name, text in round_summary.render_files().items():
        with FileOutput(os.path.join(round_summary.directory, name), force=True) as output:
            output.file.write(text.encode())
            output.commit()


def _save_case_files(directory: str, case: str, texts: Mapping[str, str], force: bool, index: str) -> RoundSummary:
    validate_case_name(case)
    check_round_directory(directory, force=force)
    with wrap_os_errors(directory):
        Path(directory).mkdir(parents=True, exist_ok=True)
    with DirectoryOutput(os.path.join(directory, case), force=force, index=index) as output:
        for name, text in texts.items():
            output.open_file(name).write(text.encode("utf-8", "surrogateescape"))
        output.commit()
    round_summary = collect_cases(directory)
    write_round_files(round_summary)
    return round_summary


def _is_round_directory(root: Path) -> bool:
    try:
        return "total_cases" in read_object(root / "summary.json")
    except (OSError, SourceError):
        return False
