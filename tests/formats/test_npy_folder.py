"""Directories of ``.npy`` files: read back wherever kvmnn writes them, and paired into layers by their names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import packed_samples
import pytest

import kvmnn
from kvmnn.errors import SourceError
from kvmnn.formats import detect

TOKENS = 20
ON_AVX2 = ["--backend", "x86-avx2"]


@pytest.fixture
def here(tmp_path, monkeypatch, run):
    """A prefix cache `p`, and the directory `d` that unpack makes of it."""
    monkeypatch.chdir(tmp_path)
    sample = packed_samples.write_prefix(Path("p"), packed_samples.arrays(12, 2, TOKENS, 6), capacity=24)
    run("mnn", "unpack", "p", *sample.options, *ON_AVX2, "-o", "d/")
    return sample


def test_npy_folder_arrays_are_in_layer_order(here):
    source = kvmnn.open("d")
    assert source.names == tuple(f"layer_{n}.{part}" for n in range(12) for part in ("key", "value"))
    for array, expected in zip(source.arrays, here.arrays, strict=True):
        np.testing.assert_array_equal(array.to_numpy(), expected)
    assert kvmnn.open("d", tensors=["layer_3.value"]).names == ("layer_3.value",)
    with pytest.raises(SourceError, match="no array named 'x'"):
        kvmnn.open("d", tensors=["x"])


def test_npy_folder_other_names_are_last(here):
    for name in ("b10", "b9", "a"):
        np.save(f"d/{name}.npy", np.ones((2, 2), np.float16))
    Path("d/positions.json").write_text("{}")
    Path("d/more.npy").mkdir()
    assert kvmnn.open("d").names[-4:] == ("layer_11.value", "a", "b9", "b10")


def test_commands_accept_npy_folder(here, run, tmp_path):
    assert "d: 24 arrays to encode" in run("inspect", "d").out
    assert "LOSSLESS" in run("encode", "d", "-o", "d.frames/").out
    assert "every byte compared with d" in run("verify", "d.frames/", "--against", "d").out
    run("decode", "d.frames", "--arrays", "-o", "e/")
    run("mnn", "pack", "e", *ON_AVX2, "--name", "sys", "-o", "q/")
    assert "equal: " in run("diff", "q", "d").out
    assert "equal: " in run("diff", "d", "e").out
    assert "total: 12 layers, 20 tokens each" in run("measure", "d").out
    config: dict[str, object] = {
        "kv_lossless_enable": True,
        "kv_lossless_runtime_enable": True,
        "kv_lossless_runtime_mode": "store",
        "kv_lossless_codec": "gear_delta",
        "kv_lossless_scope": "front_n",
        "kv_lossless_front_n": 12,
        "kv_lossless_block_tokens": 8,
        "kv_lossless_hot_sink_tokens": 0,
        "kv_lossless_hot_recent_tokens": 1,
        "kv_h2o_trigger_min_tokens": 1,
    }
    Path("c.json").write_text(json.dumps(config))
    assert "12 layers, 20 tokens" in run("mnn", "replay", "d", "--engine-config", "c.json").out


def test_npy_folder_of_dump_arrays_is_a_dump(here, run):
    run("mnn", "unpack", "d", "--output-kind", "dump", "-o", "dump/", "--run-id", "2026")
    run("encode", "dump", "-o", "dump.frames/")
    run("decode", "dump.frames", "--arrays", "-o", "back/")
    assert Path("back/2026_layer_11_k_t0_20.npy").exists()
    assert "equal: " in run("diff", "back", "d").out
    assert "total: 12 layers, 20 tokens each" in run("measure", "back").out


def test_npy_folder_file_truncated_after_open_is_refused(here):
    source = kvmnn.open("d")
    file = Path("d/layer_0.key.npy")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SourceError, match=r"layer_0\.key\.npy: has 100 bytes, too few for the 960"):
        source["layer_0.key"].to_numpy()


def test_detect_kinds_of_folders(here, run):
    run("mnn", "unpack", "d", "--output-kind", "dump", "-o", "dump/")
    Path("empty").mkdir()
    assert [detect(name).name for name in ("p", "d", "dump", "empty")] == ["packed", "npy", "dump", "folder"]
