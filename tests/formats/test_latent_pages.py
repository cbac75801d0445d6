"""Latent attention (DeepSeek's): one tensor for K and V, in pages of LMCache, folders of vLLM and plain arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_files import folder

import kvmnn
from kvmnn.errors import MissingOptionError, OptionError

LAYERS, TOKENS, DIMS = 4, 70, 24


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 1 << 16, shape, np.uint16)


@pytest.mark.parametrize("said", [{"axes": "td"}, {"axes": "thd", "shape": (-1, 1, DIMS)}, {"axes": "TD"}], ids=str)
def test_latent_vllm_folder_is_keys_only(tmp_path: Path, said: Any) -> None:
    arrays = folder(tmp_path / "mla", (TOKENS, DIMS), layers=LAYERS)
    source = kvmnn.open(tmp_path / "mla", **said)
    assert list(source) == [f"layer_{n}.key" for n in range(LAYERS)]
    for number, words in enumerate(arrays):
        array = source[f"layer_{number}.key"]
        assert (array.shape, array.to_numpy().tobytes()) == ((1, TOKENS, DIMS), words.tobytes())
    assert any("taken as K alone" in note for note in source.notes)


def test_latent_page_with_layer_axis(tmp_path: Path, run: Any) -> None:
    words = drawn(LAYERS, TOKENS, DIMS)
    path = tmp_path / "model@1@0@12ab@bfloat16.pt"
    path.write_bytes(words.tobytes())
    for shape, axes in (("4,-1,24", "ltd"), ("-1,70,24", "ltd"), ("-1,1,70,24", "lhtd")):
        said = run("measure", path, "--shape", shape, "--axes", axes)
        assert "of K alone: nothing is stored as V" in said.out
        run("mnn", "unpack", path, "--shape", shape, "--axes", axes, "-o", tmp_path / "kv.npz", "--force")
        with np.load(tmp_path / "kv.npz") as back:
            assert back["layer_0.key"].tobytes() == words[0].tobytes()


def test_latent_keys_round_trip_through_store_and_frames(tmp_path: Path, run: Any) -> None:
    arrays = folder(tmp_path / "mla", (TOKENS, DIMS), layers=LAYERS)
    (tmp_path / "ids.json").write_text(str(list(range(TOKENS))))
    of_model = ("--fingerprint", "ab" * 32, "--token-ids", tmp_path / "ids.json")
    run("store", "put", tmp_path / "store", tmp_path / "mla", "--axes", "td", *of_model)
    run("store", "get", tmp_path / "store", *of_model, "-o", tmp_path / "got.npz")
    for options in ((), ("--atol", "0")):
        run("diff", tmp_path / "mla", tmp_path / "got.npz", "--axes", "td", *options)
    run("encode", tmp_path / "mla", "--axes", "td", "--codec", "dense", "-o", tmp_path / "frames/")
    frames = kvmnn.open(tmp_path / "frames")
    assert [frames[name].to_numpy().tobytes() for name in frames] == [words.tobytes() for words in arrays]
    run("plan", tmp_path / "mla", "--axes", "td", "--policy", "knorm:keep_ratio=0.5")
    assert "no array of its values" in run("mnn", "pack", tmp_path / "mla", "--axes", "td", "--name", "s", "--backend",
                                           "arm64-fp16", "-o", tmp_path / "out/", code=1).err  # fmt: skip


def test_keys_only_of_several_heads_are_no_prefix(tmp_path: Path, run: Any) -> None:
    keys = np.random.default_rng(1).standard_normal((2, TOKENS, 8)).astype("<f2")
    np.savez(tmp_path / "keys.npz", **{f"layer_{n}.key": keys for n in range(2)})
    (tmp_path / "ids.json").write_text(str(list(range(TOKENS))))
    put = ("store", "put", tmp_path / "store", tmp_path / "keys.npz", "--fingerprint", "ab" * 32)
    said = run(*put, "--token-ids", tmp_path / "ids.json", code=1).err
    assert "layer 0 has no array of its values" in said and "and these have 2" in said
    assert "layer 0 has no array of its values" in run("measure", tmp_path / "keys.npz", code=1).err


def test_latent_axes_with_heads_are_refused(tmp_path: Path, run: Any) -> None:
    np.save(tmp_path / "cache.npy", np.ones((TOKENS, 2, DIMS), "<f2"))
    with pytest.raises(MissingOptionError, match="or no h where one tensor is both"):
        kvmnn.open(tmp_path / "cache.npy", axes="thd")
    with pytest.raises(OptionError, match="axes '2td': expected h"):
        kvmnn.open(tmp_path / "cache.npy", axes="2td")
    folder(tmp_path / "mla", (TOKENS, DIMS), layers=2)
    assert "--axes td takes it as the one tensor of latent attention" in run("measure", tmp_path / "mla", code=2).err


@pytest.mark.parametrize("shape", ["-1,1,24", "70,-1,24", "-1,-1"])
def test_shape_option_accepts_leading_minus(tmp_path: Path, run: Any, shape: str) -> None:
    folder(tmp_path / "mla", (TOKENS, DIMS), layers=1)
    command = ("measure", tmp_path / "mla", "--shape", shape, "--axes", "thd")
    if shape == "-1,-1":
        assert "at most one -1" in run(*command, code=2).err
    else:
        run(*command)
    assert "expected one argument" in run("measure", tmp_path / "mla", "--shape", "--axes", "thd", code=2).err
