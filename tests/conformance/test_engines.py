"""Caches that llama.cpp and mlx-lm wrote, through the same code as tools/conformance.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conformance import run_tree

LLAMA = [
    *(("kind", "sequence"), ("version", 9), ("tokens", [1]), ("streams", 2), ("positions", [0]), ("seqs", [[0]])),
    *(("v_transposed", False), ("types", ["f16"] * 3 + ["f32"]), ("kv_heads", 1), ("head_dim", 64), ("layers", 1)),
    *(("expected", "f16_fa.session.bin.expected0.npz"), ("file", "f16_fa.session.bin"), ("stream", 1), ("more", 1)),
]
MLX = [
    *(("kind", "prompt_cache"), ("bits", 4), ("group_size", 32), ("layers", 1), ("kv_heads", 1), ("head_dim", 32)),
    *(("tokens", 256), ("dtype", "bf16"), ("expected", "fp16.expected.npz"), ("file", "fp16.safetensors"), ("more", 1)),
]


@pytest.mark.parametrize(("name", "count"), [("llama", 14), ("mlx", 4)])
def test_engines_every_cache_reads_exactly_and_is_rewritten(
    unpacked: Callable[[str], Path], name: str, count: int
) -> None:
    results = list(run_tree(unpacked(name)))
    assert [(result.name, result.problems) for result in results if result.problems] == []
    assert len(results) == count


@pytest.mark.parametrize(
    ("name", "case", "field", "value"),
    [("llama/a", 0, *change) for change in LLAMA] + [("mlx", 3, *change) for change in MLX],
    ids=[f"llama-{field}" for field, _ in LLAMA] + [f"mlx-{field}" for field, _ in MLX],
)
def test_engines_changed_expectation_fails(
    unpacked: Callable[[str], Path], tmp_path: Path, name: str, case: int, field: str, value: object
) -> None:
    folder = shutil.copytree(
        unpacked(name.split("/")[0]) / Path(name).relative_to(name.split("/")[0]), tmp_path / "set"
    )
    index = json.loads((folder / "index.json").read_text())
    index["cases"] = [index["cases"][case] | {field: value}]
    (folder / "index.json").write_text(json.dumps(index))
    (result,) = run_tree(folder)
    assert result.problems


@pytest.mark.parametrize(("name", "file"), [("llama", "f16.session.bin.expected0.npz"), ("mlx", "fp32.expected.npz")])
def test_engines_changed_element_fails(unpacked: Callable[[str], Path], tmp_path: Path, name: str, file: str) -> None:
    folder = shutil.copytree(unpacked(name) / ("a" if name == "llama" else ""), tmp_path / "set")
    with np.load(folder / file) as found:
        arrays = dict(found)
    words = arrays["layer_1.value"].view(f"u{arrays['layer_1.value'].itemsize}")
    words[1, 19, 31] ^= 1
    np.savez(folder / file, **arrays)
    results = list(run_tree(folder))
    failed = [result for result in results if result.problems]
    assert len(failed) == 1
    assert "words of layer_1.value that differ: expected 0, kvmnn gives 1" in " ".join(failed[0].problems)
