"""Files of cases and rounds on disk."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from ...errors import OptionError, OutputError, SourceError
from ...files.json_document import read_object
from ...files.output import DirectoryOutput, FileOutput, failures
from ..checking.checking import Checked
from ..demo.judging import DemoChecked
from .collecting import REPORT, VERDICT, collect
from .writing import Round


def save_checked(directory: str, checked: Checked, *, force: bool = False) -> Round:
    """Write the files of a case of ``llm_bench`` into a round, and the round's own anew.

    Raises
    ------
    OutputError
        Where the case is there already and not to be replaced, or a file cannot be written.
    """
    texts = {"summary.md": checked.to_markdown(), VERDICT: json.dumps(checked.to_dict(), indent=2)}
    return _save(directory, checked.case, texts, force)


def save_demo(directory: str, checked: DemoChecked, *, force: bool = False) -> Round:
    """`save_checked` for a case of ``llm_demo``."""
    texts = {"llm_demo_report.md": checked.to_markdown(), REPORT: json.dumps(checked.to_dict(), indent=2)}
    return _save(directory, checked.case, texts, force)


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


def _save(directory: str, case: str, texts: Mapping[str, str], force: bool) -> Round:
    check_case_name(case)
    check_round(directory, force=force)
    with failures(directory):
        Path(directory).mkdir(parents=True, exist_ok=True)
    with DirectoryOutput(os.path.join(directory, case), force=force) as output:
        for name, text in texts.items():
            output.file(name).write(text.encode())
        output.commit()
    made = collect(directory)
    write_round(made)
    return made


def _is_round(root: Path) -> bool:
    try:
        return "total_cases" in read_object(root / "summary.json")
    except (OSError, SourceError):
        return False
