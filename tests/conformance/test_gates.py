"""Verdicts of the fork's analyser, and tables of its parser, through the same code as tools/conformance.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance import main, run_index


@pytest.fixture(scope="module")
def index(unpacked: Callable[[str], Path]) -> dict[str, Any]:
    return json.loads((unpacked("gates") / "cases.json").read_text())


def test_gates_every_vector_passes(unpacked: Callable[[str], Path]) -> None:
    folder = unpacked("gates")
    results = list(run_index(folder / "cases.json", folder))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 32


def failing(folder: Path, index: dict[str, Any]) -> list[str]:
    (folder / "cases.json").write_text(json.dumps(index))
    return [result.name for result in run_index(folder / "cases.json", folder) if result.problems]


def test_gates_every_line_of_every_verdict_is_compared(tmp_path: Path, index: dict[str, Any]) -> None:
    seen: set[str] = set()
    altered = []
    for case in index["analyze"]:
        for key in [key for key, text in case["gate"].items() if text != "<path>" and key not in seen]:
            seen.add(key)
            altered.append({**case, "name": key, "gate": {**case["gate"], key: case["gate"][key] + "0"}})
    case = index["analyze"][0]
    altered.append({**case, "name": "rc", "rc": 1})
    altered.append({**case, "name": "warn", "warn": ["[WARN] more"]})
    altered.append({**case, "name": "short", "gate": dict(list(case["gate"].items())[1:])})
    altered.append({**case, "name": "order", "gate": dict(reversed(case["gate"].items()))})
    assert len(failing(tmp_path, {**index, "analyze": altered, "parse": index["parse"]})) == len(altered)
    assert len(seen) == 83


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("parse", {"csv": "model\r\n"}),
        ("parse", {"rc": 1}),
        ("parse", {"more": 1}),
        ("analyze", {"more": 1}),
        ("analyze", {"args": ["--lossy-target", "9"]}),
        ("analyze", {"args": ["--unknown", "9"]}),
    ],
)
def test_gates_changed_case_fails(
    tmp_path: Path, index: dict[str, Any], capsys: pytest.CaptureFixture[str], name: str, changed: dict[str, Any]
) -> None:
    made = {"format": index["format"], name: [{**index[name][0], **changed}, index[name][1]]}
    (tmp_path / "cases.json").write_text(json.dumps(made))
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}: 1 passed, 1 failed"
