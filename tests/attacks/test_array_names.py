"""Names of arrays that formats, file systems and terminals cut, alter or misinterpret."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import kvmnn
from kvmnn.arrays.source import merge_sources
from kvmnn.errors import SourceError
from kvmnn.files.file_names import make_file_names

BAD = {
    "x\0one": r"has the control character '\x00' in it",
    "x\x1b]0;owned\x07": r"has the control character '\x1b' in it",
    "x\ny": r"has the control character '\n' in it",
    "x\x9b31m": r"has the control character '\x9b' in it",
    "x\ud800": r"has the lone surrogate '\ud800' in it",
    "x" * 256: "has 256 bytes, above the limit of 255",
    "\u00e9" * 128: "has 256 bytes, above the limit of 255",
    "x" * 100_000: "has 100,000 bytes, above the limit of 255",
}
WORDS = np.arange(12, dtype=np.float16)


def tensors(path: Path, *names: str) -> None:
    """A .safetensors file of arrays of these names, each of words of its own."""
    header, data = {}, b""
    for number, name in enumerate(names):
        words = (WORDS + number).tobytes()
        header[name] = {"dtype": "F16", "shape": [3, 4], "data_offsets": [len(data), len(data) + len(words)]}
        data += words
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", BAD, ids=[str(number) for number in range(len(BAD))])
def test_array_name_invalid_is_refused(here, run, name):
    tensors(Path("a.safetensors"), "good", name)
    tensors(Path("b.safetensors"), "good", "other")
    run("encode", "b.safetensors", "-o", "b.frames/")
    manifest = Path("b.frames/manifest.json")
    manifest.write_text(manifest.read_text().replace('"other"', json.dumps(name)))
    for argv in (
        ["encode", "a.safetensors", "-o", "out/"],
        ["inspect", "a.safetensors"],
        ["decode", "b.frames", "-o", "out.npz"],
        ["verify", "b.frames"],
        ["inspect", "b.frames"],
    ):
        error = run(*argv, code=1).err
        assert error.startswith("kvmnn: error: ")
        assert BAD[name] in error
        assert error.count("\n") == 1
        assert not set(error.strip()) & set("\0\x1b\x07\x9b\n\ud800")
        assert len(error) < 250
    assert not Path("out").exists()
    assert not Path("out.npz").exists()


def test_array_names_with_nul_are_refused(here, run):
    """Zip cuts names at NUL: both arrays would become one member."""
    tensors(Path("a.safetensors"), "x\0one", "x\0two")
    run("encode", "a.safetensors", "-o", "a.frames/", code=1)
    assert not Path("a.frames").exists()


PATHS = ["../../evil", "/evil", "a//b", "a/./b", "a/", "..", ".", "a\\b", "C:/evil"]


@pytest.mark.parametrize("name", PATHS)
def test_array_name_that_is_a_path_gets_a_safe_file(here, run, name):
    tensors(Path("a.safetensors"), name, "plain")
    said = run("encode", "a.safetensors", "-o", "a.frames/").out
    (file,) = {path.name for path in Path("a.frames").iterdir()} - {"manifest.json", "plain.frame"}
    assert f"files of other names than their arrays: {name!r} in {file}" in said
    error = run("decode", "a.frames", "-o", "out.npz", code=1).err
    assert f"the array name {name!r} is no plain relative path: use .safetensors" in error
    assert not Path("out.npz").exists()
    said = run("decode", "a.frames", "-o", "out/").out
    (file,) = {path.name for path in Path("out").iterdir()} - {"plain.npy"}
    assert f"files of other names than their arrays: {name!r} in {file}" in said
    assert np.load(f"out/{file}").tobytes() == WORDS.tobytes()
    assert sorted(path.name for path in here.iterdir()) == ["a.frames", "a.safetensors", "out"]
    assert "LOSSLESS" in run("decode", "a.frames", "-o", "back.safetensors").out
    assert kvmnn.open("back.safetensors").names == (name, "plain")


def test_array_names_in_folders_round_trip_npz(here, run):
    tensors(Path("a.safetensors"), "run/layer_0/k", "run.v", "", "\u043a\u043b\u044e\u0447")
    run("encode", "a.safetensors", "-o", "a.frames/")
    run("decode", "a.frames", "-o", "back.npz")
    with np.load("back.npz") as back:
        assert back.files == ["run/layer_0/k", "run.v", "", "\u043a\u043b\u044e\u0447"]


def test_array_name_ambiguous_in_npz_is_refused(here, run):
    tensors(Path("a.safetensors"), "x", "x.npy")
    run("encode", "a.safetensors", "-o", "a.frames/")
    error = run("decode", "a.frames", "-o", "out.npz", code=1).err
    assert "the array name 'x.npy' would be taken for 'x', which is there, too" in error


def test_file_names_colliding_are_made_unique(here, run):
    names = ["a/b", "a_b", "A_B", "a b", "a_b~2", "...a_b"]
    tensors(Path("a.safetensors"), *names)
    run("encode", "a.safetensors", "-o", "a.frames/")
    document = json.loads(run("decode", "a.frames", "-o", "out/", "--json").out)
    files = {array["name"]: array["file"] for array in document["arrays"]}
    assert len({file.lower() for file in files.values()}) == len(names)
    for number, name in enumerate(names):
        assert np.load(f"out/{files[name]}").tobytes() == (WORDS + number).tobytes()
    run("verify", "a.frames", "--against", "a.safetensors")


def test_file_names_many_collisions_take_linear_time():
    found = make_file_names([chr(0x4E00 + number) for number in range(20_000)] + ["_~7"], ".npy")
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("file", "name"), [(b"k\x1b[31m\n.npy", r"k\x1b[31m\x0a"), (b"k\xff.npy", r"k\xff")])
def test_array_name_from_file_name_is_escaped(here, run, file, name):
    path = os.fsdecode(file)
    try:
        with open(path, "wb") as stream:
            np.save(stream, WORDS)
    except OSError:
        pytest.skip("the file system has no such names")
    source = kvmnn.open(path)
    assert source.names == (name,)
    assert source.notes == [f"the array is called {name}: no name of an array has all that the file's has"]
    run("encode", path, "-o", "k.frame", "-q")
    assert json.loads(Path("k.frame.json").read_text())["arrays"][0]["name"] == name


def test_merge_sources_too_long_name_is_refused(here):
    tensors(Path("a.safetensors"), "x" * 254)
    with pytest.raises(SourceError, match=r"a.safetensors: the array name 'x+...x+~2' has 256 bytes"):
        merge_sources([kvmnn.open("a.safetensors"), kvmnn.open("a.safetensors")])
