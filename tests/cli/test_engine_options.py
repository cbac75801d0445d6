"""Options for caches of other engines: refused without effect, and of two inputs applied to the matching one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import llama_files
import mlx_files
import numpy as np
import pytest
from llama_files import Shape

import kvmnn

DIMS = 64


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sessions in f16 and q8_0, prompt caches in f16 and 8 bits, a model, plain arrays."""
    monkeypatch.chdir(tmp_path)
    for name, kind in (("x", "f16"), ("q", "q8_0")):
        shape = Shape(k_type=kind, v_type=kind, dims=DIMS, value_dims=DIMS)
        Path(f"{name}.session").write_bytes(llama_files.state(Random(3), shape, [12])[0])
    fields = {"attention__head_count_kv": 2, "attention__key_length": DIMS, "block_count": 2}
    Path("m.gguf").write_bytes(llama_files.gguf(**fields))
    for name, bits in (("c", 0), ("g", 8)):
        Path(f"{name}.safetensors").write_bytes(mlx_files.cache(Random(3), mlx_files.Shape(bits=bits))[0])
    np.savez("plain.npz", **{f"layer_0.{part}": np.ones((2, 5, 8), np.float16) for part in ("key", "value")})
    return tmp_path


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("verb", ["measure", "mnn unpack -o o.npz", "encode -o o/", "inspect"])
@pytest.mark.parametrize(
    ("said", "about"),
    [
        ("c.safetensors --kv-heads 2", "packed files of MNN's and caches of llama.cpp"),
        ("c.safetensors --model m.gguf", "packed files of MNN's and caches of llama.cpp"),
        ("c.safetensors --part stream=0", "caches of llama.cpp"),
        ("c.safetensors --part sequence=0", "caches of llama.cpp"),
        ("c.safetensors --part sliding-window", "caches of llama.cpp"),
        ("c.safetensors --raw-blocks", "quantised K and V"),
        ("x.session --kv-heads 2 --raw-blocks", "quantised K and V"),
    ],
)
def test_engine_option_without_effect_is_refused(here: Path, run, verb: str, said: str, about: str) -> None:
    found = flat(run(*verb.split(), *said.split(), code=2).err)
    path = said.split()[0]
    assert f"is about {about}, and {path} holds none" in found or f"nothing of what is said about {path}" in found
    assert not list(here.glob("o*"))


def test_raw_blocks_apply_to_quantised_caches_only(here: Path, run) -> None:
    assert "bytes [2, 5, " in run("inspect", "g.safetensors", "--raw-blocks").out
    assert "bytes [12, 4, 34]" in run("inspect", "q.session", "--raw-blocks").out
    run("encode", "q.session", "x.session", "--raw-blocks", "--kv-heads", 2, "-o", "both/")


def test_diff_option_applies_to_the_matching_input(here: Path, run) -> None:
    run("mnn", "unpack", "x.session", "--kv-heads", 2, "-o", "x.npz")
    assert "equal" in run("diff", "x.npz", "x.session", "--kv-heads", 2, "--part", "stream=0").out
    run("encode", "q.session", "--raw-blocks", "-o", "blocks/")
    run("encode", "q.session", "-o", "whole/")
    for frames in ("blocks", "whole"):
        assert "equal" in run("diff", frames, "q.session", "--raw-blocks").out
    refused = run("diff", "x.session", "x.session", "--raw-blocks", code=2).err
    assert "--raw-blocks is about quantised K and V, and x.session x.session holds none" in flat(refused)


@pytest.mark.parametrize("argv", ["plain.npz --axes lhtd", "plain.npz --shape 7,3", "c.safetensors --axes htd"])
def test_diff_axes_matching_neither_input_are_refused(here: Path, run, argv: str) -> None:
    path, *said = argv.split()
    refused = flat(run("diff", path, path, *said, code=2).err)
    assert f"{said[0]} fits neither {path} nor {path}: their arrays have another number of axes" in refused
    run("diff", "plain.npz", "plain.npz", "--axes", "htd")


