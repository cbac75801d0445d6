"""Unknown inputs: the error names the nearest known kind of file."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

import kvmnn
from kvmnn.errors import SourceError
from kvmnn.formats import detection_errors


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.ones(4, np.float16))
    return file.getvalue()


FILES = [
    ("model.onnx", b"\x08\x07\x12\x07pytorch", "an ONNX model (eval, generate and dump-kv take it)"),
    ("model", b"\x08\x07\x12\x07pytorch", "an ONNX model"),
    ("m.kvmp", b"KVMP\x01\0\0\0", "a profile of a model (kvmnn profile inspect shows it)"),
    ("st.kvx", b"KVMNNPX2\3\0\0\0", "an export of a prefix store (kvmnn store import STORE FILE reads it)"),
    (
        "st",
        b"KVMNNPE1\3\0\0\0",
        "an encrypted file of a prefix store (kvmnn store import STORE FILE --key-file KEY reads an export)",
    ),
    ("x.gguf", b"GGUF\3\0\0\0", "a GGUF model (--model takes it, next to a cache of llama.cpp"),
    ("a.txt", "Grüße\n".encode() * 900, "text (eval, generate and dump-kv read it with --text)"),
    ("a.dat", b'{"a": 1}', "JSON"),
    ("llm.mnn", b"\x14\0\0\0", "the graph of an MNN model (--model takes its folder"),
    ("k.data", npy(), "a NumPy array (name it with the suffix .npy)"),
    ("x.zst", b"\x28\xb5\x2f\xfd1234", "a zstd archive"),
    ("st", (20).to_bytes(8, "little") + b'{"k":{}}', "a safetensors file (name it with the suffix .safetensors)"),
]


@pytest.mark.parametrize(("name", "content", "what"), FILES)
def test_unknown_file_error_names_nearest_kind(tmp_path, run, monkeypatch, name, content, what):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    said = run("inspect", name, code=1).err
    assert (
        said.startswith(f"kvmnn: error: {name}: not a file kvmnn knows: it looks like {what}") and said.count("\n") == 1
    )
    with pytest.raises(SourceError, match=r"not a file kvmnn knows: it looks like .*; raw bytes need a dtype"):
        kvmnn.open(name)


def test_compressor_export_of_safetensors_suggests_encode(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.safetensors").write_bytes((20).to_bytes(8, "little") + b'{"k":{}}')
    error = run("compressor", "export", "x.safetensors", code=1).err
    assert (
        "it looks like a safetensors file (kvmnn encode takes one of arrays, kvmnn compressor convert a checkpoint)"
        in error
    )


def test_unknown_file_of_random_bytes_is_refused(tmp_path, run):
    (tmp_path / "x").write_bytes(bytes(range(128, 200)))
    assert "x: not a file kvmnn knows; as a frame: stream 0 at offset 4: " in run("inspect", tmp_path / "x", code=1).err
    (tmp_path / "x").write_bytes(b"")
    assert "x: not a file kvmnn knows: it is empty" in run("inspect", tmp_path / "x", code=1).err
    (tmp_path / "x.frame").write_bytes(b"hello")  # its name says what it should be
    assert "not a file kvmnn knows" not in run("inspect", tmp_path / "x.frame", code=1).err
    (tmp_path / "plain").write_bytes(kvmnn.encode(np.ones(40, np.float16)))
    run("inspect", tmp_path / "plain")


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ([], "it is an empty folder"),
        (["config.json", "llm.mnn"], "it looks like the folder of an MNN model (--model takes it"),
        (["model.onnx"], "it looks like the folder of a model (eval,"),
        (["a.txt", "kv.npz"], "it is a folder with kv.npz: name the file itself"),
        (["a.txt"], "the folder has no manifest.json of frames"),
    ],
)
def test_unknown_folder_error_names_nearest_kind(tmp_path, run, names, what):
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    for verb in ("inspect", "encode"):
        assert f"{tmp_path}: not a file kvmnn knows: {what}" in run(verb, tmp_path, code=1).err


@pytest.mark.parametrize("length", [detection_errors.HEAD_BYTES - 1, detection_errors.HEAD_BYTES])
def test_unknown_text_cut_within_character_is_text(length):
    head = ("ü " * detection_errors.HEAD_BYTES).encode()[: length - 1] + "é".encode()[:1]
    assert ("text" in detection_errors.explain_unknown_file("x", head)) is (length == detection_errors.HEAD_BYTES)
