"""The commands and the Python example of docs/report.md run as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import report_files as files
from repository import DOCS

from kvmnn.cli.command_parser import TOP_COMMANDS

PAGE = (DOCS / "report.md").read_text()


@pytest.mark.slow
def test_commands_and_python_example_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    files.write_everything(Path("round"))
    (block, *_) = re.findall(r"\n\n((?:    .*\n)+)", PAGE)
    words = [line.split() for line in block.replace("\\\n", " ").splitlines()]
    assert {line[1] for line in words} <= set(TOP_COMMANDS)
    written = set(re.findall(r"round/(\w+\.json)", block))
    assert written == {path.name for path in Path("round").glob("*.json")} - {"summary.json", "run.json"}
    for line in words:
        if line[1] == "report":
            run(*line[1:])
    assert Path("report.html").read_text().startswith("<!DOCTYPE html>")
    capsys.readouterr()
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(code, {})
    assert capsys.readouterr().out.split("\n")[:2] == ["FAIL 1 of 6 cases passes; 5 fail.", "# kvmnn report: round"]
