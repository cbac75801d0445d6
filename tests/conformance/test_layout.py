"""Packed caches of MNN's own code and of running engines, through the same code as tools/conformance.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance import main, run_tree


@pytest.fixture(scope="module")
def layout(unpacked: Callable[[str], Path]) -> Path:
    return unpacked("layout")


@pytest.fixture(scope="module")
def real(unpacked: Callable[[str], Path]) -> Path:
    return unpacked("real_kv")


def test_layout_every_vector_passes(layout: Path) -> None:
    results = list(run_tree(layout))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 101


def test_layout_every_live_cache_passes(real: Path) -> None:
    results = list(run_tree(real))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 58 + 7 + 2 + 3


@pytest.mark.parametrize(
    ("case", "change"),
    [
        (15, lambda case: case["steps"][2].update(past=15)),
        (15, lambda case: case["steps"][2].update(max_len=102)),
        (15, lambda case: case["steps"][2].update(errors=1)),
        (15, lambda case: case["steps"][1]["tokens"].reverse()),
        (15, lambda case: case["ops"][2][2].pop()),
        (15, lambda case: case.update(hP=8)),
        (15, lambda case: case["sections"][3].update(undefined_bytes=0)),
        (15, lambda case: case["sections"][3].update(sha256_if_fresh_memory_is_0xA5="00")),
        (84, lambda case: case["ops"][2][2].pop(0)),
        (90, lambda case: case.update(quant_value=False)),
        (90, lambda case: case.update(lP8=8)),
        (70, lambda case: case.update(flash=True)),
        (53, lambda case: case.update(novelty=3)),
        (53, lambda case: case["ops"].append(["shuffle", 3])),
    ],
)
def test_layout_changed_expectation_fails(layout: Path, tmp_path: Path, case: int, change: object) -> None:
    index = json.loads((layout / "index.json").read_text())
    chosen = index["cases"][case]
    change(chosen)
    index["cases"] = [chosen]
    shutil.copy(layout / chosen["file"], tmp_path)
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert main([str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"past": 53', '"past": 52'),
        ('["erase", 21, 70]', '["erase", 21, 69]'),
        ('"max_len": 164', '"max_len": 165'),
        ('"engine_history": 53', '"engine_history": 54'),
        ('"remove": 121', '"remove": 120'),
        ('"bytes": 14848', '"bytes": 14849'),
    ],
)
def test_layout_changed_history_fails(real: Path, tmp_path: Path, old: str, new: str) -> None:
    copy = tmp_path / "real"
    shutil.copytree(real, copy)
    found = 0
    for path in copy.rglob("index.json"):
        text = json.dumps(json.loads(path.read_text()))
        found += old in text
        path.write_text(text.replace(old, new, 1))
    assert found == 1 or old.startswith('"past"')
    assert main([str(copy)]) == 1
