"""One function opens any input: files of arrays, frames, bundles, raw words, standard input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import llama_files
import mlx_files
import numpy as np
import pytest

import kvmnn
from kvmnn import bundle, formats
from kvmnn.errors import FrameError, OptionError, SourceError
from kvmnn.files import mapped_file
from kvmnn.files.mapped_file import FileHead
from kvmnn.formats import EngineOptions, ReadOptions

KEYS = np.random.default_rng(7).standard_normal((2, 3, 4)).astype(np.float16)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("keys.npy", KEYS)
    np.savez("both.npz", k=KEYS, v=-KEYS)
    bundle.encode_source(kvmnn.open("keys.npy"), "keys.frame")
    bundle.encode_source(kvmnn.open("both.npz"), "both/")
    Path("raw.bin").write_bytes(KEYS.tobytes())
    return tmp_path


@pytest.mark.parametrize("path", ["keys.npy", "keys.frame", "keys.frame.json"])
def test_open_any_input_gives_the_same_array(here, path):
    source = kvmnn.open(path)
    assert source.inputs == (path,)
    np.testing.assert_array_equal(source["keys"].to_numpy(), KEYS)


def test_open_bundle_and_selected_tensors(here):
    assert kvmnn.open("both").names == kvmnn.open(here / "both" / "manifest.json").names == ("k", "v")
    source = kvmnn.open("both", tensors=["v"])
    assert source.names == ("v",)
    np.testing.assert_array_equal(source["v"].to_numpy(), -KEYS)
    with pytest.raises(SourceError, match="no array named 'x'; it has 'k', 'v'"):
        kvmnn.open("both", tensors=("x",))


def test_open_raw_words_need_dtype(here):
    with pytest.raises(SourceError, match="raw bytes need a dtype"):
        kvmnn.open("raw.bin")
    np.testing.assert_array_equal(kvmnn.open("raw.bin", dtype="fp16")["raw"].to_numpy(), KEYS.ravel())


def test_open_frames_as_raw_files(here):
    source = kvmnn.open("keys.frame", dtype="fp16", decode_frames=False)
    assert source["keys"].to_numpy().tobytes() == Path("keys.frame").read_bytes()
    with pytest.raises(SourceError, match="is a kvmnn bundle of frames: decode it"):
        kvmnn.open("both", decode_frames=False)


def test_open_damaged_frame_is_refused(here):
    Path("cut.frame").write_bytes(Path("keys.frame").read_bytes()[:-1])
    with pytest.raises(FrameError, match=r"cut\.frame"):
        kvmnn.open("cut.frame")


def test_open_keywords_override_options(here):
    options = ReadOptions(dtype="bf16", tensors=("v",))
    assert [(array.name, array.dtype) for array in kvmnn.open("both.npz", options).arrays] == [("v", "bf16")]
    found = kvmnn.open("both.npz", options, dtype="fp16").arrays
    assert [(array.name, array.dtype) for array in found] == [("v", "fp16")]


def test_open_standard_input(here):
    script = "import kvmnn; print(kvmnn.open('-')['stdin'].to_numpy().tobytes().hex())"
    with open("keys.npy", "rb") as file:
        done = subprocess.run([sys.executable, "-c", script], stdin=file, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == KEYS.tobytes().hex()


def test_classify_path_of_inputs(here):
    kinds = {
        "keys.npy": "arrays", "x.SAFETENSORS": "arrays", "x.k": "arrays", ".": "arrays", "keys.frame": "frames",
        "both": "frames", "both/manifest.json": "frames", "x.frame": "frames", "raw.bin": None, "-": None,
    }  # fmt: skip
    assert {path: formats.classify_path(path) for path in kinds} == kinds
    Path("raw.bin.json").touch()
    assert formats.classify_path("raw.bin") == "frames"


def test_detect_formats_are_mutually_exclusive(here):
    names = [entry.name for entry in formats.FORMATS]
    assert names[-2:] == ["raw", "folder"]
    paths = ("keys.npy", "both.npz", "keys.frame", "both", "raw.bin", ".", "s3://bucket/x.zarr")
    detected = [formats.detect(path).name for path in paths]
    assert detected == ["npy", "npz", "frames", "frames", "raw", "npy", "zarr"]


def test_detect_reads_head_of_file_once(here, monkeypatch):
    opened = []

    def counted(path, *arguments):
        opened.append(path)
        return open(path, *arguments)

    monkeypatch.setattr(mapped_file, "open", counted, raising=False)
    kvmnn.open("keys.npy")
    assert opened == ["keys.npy"] * 2  # for its head, and to map it


@pytest.mark.parametrize("data", [b"", b"P", b"PK\3\4", b"\x80\x02", b"nsgg", b"\xff" * 4096], ids=repr)
def test_detect_arbitrary_heads_raise_nothing(tmp_path, data):
    for suffix in ("", ".npy", ".npz", ".safetensors", ".k", ".frame", ".pt"):
        path = tmp_path / f"x{suffix}"
        path.write_bytes(data)
        head = FileHead.from_path(str(path))
        assert head.kind == "file" and head.data == data
        assert all(isinstance(entry.detect(head), bool) for entry in formats.FORMATS)


def test_find_array_format_by_suffix():
    for suffix, many in ((".npy", False), (".npz", True), (".safetensors", True)):
        assert formats.ARRAY_FORMATS[suffix].is_multi_array is many
    assert formats.find_array_format("X.NPZ") is formats.ARRAY_FORMATS[".npz"]
    assert formats.find_array_format("x.frame") is None


def test_open_conflicting_kv_heads_are_refused(tmp_path):
    rng = Random(3)
    prompt = tmp_path / "c.safetensors"
    prompt.write_bytes(mlx_files.cache(rng, mlx_files.Shape(dims=32, value_dims=32))[0])
    heads = kvmnn.open(prompt).engine_cache.kv_heads
    plain = tmp_path / "plain.npz"
    keys = np.ones((1, heads, 3, 4), np.float16)
    np.savez(plain, **{"layer_0.key": keys, "layer_0.value": keys})
    for cache in (prompt, plain, [(keys, keys)]):
        assert kvmnn.open(cache, kv_heads=heads).names == kvmnn.open(cache).names
        with pytest.raises(OptionError, match=rf"has {heads} kv heads, not 7 \(kv_heads\)"):
            kvmnn.open(cache, kv_heads=7)
    np.save(tmp_path / "a.npy", np.ones((2, 3), np.float16))
    with pytest.raises(OptionError, match="nothing says which axis its heads are: leave kv_heads out"):
        kvmnn.open(tmp_path / "a.npy", kv_heads=2)
    session = tmp_path / "x.session"
    session.write_bytes(llama_files.state(rng, llama_files.Shape(), [12])[0])
    whole = ReadOptions(engine=EngineOptions(passthrough=True))
    assert sorted(kvmnn.open(session, whole, kv_heads=2)) == sorted(kvmnn.open(session, kv_heads=2))


@pytest.mark.parametrize(
    ("array_dtype", "dtype", "noted"), [("<f2", "bf16", True), ("<u2", "bf16", False), ("<f2", "fp16", False)]
)
def test_open_reinterpreted_dtype_is_noted(tmp_path, array_dtype, dtype, noted):
    np.savez(tmp_path / "a.npz", k=np.ones((2, 3, 4), array_dtype))
    notes = kvmnn.open(tmp_path / "a.npz", dtype=dtype).notes
    assert notes == (["k: its float16 words are taken as bf16, other numbers (--dtype)"] if noted else [])
