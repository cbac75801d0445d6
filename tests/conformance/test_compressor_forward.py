"""The recorded caches before and after a compressor, through the same code as tools/conformance.py."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance import run_index
from vector_formats import compressor_forward

CASES = 27


@pytest.fixture(scope="module")
def vectors(unpacked: Callable[[str], Path]) -> Path:
    return unpacked("compressor")


def run(folder: Path, index: Path) -> dict[str, list[str]]:
    return {result.name: result.problems for result in run_index(index, folder)}


def test_compressor_forward_every_vector_passes(vectors: Path) -> None:
    results = run(vectors, vectors / "fwd_index.json")
    assert {name: problems for name, problems in results.items() if problems} == {}
    assert len(results) == CASES


def test_compressor_forward_every_installed_engine_runs() -> None:
    there = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))
    assert compressor_forward.engines() == (["numpy", "onnx"] if there else ["numpy"])


@pytest.mark.parametrize(
    ("case", "change"),
    [
        (0, {"new_len": 6}),
        (0, {"new_len": None}),
        (0, {"effective": {"factor": 3, "min_seq_len": 1, "image_len": 0}}),
        (1, {"unchanged": True}),
        (1, {"ref_csrc_new_len": 5}),
        (2, {"prefixes": 4}),
        (3, {"bin_dtype": 0}),
        (4, {"heads": 3}),
        (5, {"config": {"compression_factor": 3, "min_seq_len": 2, "image_kv_len": 9}}),
        (5, {"config": {"compression_factor": 3, "min_seq_len": 2, "image_kv_len": 10, "enabled": False}}),
        (6, {"npz": "fwd_001_text_exact.npz"}),
        (8, {"bin": "fwd_001_text_exact.bin"}),
        (10, {"surprise": 1}),
        (24, {"new_len": 18}),
        (25, {"new_len": 12}),
    ],
)
def test_compressor_forward_changed_expectation_fails(
    vectors: Path, tmp_path: Path, case: int, change: dict[str, object]
) -> None:
    index = json.loads((vectors / "fwd_index.json").read_text())
    index["cases"] = [index["cases"][case] | change]
    for entry in vectors.glob("fwd_*"):
        (tmp_path / entry.name).symlink_to(entry)
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(index))
    ((_, problems),) = run(tmp_path, changed).items()
    assert problems
