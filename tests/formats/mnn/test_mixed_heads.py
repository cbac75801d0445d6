"""Prefix caches whose layers differ in kv heads and head_dim (gemma4), and those that share K and V."""

from __future__ import annotations

import json
import os
from pathlib import Path

import hybrid_prefix
import llm_kv
import numpy as np
import packed_samples
import pytest
from hybrid_prefix import read_files

from kvmnn.packed.backends import BACKENDS

KINDS = "SSFSSF"  # windows of 3 heads, full layers of one head of 128


@pytest.fixture(autouse=True)
def _chdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_mixed(folder: str, backend: str = "x86-avx2", tokens: int = 80) -> dict[str, np.ndarray]:
    """A prefix of layers of 3 x 64 and of 1 x 128; returns its K and V by name."""
    Path(folder).mkdir()
    numbers, found = BACKENDS[backend], {}
    keys, values, *other = llm_kv.read_layers(tokens, numbers.dtype)
    wide = [np.concatenate([each[:1], each[1:2]], axis=2) for each in other]
    for layer, kind in enumerate(KINDS):
        pair = [keys, values] if kind == "S" else wide
        for part, name, rows, buffer in zip(
            "kv",
            ("key", "value"),
            pair,
            packed_samples.packed(pair[0], pair[1], numbers.lP, numbers.hP, 64, tokens + 64, b"\0"),
            strict=True,
        ):
            Path(folder, f"sys_{layer}.{part}").write_bytes(buffer.tobytes())
            Path(folder, f"sys_{layer}_sync.{part}").touch()
            found[f"layer_{layer}.{name}"] = rows
    return found


def write_model(kind: str) -> None:
    Path("m").mkdir()
    Path("m/llm_config.json").write_text(json.dumps({"layer_nums": 6, "attention_type": kind}))
    layers = [("F", 3, 64) if each == "S" else ("F", 1, 128) for each in KINDS]
    Path("m/llm.mnn").write_bytes(hybrid_prefix.build_graph(layers))


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ("x86-avx2", "graph"),
        pytest.param("x86-avx512", "settings", marks=pytest.mark.slow),
        pytest.param("arm64-fp16", "words", marks=pytest.mark.slow),
        pytest.param("arm64-fp16", "graph", marks=pytest.mark.slow),
    ],
)
def test_commands_mixed_heads_are_read_and_restored(run, backend, told):
    expected = write_mixed("p", backend)
    write_model("mix")
    if told == "settings":
        Path("m/llm.mnn").unlink()
        windows = {
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
            "head_dim": 64,
            "global_head_dim": 128,
        }
        windows |= {
            "layer_types": windows["layer_types"] * 2,
            "num_key_value_heads": 3,
            "num_global_key_value_heads": 1,
        }
        Path("m/config.json").write_text(json.dumps({"text_config": windows}))
    options = () if told == "words" else ("--model", "m")
    said = run("encode", "p", *options, "-o", "b/")
    assert "12 packed files rebuilt in memory, every byte" in said.out and "LOSSLESS" in said.out
    assert "3 x 64 or 1 x 128 kv heads x dims by layer" in said.out
    run("decode", "b", "-o", "r/")
    assert read_files("r") == read_files("p")
    assert "every byte compared" in run("verify", "b", "--against", "p").out
    run("mnn", "unpack", "r", "-o", "x.npz")  # by the document that lies alongside the files
    with np.load("x.npz") as arrays:
        for name, rows in expected.items():
            np.testing.assert_array_equal(arrays[name], rows)
    run("mnn", "compact", "r", "--remove", 20, "-o", "c/")
    run("mnn", "unpack", "c", "-o", "y.npz")
    with np.load("y.npz") as arrays:
        np.testing.assert_array_equal(arrays["layer_2.key"], expected["layer_2.key"][:, :60])
    assert "would not load" not in run("inspect", "p", *options).out


@pytest.mark.slow
def test_commands_mixed_heads_refuse_common_geometry(run):
    write_mixed("p")
    assert "are not those of all" in run("encode", "p", "--kv-heads", 3, "--head-dim", 64, "-o", "b/", code=2).err
    assert (
        "heads differ by layer" in run("mnn", "repack", "p", "--target-backend", "x86-avx512", "-o", "q/", code=2).err
    )
    run("mnn", "unpack", "p", "-o", "x.npz")
    run("mnn", "pack", "x.npz", "--backend", "x86-avx2", "--name", "q", "-o", "q/", code=1)
    run("encode", "p", "-o", "b/")
    assert "heads differ by layer" in run("decode", "b", "--backend", "x86-avx512", "-o", "q/", code=2).err
    assert sorted(os.listdir()) == ["b", "p", "x.npz"]


def test_inspect_mixed_heads_of_unmixed_model_would_not_load(run):
    write_mixed("p")
    write_model("full")
    assert '"attention_type": "mix"' in run("inspect", "p", "--model", "m", code=1).out


def test_decode_heads_that_differ_from_arrays_are_refused(run):
    write_mixed("p")
    run("encode", "p", "-o", "b/")
    document = json.loads(Path("b/manifest.json").read_text())
    cache = json.loads(document["metadata"]["kvmnn.cache"])
    for change in ({"kv_heads": 2}, {"head_dim": 0}, {"kv_heads": 2**40}, {"kv_heads": 2, "head_dim": 64}):
        layers = [{**layer, **(change if layer["layer"] == 2 else {})} for layer in cache["layers"]]
        document["metadata"]["kvmnn.cache"] = json.dumps({**cache, "layers": layers})
        Path("b/manifest.json").write_text(json.dumps(document))
        run("decode", "b", "-o", "r/", code=1)
    assert not Path("r").exists()


def test_encode_equally_truncated_layers_are_refused(run):
    """Four of six layers cut to the room of 64 tokens are no layers of other heads."""
    layers = llm_kv.write_prefix(Path("p"), "x86-avx2", 80)
    assert layers
    for layer in range(2, 6):
        for part in "kv":
            Path(f"p/sys_{layer}.{part}").write_bytes(Path(f"p/sys_0.{part}").read_bytes())
            Path(f"p/sys_{layer}_sync.{part}").touch()
            os.truncate(f"p/sys_{layer}.{part}", 3 * 64 * 64 * 4)
    run("encode", "p", "-o", "b/", code=1)
    run("encode", "p", "--kv-heads", 3, "--head-dim", 64, "-o", "b/", code=1)
