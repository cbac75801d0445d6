"""Recorded conversions and broken weight files, through the same code as tools/conformance.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance import main, run_index


@pytest.fixture(scope="module")
def vectors(unpacked: Callable[[str], Path]) -> Path:
    return unpacked("compressor")


@pytest.mark.parametrize(("index", "cases"), [("conv_index.json", 93), ("bad_index.json", 82)])
def test_compressor_every_vector_passes(vectors: Path, index: str, cases: int) -> None:
    results = list(run_index(vectors / index, vectors))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == cases


CHANGES = [
    ("conv_index.json", "factor=3, hidden_size=24", "factor=4, hidden_size=24"),
    ("conv_index.json", '"--dtype",\n    "bf16"', '"--dtype",\n    "fp32"'),
    ("conv_index.json", '"status": "ok"', '"status": "error"'),
    ("conv_index.json", '"status": "error"', '"status": "ok"'),
    ("conv_index.json", '"num_heads": 0', '"num_heads": 1'),
    ("bad_index.json", '"verdict": "accept"', '"verdict": "reject"'),
    ("bad_index.json", '"reason": "truncated_header"', '"reason": "bad_magic"'),
    ("bad_index.json", '"level": "semantic"', '"level": "format"'),
    ("bad_index.json", '"size": 684', '"size": 685'),
]


@pytest.mark.parametrize(("index", "old", "new"), CHANGES)
def test_compressor_changed_expectation_fails(
    vectors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], index: str, old: str, new: str
) -> None:
    for entry in vectors.iterdir():
        if entry.name.startswith(("conv_", "bad_")) and entry.suffix != ".json":
            (tmp_path / entry.name).symlink_to(entry)
    text = (vectors / index).read_text()
    before, after = (json.loads(version)["cases"] for version in (text, text.replace(old, new, 1)))
    (changed,) = [number for number, case in enumerate(before) if case != after[number]]
    kept = after[max(changed - 2, 0) : changed + 3]
    (tmp_path / "index.json").write_text(json.dumps({**json.loads(text), "cases": kept}))
    assert main([str(tmp_path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{tmp_path}: {len(kept) - 1} passed, 1 failed"
