"""Pipes, devices and sockets where files are expected: read once or refused, never waited for without end."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace

import compressor_files
import hf_files
import llama_files
import mlx_files
import numpy as np
import pytest
from hostile_files import write_dump

import kvmnn
from kvmnn.cli import main
from kvmnn.errors import LimitError, SourceError
from kvmnn.files.mapped_file import MappedFile
from kvmnn.formats.mnn import unpack

Run = Callable[..., SimpleNamespace]
WORDS = np.arange(3 * 2 * 2, dtype=np.float16).reshape(3, 2, 2)


def fed(pipe: Path, data: bytes) -> threading.Thread:
    """A named pipe into which `data` is written once somebody reads."""
    os.mkfifo(pipe)

    def write() -> None:
        with suppress(BrokenPipeError), pipe.open("wb") as stream:
            stream.write(data)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors"])
def test_verb_array_file_from_pipe_is_read_once(tmp_path: Path, name: str, run: Run) -> None:
    np.savez(tmp_path / "whole.npz", k=WORDS)
    np.save(tmp_path / "k.npy", WORDS)
    run("encode", tmp_path / "k.npy", "-o", tmp_path / "k.frame", "-q")
    run("decode", tmp_path / "k.frame", "-o", tmp_path / "whole.safetensors", "-q")
    whole = {"a.npy": "k.npy", "a.npz": "whole.npz", "a.safetensors": "whole.safetensors"}[name]
    thread = fed(tmp_path / name, (tmp_path / whole).read_bytes())
    (array,) = kvmnn.open(tmp_path / name).arrays
    assert array.to_numpy().tobytes() == WORDS.tobytes()
    thread.join(10)


@pytest.fixture(params=["llama", "mlx", "npy", "npz", "safetensors", "torch"])
def unnamed(request: pytest.FixtureRequest, tmp_path: Path) -> bytes:
    """A file that says what it is, whatever its name."""
    if request.param == "llama":
        return llama_files.state(Random(2), llama_files.Shape(), [9])[0]
    if request.param == "mlx":
        return mlx_files.cache(Random(2), mlx_files.Shape())[0]
    if request.param in ("npz", "safetensors"):
        words = WORDS.transpose(1, 0, 2)
        source = kvmnn.open({"layer_0.key": words, "layer_0.value": words})
        path = tmp_path / f"whole.{request.param}"
        unpack(source, str(path))
        return path.read_bytes()
    if request.param == "npy":
        np.save(tmp_path / "k.npy", WORDS)
        return (tmp_path / "k.npy").read_bytes()
    return hf_files.save(tmp_path / "c.pt", hf_files.dynamic_cache(hf_files.pairs(1))).read_bytes()


def test_verb_unnamed_pipe_is_read_once(tmp_path: Path, unnamed: bytes, run: Run) -> None:
    """As in ``<(...)``: what tells formats apart and what is read come out of one reading."""
    frames, pipe = tmp_path / "frames", tmp_path / "p"
    calls: list[list[object]] = [
        ["encode", pipe, "-o", f"{frames}/"],
        ["inspect", pipe],
        ["verify", frames, "--against", pipe],
    ]
    if not unnamed.startswith(b"\x93NUMPY"):  # one array is of no layer
        calls.append(["measure", pipe])
    for argv in calls:
        thread = fed(pipe, unnamed)
        run(*argv)
        thread.join(10)
        pipe.unlink()


def test_open_prompt_cache_from_named_pipe_is_recognized(tmp_path: Path, run: Run) -> None:
    """Its tensors as they lie there have room after the tokens."""
    data, expected = mlx_files.cache(Random(2), mlx_files.Shape())
    fed(tmp_path / "c.safetensors", data)
    source = kvmnn.open(tmp_path / "c.safetensors")
    assert all(source[name].to_numpy().tobytes() == words.tobytes() for name, words in expected.items())
    fed(tmp_path / "d.safetensors", data)
    run("encode", tmp_path / "d.safetensors", "-o", tmp_path / "f/")
    run("decode", tmp_path / "f", "-o", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    fed(tmp_path / "e.safetensors", bytes(range(100)))
    with pytest.raises(SourceError, match=r"e\.safetensors: a header of \d+ bytes is above the limit"):
        kvmnn.open(tmp_path / "e.safetensors", dtype="fp16")


def test_inspect_standard_input_is_recognized(unnamed: bytes, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(unnamed)))
    assert "to encode" in run("inspect", "-").out


def test_inspect_frame_from_pipe_is_recognized(tmp_path: Path, run: Run) -> None:
    fed(tmp_path / "p", kvmnn.encode(WORDS))
    assert "fp16 frame: 12 words" in run("inspect", tmp_path / "p").out


def test_inspect_engine_options_apply_to_pipe(tmp_path: Path, run: Run) -> None:
    shape = llama_files.Shape(k_type="q8_0", v_type="q8_0")
    fed(tmp_path / "p", llama_files.state(Random(2), shape, [9])[0])
    assert "layer_1.value: bytes [9, 2, 34]" in run("inspect", tmp_path / "p", "--raw-blocks").out


def test_open_pipe_above_limit_is_refused(tmp_path: Path) -> None:
    fed(tmp_path / "a.npy", bytes(1 << 22))
    with pytest.raises(LimitError, match=r"a\.npy: holds more than the limit of 1000000 bytes"):
        kvmnn.open(tmp_path / "a.npy", kvmnn.formats.ReadOptions(max_bytes=1_000_000))
    fed(tmp_path / "a", bytes(1 << 22))
    with pytest.raises(LimitError, match=r"a: holds more than the limit of 1000000 bytes"):
        kvmnn.open(tmp_path / "a", kvmnn.formats.ReadOptions(max_bytes=1_000_000, dtype="fp16"))


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_mapped_file_device_is_refused(device: str) -> None:
    with pytest.raises(SourceError, match="is a device"):
        MappedFile(device)


def test_mapped_file_socket_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.npy"))
        with pytest.raises(SourceError, match="cannot be read"):
            kvmnn.open(tmp_path / "s.npy")


@pytest.mark.parametrize("name", ["meta_t0_3.json", "k_t0_3.bin"])
def test_verb_dump_with_pipe_inside_does_not_block(tmp_path: Path, name: str, run: Run) -> None:
    write_dump(tmp_path / "dump", WORDS)
    (tmp_path / "dump" / name).unlink()
    os.mkfifo(tmp_path / "dump" / name)
    for verb in ("encode", "inspect", "measure"):
        output = ["-o", tmp_path / "out/"] if verb == "encode" else []
        assert name in run(verb, tmp_path / "dump", *output, code=1).err or verb == "measure"


def test_inspect_named_pipe_is_read_once(tmp_path: Path, run: Run) -> None:
    np.save(tmp_path / "k.npy", WORDS)
    fed(tmp_path / "p.npy", (tmp_path / "k.npy").read_bytes())
    assert "fp16" in run("inspect", tmp_path / "p.npy").out


def test_verb_token_ids_from_pipe_are_read_once(tmp_path: Path, run: Run) -> None:
    """As in ``--token-ids <(...)``: what a verb needs twice comes once."""
    words = WORDS.transpose(1, 0, 2)
    np.savez(tmp_path / "kv.npz", **{"layer_0.key": words, "layer_0.value": words})
    calls = {
        "put": ["store", "put", tmp_path / "S", tmp_path / "kv.npz", "--fingerprint", "m"],
        "match": ["store", "match", tmp_path / "S"],
        "pack": [
            "mnn",
            "pack",
            tmp_path / "kv.npz",
            "-o",
            tmp_path / "sys/",
            "--backend",
            "arm64-fp16",
            "--name",
            "sys",
        ],
        "unpack": ["mnn", "unpack", tmp_path / "sys", "-o", tmp_path / "back.npz"],
        "verify": ["verify", tmp_path / "frames", "--against", tmp_path / "sys"],
    }
    for name, argv in calls.items():
        if name == "verify":
            run("encode", tmp_path / "sys", "-o", tmp_path / "frames/")
        thread = fed(tmp_path / name, b"[1, 2, 3]")
        run(*argv, "--token-ids", tmp_path / name)
        thread.join(10)


def test_store_with_pipe_inside_does_not_block(tmp_path: Path, run: Run) -> None:
    words = WORDS.transpose(1, 0, 2)
    np.savez(tmp_path / "kv.npz", **{"layer_0.key": words, "layer_0.value": words})
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    text = ["--token-ids", tmp_path / "ids.json"]
    run("store", "put", tmp_path / "good", tmp_path / "kv.npz", *text, "--fingerprint", "m")
    for file in [path for path in (tmp_path / "good").rglob("*") if path.is_file()]:
        for action in (["ls"], ["match", *text], ["get", *text, "-o", tmp_path / "o.npz", "-f"], ["verify"]):
            store = tmp_path / "store"
            shutil.copytree(tmp_path / "good", store)
            pipe = store / file.relative_to(tmp_path / "good")
            pipe.unlink()
            os.mkfifo(pipe)
            assert main([*map(str, ["store", action[0], store, *action[1:]])]) in (0, 1)
            shutil.rmtree(store)


def test_compressor_weights_from_pipe_are_read_once(tmp_path: Path, run: Run) -> None:
    data = compressor_files.weight_file(count=6, head_dim=2, factor=2)
    keys, values = np.random.default_rng(1).normal(size=(2, 1, 1, 6, 2)).astype(np.float32)
    np.savez(tmp_path / "kv.npz", k=keys, v=values)
    thread = fed(tmp_path / "w.bin", data)
    run("compressor", "run", tmp_path / "w.bin", tmp_path / "kv.npz", "-o", tmp_path / "out.npz", "--axes", "lhtd")
    thread.join(10)
    (beside,) = tmp_path.glob("out.npz.*")
    assert hashlib.sha256(data).hexdigest() in beside.read_text()
