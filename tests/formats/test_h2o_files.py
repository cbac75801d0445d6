"""Scores and attention in files, and plans for them: the library equals the command."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import hf_files
import llama_files
import mlx_files
import numpy as np
import pytest
from packed_samples import arrays, write_prefix

from kvmnn.cli.entry_point import main
from kvmnn.formats.plan_files import plan_from_file, read_scores
from kvmnn.policies.h2o import H2OConfig, LayerScores, plan_layers


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_read_scores_divides_attention_by_heads_and_queries(here: Path) -> None:
    np.save("queries.npy", np.ones((2, 4, 3, 20), np.float32))
    found = read_scores("queries.npy", H2OConfig(block_tokens=10, ema_alpha=0.5))
    assert [(layer.name, layer.kv_len, layer.scores.tolist()) for layer in found] == [
        (f"queries[{i}]", 20, [5.0, 5.0]) for i in range(2)
    ]


def test_plan_from_file_equals_plan_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("scores.npy", np.arange(40, dtype=np.float32).reshape(2, 20))
    config = H2OConfig(block_tokens=8, sink_tokens=8, recent_tokens=8)
    plans = plan_from_file("scores.npy", config, "a.json", input_kind="scores")
    argv = [
        "plan",
        "scores.npy",
        "--input-kind",
        "scores",
        "--h2o",
        "block_tokens=8",
        "--h2o",
        "sink_tokens=8",
        "--h2o",
        "recent_tokens=8",
    ]
    assert main([*argv, "-o", "b.json"]) == 0
    assert capsys.readouterr().out == f"{plans}\nb.json: the plan; for kvmnn mnn compact --plan\n"
    assert (here / "a.json").read_bytes() == (here / "b.json").read_bytes()
    assert main([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    expected = json.loads(json.dumps({"verb": "plan", **plans.to_dict()}))
    assert {**told, "seconds": 0, "output": None} == {**expected, "seconds": 0, "output": None}


def test_plan_layers_of_scores_in_memory() -> None:
    scores = [LayerScores(name="a", kv_len=160, scores=np.arange(20, dtype=np.float32))]
    plans = plan_layers(scores, H2OConfig(block_tokens=8, sink_tokens=8, recent_tokens=8))
    assert 0 <= plans.seconds < 60
    assert plans.label == "LOSSY"
    assert plans.to_plan_entries() == [{"layer": 0, "remove": 160, "pairs": [[0, 8], [112, 48]]}]


def test_read_scores_cache_without_scores_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("chat.session").write_bytes(llama_files.state(Random(1), llama_files.Shape(), [5])[0])
    Path("prompt.safetensors").write_bytes(mlx_files.cache(Random(1), mlx_files.Shape())[0])
    hf_files.save(Path("cache.pt"), hf_files.dynamic_cache(hf_files.pairs(1)))
    np.savez("kv.npz", **{f"layer_0.{part}": np.ones((2, 3, 4), np.float16) for part in ("key", "value")})
    write_prefix(Path("sys"), arrays(1, 2, 30, 4), capacity=32)
    assert main(["encode", "chat.session", "-o", "whole/", "-q"]) == 0
    assert main(["encode", "prompt.safetensors", "-o", "store.zarr", "-q"]) == 0
    engines = {
        "chat.session": "llama.cpp session",
        "prompt.safetensors": "MLX prompt cache",
        "cache.pt": "transformers",
    }
    engines |= {"whole": "llama.cpp session", "store.zarr": "MLX prompt cache", "kv.npz": "", "sys": ""}
    for path, what in engines.items():
        assert main(["plan", path]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{path}: holds K and V{f' ({what}' if what else ': planning needs attention'}" in said
        assert "which no cache holds: --policy SPEC plans a cache by lengths or keys" in said
        assert "--kv-heads" not in said


def test_plan_command_accepts_attention_in_frames(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("attention.npy", np.full((2, 4, 8, 8), 1 / 8, np.float32))
    assert main(["encode", "attention.npy", "-o", "attention.frame", "-q"]) == 0
    capsys.readouterr()
    lines = []
    for path in ("attention.npy", "attention.frame"):
        assert main(["plan", path, "--no-map"]) == 0
        lines.append(capsys.readouterr().out)
    assert lines[0] == lines[1] != ""


def attentions(layers: int, batch: int, heads: int = 3, tokens: int = 20) -> list[np.ndarray]:
    drawn = np.random.default_rng(layers).random((layers, batch, heads, tokens, tokens)).astype("<f4")
    return list(drawn / drawn.sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_read_scores_attention_list_has_batch_axis(tmp_path: Path, run: Any, layers: int) -> None:
    """What torch.save(outputs.attentions) writes: the first axis of each tensor is the batch, whatever its length."""
    tensors = attentions(layers, 2)
    for value in (tensors, tuple(tensors)):
        path = hf_files.save(tmp_path / "attentions.pt", value)
        for text in (0, 1):
            alone = hf_files.save(tmp_path / "one.pt", [tensor[text : text + 1].copy() for tensor in tensors])
            found = plan_from_file(str(path), H2OConfig(block_tokens=4), batch=text)
            assert len(found.layers) == layers
            assert found.to_plan_entries() == plan_from_file(str(alone), H2OConfig(block_tokens=4)).to_plan_entries()
            np.save(tmp_path / "stacked.npy", np.stack([tensor[text] for tensor in tensors]))
            assert (
                found.to_plan_entries()
                == plan_from_file(str(tmp_path / "stacked.npy"), H2OConfig(block_tokens=4)).to_plan_entries()
            )
        said = run("plan", path, "--h2o", "block_tokens=4", code=2).err
        assert "attention of a batch of 2 texts: --part batch=N plans one of them" in said
        assert (
            "expected --part batch=0 to 1"
            in run("plan", path, "--h2o", "block_tokens=4", "--part", "batch=2", code=2).err
        )
        run("plan", path, "--h2o", "block_tokens=4", "--part", "batch=1")
    np.save(tmp_path / "layers.npy", np.stack([tensor[0] for tensor in tensors]))
    assert "leave --part batch out" in run("plan", tmp_path / "layers.npy", "--part", "batch=0", code=2).err


def test_read_scores_attention_by_name_has_batch_axis(tmp_path: Path) -> None:
    tensors = attentions(3, 1)
    np.savez(tmp_path / "onnx.npz", **{f"attentions.{n}": tensor for n, tensor in enumerate(tensors)})
    np.savez(tmp_path / "plain.npz", **{f"attentions.{n}": tensor[0] for n, tensor in enumerate(tensors)})
    plans = [plan_from_file(str(tmp_path / name), H2OConfig(block_tokens=4)) for name in ("onnx.npz", "plain.npz")]
    assert plans[0].to_plan_entries() == plans[1].to_plan_entries() and len(plans[0].layers) == 3
