"""Saved caches of transformers, through the same code as tools/conformance.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conformance import run_index

CHANGED = [
    *(("dtype", "fp16"), ("kind", "pairs"), ("layers", 4), ("batch", 2), ("kv_heads", 1), ("head_dim", 31)),
    *(("tokens", 19), ("file", "bf16.pairs.pt"), ("expected", "fp16.expected.npz"), ("more", 1)),
]


def test_hf_cache_every_cache_reads_exactly(unpacked: Callable[[str], Path]) -> None:
    folder = unpacked("hf")
    results = list(run_index(folder / "index.json", folder))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == 15


@pytest.mark.parametrize(("field", "value"), CHANGED, ids=[field for field, _ in CHANGED])
def test_hf_cache_changed_expectation_fails(
    unpacked: Callable[[str], Path], tmp_path: Path, field: str, value: object
) -> None:
    folder = shutil.copytree(unpacked("hf"), tmp_path / "hf")
    index = json.loads((folder / "index.json").read_text())
    index["cases"] = [index["cases"][0] | {field: value}]
    (folder / "index.json").write_text(json.dumps(index))
    (result,) = run_index(folder / "index.json", folder)
    assert result.problems


def test_hf_cache_changed_element_fails(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(unpacked("hf"), tmp_path / "hf")
    with np.load(folder / "fp32.expected.npz") as found:
        arrays = dict(found)
    arrays["layer_2.value"][0, 1, 19, 31] *= -1
    np.savez(folder / "fp32.expected.npz", **arrays)
    results = list(run_index(folder / "index.json", folder))
    assert [bool(result.problems) for result in results] == [False] * 10 + [True] * 5
