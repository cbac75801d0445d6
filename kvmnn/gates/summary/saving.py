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
from ...files.output import DirectoryOutput, FileOutput, failures
from ..checking.checking import Checked
from ..demo.judging import DemoChecked
from .collecting import REPORT, VERDICT, collect
from .writing import Round


def save_checked(
    directory: str, checked: Checked, *, force: bool = False, more: Mapping[str, str] | None = None, stamp: str = ""
) -> Round:
    """Write the files of a case of ``llm_bench`` into a round, and the round's own anew.

    Parameters
    ----------
    more
        Further files of the case, by their names.
    stamp
        Of the round that it is of (``run.json``); empty: of none of ``gate run``.

    Raises
    ------
    OutputError
        Where the case is there already and not to be replaced, or a file cannot be written.
    """
    texts = {**(more or {}), "summary.md": checked.to_markdown(), VERDICT: _stamped(checked.to_dict(), stamp)}
    return _save(directory, checked.case, texts, force, VERDICT)


def save_demo(
    directory: str, checked: DemoChecked, *, force: bool = False, more: Mapping[str, str] | None = None, stamp: str = ""
) -> Round:
    """`save_checked` for a case of ``llm_demo``."""
    texts = {**(more or {}), "llm_demo_report.md": checked.to_markdown(), REPORT: _stamped(checked.to_dict(), stamp)}
    return _save(directory, checked.case, texts, force, REPORT)


def _stamped(document: dict[str, Any], stamp: str) -> str:
    return json.dumps({**document, "stamp": stamp} if stamp else document, indent=2)


def check_case_name(case: str) -> None:
    """Refuse a name that is no plain folder's."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,199}", case):
        raise OptionError(f"{case[:100]!r} is no name of a case: expected letters, digits, and . _ + = - between them")


def check_round(directory: str, *, force: bool) -> None:
    """Refuse a folder whose ``summary.json`` is not that of a round, unless forced."""
    root = Path(directory)
    if root.exists() and not root.is_dir():
        raise OutputError(f"{directory}: exists already and is not a directory")
    for name in ("summary.json", "summary.md", "cases.jsonl"):
        if (root / name).exists() and not force and not _is_round(root):
            raise OutputError(f"{root / name}: exists already and is not of a round (-f or --force replaces it)")


def write_round(made: Round) -> None:
    """Write the three files of a round, in the place of those that are there."""
    for name, text in made.files().items():
        with FileOutput(os.path.join(made.directory, name), force=True) as output:
            output.file.write(text.encode())
            output.commit()


def _save(directory: str, case: str, texts: Mapping[str, str], force: bool, index: str) -> Round:
    check_case_name(case)
    check_round(directory, force=force)
    with failures(directory):
        Path(directory).mkdir(parents=True, exist_ok=True)
    with DirectoryOutput(os.path.join(directory, case), force=force, index=index) as output:
        for name, text in texts.items():
            output.file(name).write(text.encode("utf-8", "surrogateescape"))
        output.commit()
    made = collect(directory)
    write_round(made)
    return made


def _is_round(root: Path) -> bool:
    try:
        return "total_cases" in read_object(root / "summary.json")
    except (OSError, SourceError):
        return False
