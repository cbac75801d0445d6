"""The commands of docs/dense.md print what the page shows; frames of dense streams decode to the original files."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from docs.commands import comparable, fresh_directory, retold
from mlx_files import safetensors
from repository import DOCS

import kvmnn


def test_walk_through_prints_what_the_page_shows():
    page = (DOCS / "dense.md").read_text(encoding="utf-8")
    assert page.count("$ kvmnn ") == 6
    assert comparable(retold(page)) == comparable(page)


def test_walk_through_restores_frames_and_files(run):
    page = (DOCS / "dense.md").read_text(encoding="utf-8")
    with fresh_directory():
        for line in page.splitlines():
            if line.startswith("$ kvmnn "):
                run(*line.removeprefix("$ kvmnn ").removesuffix(" >/dev/null").split())
        for path in Path("f").iterdir():
            assert Path("back", path.name).read_bytes() == path.read_bytes()
        assert {path.name for path in Path("restored").glob("*.[kv]")} == {
            path.name for path in Path("cache").iterdir()
        }
        run("diff", "restored", "f")


def test_python_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"rope_theta": 10000.0, "hidden_size": 256, "num_attention_heads": 4}
    rng = np.random.default_rng(5)
    keys, values = (rng.standard_normal((2, 300, 64)).astype(np.float16) for _ in "kv")
    np.save("k.npy", keys)
    np.save("v.npy", values)
    Path("model").mkdir()
    for path in ("config.json", "model/config.json"):
        Path(path).write_text(json.dumps(config))
    tensors = {
        f"layer_0.{part}": ("F16", [*array.shape], array.tobytes())
        for part, array in (("key", keys), ("value", values))
    }
    Path("cache.safetensors").write_bytes(safetensors(Random(1), tensors, {}))
    text = (DOCS / "dense.md").read_text(encoding="utf-8").split("## From Python")[1].split("## What is proved")[0]
    names: dict[str, Any] = {}
    blocks = [part for part in text.split("\n\n") if part.startswith("    ")]
    for block in blocks:
        exec(dedent(block), names)
    assert len(blocks) == 7 and names["notes"] == [] and names["rotary"].dims == 64
    back = {array.name: array.to_numpy() for array in kvmnn.open("cache.frames/").arrays}
    assert np.array_equal(back["layer_0.key"], keys) and np.array_equal(back["layer_0.value"], values)