def test_diff_inverts_transforms_of_each_input(unpacked: Callable[[str], Path], run) -> None:
    """One text by one model: K of the quantised cache is rotated, K of the other is not."""
    folder = unpacked("llama") / "b"
    rotated, plain = folder / "q4_fa.session.bin", folder / "f16.session.bin"
    diff = ("--kv-heads", 1, "--atol", 0.5)
    for first, second in ((rotated, plain), (plain, rotated)):
        above = {}
        for undo in ("none", "k-rotation", "k-rotation,k-order"):
            document = json.loads(run("diff", first, second, *diff, "--invert", undo, "--json", code=1).out)
            above[undo] = {each["above"] for each in document["layers"] if each["part"] == "key"}
        assert above["k-rotation"] == above["k-rotation,k-order"]
        assert max(above["k-rotation"]) < 200 < 3000 < min(above["none"])
        found = run("diff", first, second, *diff, "--invert", "k-rotation", code=1)
        said = flat(found.err)
        assert f"{rotated}: undone: k-rotation" in said and f"{plain}: undone: nothing, as nothing of that was" in said
        both = flat(run("diff", first, second, *diff, "--invert", "k-rotation,k-order", code=1).err)
        assert f"{rotated}: undone: k-rotation, k-order" in both and f"{plain}: undone: k-order" in both
    one = ("--tensor", "layer_0.key", "--kv-heads", 1, "--invert")
    assert "equal: 6,720 words" in run("diff", plain, plain, *one, "k-order").out
    refused = flat(run("diff", plain, plain, *diff, "--invert", "k-rotation", code=2).err)
    assert "undo k-rotation: was done to neither of" in refused and "expected k-order" in refused


def test_diff_does_not_invert_twice(here: Path, run) -> None:
    run("mnn", "unpack", "q.session", "--kv-heads", 2, "--invert", "k-rotation", "-o", "q.npz")
    found = run("diff", "q.session", "q.npz", "--kv-heads", 2, "--invert", "k-rotation")
    assert "q.session: undone: k-rotation" in found.err and "q.npz: undone: nothing" in found.err
    assert "equal" in found.out


def test_part_beyond_batch_of_one_is_refused(here: Path, run) -> None:
    arrays = {f"layer_0.{part}": np.ones((1, 2, 5, 8), np.float16) for part in ("key", "value")}
    np.savez("one.npz", **arrays)
    refused = run("measure", "one.npz", "--part", "batch=1", code=2).err
    assert "has no text 1 in its batch, which is of one text: leave --part batch (batch=) out" in flat(refused)


@pytest.mark.parametrize("jobs", [(), ("--jobs", 1)])
def test_encode_part_of_batch_notes_missing_file(here: Path, run, jobs: tuple[object, ...]) -> None:
    data, expected = mlx_files.cache(Random(3), mlx_files.Shape(batch=3))
    Path("b.safetensors").write_bytes(data)
    noted = run("encode", "b.safetensors", "--part", "batch=1", *jobs, "-o", "o/" if jobs else "o.frames")
    frames = "o/b.safetensors.frames" if jobs else "o.frames"
    said = "arrays are encoded, and decode will not write the file: --part batch"
    assert said in ("\n".join(json.loads(noted.out)["notes"]) if jobs else noted.err)
    assert "the same file" not in noted.out
    run("verify", frames)
    run("decode", frames, "-o", "back.npz")
    with np.load("back.npz") as back:
        assert all(back[name].tobytes() == expected[name][1].tobytes() for name in expected)


def test_open_part_of_passthrough_batch_is_not_the_file(here: Path) -> None:
    data, _ = mlx_files.cache(Random(3), mlx_files.Shape(batch=3))
    Path("b.safetensors").write_bytes(data)
    whole = kvmnn.formats.ReadOptions(engine=kvmnn.formats.EngineOptions(passthrough=True))
    assert "kvmnn.file" in kvmnn.open("b.safetensors", whole).metadata
    assert "kvmnn.file" not in kvmnn.open("b.safetensors", whole, batch=1).metadata


@pytest.mark.parametrize("how", [("--jobs", 2), ("--dask", "tcp://127.0.0.1:1")])
def test_jobs_with_url_is_refused(here: Path, run, how: tuple[object, ...]) -> None:
    for verb in (("measure",), ("inspect",), ("verify",), ("encode", "-o", "o/")):
        refused = run(*verb, *how, "x.session", "s3://name:word@bucket/x.zarr", code=2).err
        said = "s3://bucket/x.zarr: --jobs and --dask take files and folders; without them stores at URLs"
        assert said in flat(refused)


@pytest.mark.parametrize("argv", ["decode {} -o o.npz", "verify {}"])
@pytest.mark.parametrize("path", ["x.session", "c.safetensors"])
def test_decode_engine_cache_is_refused_by_name(here: Path, run, argv: str, path: str) -> None:
    said = run(*argv.format(path).split(), code=1).err
    assert f"{path}: is a cache of another engine, no frames: kvmnn encode makes frames of it" in flat(said)


def test_verify_against_folder_does_not_suggest_jobs(here: Path, run) -> None:
    Path("folder").mkdir()
    Path("folder/c.safetensors").write_bytes(Path("c.safetensors").read_bytes())
    run("encode", "c.safetensors", "-o", "f/")
    said = run("verify", "f", "--against", "folder", code=1).err
    assert "name the file itself" in flat(said) and "--jobs" not in said
