"""Recorded offline evaluations, through the same code as tools/conformance.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance import main, run_index


@pytest.fixture(scope="module")
def vectors(unpacked: Callable[[str], Path]) -> Path:
    return unpacked("offline")


@pytest.mark.slow
def test_offline_every_vector_passes(vectors: Path) -> None:
    results = list(run_index(vectors / "index.json", vectors))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 39


CHANGES = [
    ("index.json", '"--entry-mode",\n    "aggregate"\n', '"--entry-mode",\n    "chunked"\n'),
    ("index.json", '"rc": 0', '"rc": 1'),
    ("index.json", '"rc": 1', '"rc": 0'),
    ("index.json", "1.058566815047569", "1.058566815047568"),
    ("index.json", "--front-n must be > 0", "--front-n must be >= 0"),
    ("index.json", '"dump": "mixed"', '"dump": "dumps"'),
    ("expected/25.json", '"skipped_entries": 8', '"skipped_entries": 7'),
    ("expected/25.json", '"delta_seq": 7', '"delta_seq": 7.0'),
    ("expected/25.md", "1.2350", "1.2351"),
    ("expected/25.json", '"compression_failed": 2', '"compression_failed": 1'),
]


@pytest.mark.parametrize(("file", "old", "new"), CHANGES)
def test_offline_changed_expectation_fails(
    vectors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str
) -> None:
    (tmp_path / "expected").mkdir()
    for entry in [*vectors.iterdir(), *(vectors / "expected").iterdir()]:
        if entry.name not in ("expected", Path(file).name):
            (tmp_path / entry.relative_to(vectors)).symlink_to(entry)
    text = (vectors / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1))
    only_two(vectors / "index.json", tmp_path / "index.json", Path(file).stem)
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}: 1 passed, 1 failed"


def only_two(original: Path, changed: Path, number: str) -> None:
    """Leave in the index what `number` or a change in the index says, and one case that is as it was."""
    cases, index = json.loads(original.read_text())["cases"], json.loads(changed.read_text())
    told = [new for old, new in zip(cases, index["cases"], strict=True) if new != old or new["id"] == number]
    index["cases"] = [*told, index["cases"][1 if index["cases"][0] in told else 0]]
    changed.unlink()
    changed.write_text(json.dumps(index))
