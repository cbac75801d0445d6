"""No file appears, and no message about it, before it reads back as it was written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import compressor_files
import numpy as np
import pytest

import kvmnn
from kvmnn.bundle import manifest
from kvmnn.files.atomic import StagedFile

KEYS = np.random.default_rng(3).standard_normal((4, 30, 32)).astype(np.float16)
OUTPUTS = ["out.npy", "out.npz", "out.safetensors", "out.bin", "out/"]


@pytest.fixture
def frame(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    np.save("k.npy", KEYS)
    run("encode", "k.npy", "-o", "k.frame", "--chunk-bytes", "4K")


def lossy(monkeypatch, change):
    """Files that lose what they are given, as `change(data)` says, without a word."""
    write = StagedFile.write

    def forget(self, data, /):
        write(self, change(bytes(data)))
        return len(data)

    monkeypatch.setattr(StagedFile, "write", forget)


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 1000 else data


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("change", [flipped, lambda data: data[:1000]], ids=["flipped", "cut"])
def test_decode_verifies_its_output(frame, run, monkeypatch, output, change):
    lossy(monkeypatch, change)
    error = run("decode", "k.frame", "-o", output, code=1).err
    assert re.match(r"kvmnn: error: \S*/out\S*: (array 'k': its bytes do not read back|does not read back: )", error)
    assert ".tmp" not in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["k.frame", "k.frame.json", "k.npy"]


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_compressor_commands_verify_their_output(tmp_path, monkeypatch, run, suffix):
    monkeypatch.chdir(tmp_path)
    compressor_files.checkpoint(Path("c.pth"), compressor_files.weights(1, head_dim=8))
    np.savez("kv.npz", **{f"layer_0.{part}": KEYS[..., :8].astype(np.float32) for part in ("key", "value")})
    run("compressor", "convert", "c.pth", "w.bin")
    for argv in (
        ["compressor", "export", "w.bin", "-o"],
        ["compressor", "run", "w.bin", "kv.npz", "--axes", "htd", "-o"],
    ):
        run(*argv, f"good.{suffix}", "-f")
        with monkeypatch.context() as broken:
            lossy(broken, lambda data: data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 200 else data)
            assert "read back" in run(*argv, f"out.{suffix}", code=1).err
        assert not list(Path.cwd().glob("out*"))


@pytest.mark.parametrize("output", OUTPUTS)
def test_unpack_verifies_its_output(frame, run, monkeypatch, output):
    run("mnn", "unpack", "k.npy", "-o", f"good.{output}")
    lossy(monkeypatch, flipped)
    assert "read back" in run("mnn", "unpack", "k.npy", "-o", output, code=1).err
    assert not Path(output).exists()


@pytest.mark.parametrize("output", OUTPUTS)
def test_decode_wrong_manifest_hash_is_named(frame, run, output):
    document = json.loads(Path("k.frame.json").read_text())
    document["arrays"][0]["sha256"] = "0" * 64
    Path("k.frame.json").write_text(json.dumps(document))
    error = run("decode", "k.frame", "-o", output, code=1).err
    assert "array 'k': its bytes do not match the manifest's sha256" in error
    assert not Path(output).exists()


@pytest.mark.parametrize("kind", ["<f2", ">f2", "<i2", "<u2", "<f4", ">f4", ">u4", "|u1"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_decode_every_type_is_verified(frame, run, kind, output):
    np.save("a.npy", KEYS.view(f"u{kind[2]}").astype(kind))
    run("encode", "a.npy", "-o", "a.frame", "--dtype", "fp32" if kind[2] == "4" else "bf16")
    assert "LOSSLESS (read back" in run("decode", "a.frame", "-o", output).out


def test_decode_without_manifest_is_verified(frame, run, monkeypatch):
    Path("lone.frame").write_bytes(kvmnn.encode(KEYS))
    lossy(monkeypatch, flipped)
    assert "read back" in run("decode", "lone.frame", "-o", "out.npy", code=1).err
    assert "LOSSLESS" not in run("decode", "lone.frame", "-o", "/dev/null").out


def test_encode_verifies_its_output(frame, run, monkeypatch):
    lossy(monkeypatch, flipped)
    for output in ("new.frame", "new/"):
        assert "does not read back as it was written" in run("encode", "k.npy", "-o", output, code=1).err
        assert not Path(output).exists()
    assert "not verified" in run("encode", "k.npy", "-o", "new.frame", "--no-verify").out


def test_encode_verifies_its_manifest(frame, run, monkeypatch):
    whole = manifest.dump_manifest
    monkeypatch.setattr(manifest, "dump_manifest", lambda document: whole(document).replace(b'"k"', b'"q"'))
    assert (
        "new.frame.json: does not read back as it was written" in run("encode", "k.npy", "-o", "new.frame", code=1).err
    )
    monkeypatch.setattr(manifest, "dump_manifest", lambda document: whole(document)[:-4])
    assert "new.frame.json: does not read back: " in run("encode", "k.npy", "-o", "new.frame", code=1).err
    assert not Path("new.frame").exists()
