"""Raw blocks and metadata of engine caches in outputs that cannot hold all of them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import llama_files
import mlx_files
import numpy as np
import pytest
from llama_files import Shape

import kvmnn


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sessions in f16 and q8_0, a prompt cache of 8 bits."""
    monkeypatch.chdir(tmp_path)
    for name, kind in (("x", "f16"), ("q", "q8_0")):
        shape = Shape(k_type=kind, v_type=kind)
        Path(f"{name}.session").write_bytes(llama_files.state(Random(3), shape, [12])[0])
    Path("g.safetensors").write_bytes(mlx_files.cache(Random(3), mlx_files.Shape(bits=8))[0])
    return tmp_path


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("path", ["q.session", "g.safetensors"])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_raw_blocks_of_unpack_are_read_again(here: Path, run, path: str, suffix: str) -> None:
    out = f"blocks{suffix}"
    run("mnn", "unpack", path, "--raw-blocks", "-o", out)
    listed = run("inspect", path, "--raw-blocks").out.splitlines()[1:]
    assert run("inspect", out).out.splitlines()[1:] == listed and ": bytes [" in listed[1]
    run("encode", out, "-o", "f/")
    for blocks in (out, "f"):
        assert "equal" in run("diff", blocks, path, "--raw-blocks").out
    assert "holds bytes, not the numbers of K or V" in flat(run("measure", out, code=1).err)
    assert "holds K and V" in run("plan", out, code=2).err


def test_encode_raw_bytes_need_a_dtype(here: Path, run) -> None:
    np.savez("bytes.npz", **{"layer_0.key": np.zeros((2, 3, 4), np.uint8)})
    assert "raw bytes need a dtype" in run("encode", "bytes.npz", "-o", "o/", code=2).err
    why = "holds no array that can be encoded: member 'layer_0.key.npy': raw bytes need a dtype (--dtype fp16, bf16"
    assert why in flat(run("inspect", "bytes.npz", code=1).err)
    run("mnn", "unpack", "q.session", "--raw-blocks", "-o", "folder/")
    assert "folder/layer_0.key.npy: raw bytes need a dtype" in flat(run("inspect", "folder", code=1).err)


def test_decode_to_folder_notes_lost_metadata(here: Path, run) -> None:
    run("encode", "x.session", "--kv-heads", 2, "-o", "x.zarr")
    run("encode", "x.session", "--kv-heads", 2, "--part", "stream=0", "-o", "f/")
    said = "does not say of what engine it is, nor which tokens it holds: .safetensors and .npz do"
    for frames in ("x.zarr", "f"):
        assert f"folder/ {said}" in flat(run("decode", frames, "-o", "folder/", "-f").err)
        assert f"folder {said}" in json.loads(run("decode", frames, "-o", "folder", "-f", "--json").out)["notes"]
        for out in ("x.npz", "x.safetensors"):
            assert run("decode", frames, "-o", out, "-f").err == ""
            cache = kvmnn.open(out).engine_cache
            assert cache is not None and cache.engine == "llama.cpp" and cache.token_ids is not None


def test_decode_to_npz_omits_long_token_ids_only(here: Path, run) -> None:
    """The comment of an archive has at most 64 KiB."""
    tokens = 20_000
    shape = Shape(layers=1, heads=1, dims=2, value_dims=2)
    Path("long.session").write_bytes(llama_files.state(Random(3), shape, [tokens])[0])
    for out in ("l.zarr", "l/"):
        run("encode", "long.session", "--kv-heads", 1, "--part", "stream=0", "-o", out)
        assert (
            "long.npz does not say the token ids, .safetensors does" in run("decode", out, "-o", "long.npz", "-f").err
        )
        cache = kvmnn.open("long.npz").engine_cache
        assert cache is not None and cache.tokens == tokens and cache.token_ids is None
