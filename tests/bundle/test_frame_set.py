"""Frames opened: with a manifest next to them or above them, or alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bundles import KEYS, frame_file, joined, named

import kvmnn
from kvmnn.bundle import DecodeOptions, EncodeOptions, open_frames
from kvmnn.errors import FrameError, ManifestError


def test_open_frames_renamed_frame_and_manifest_are_a_pair(tmp_path):
    frame_file(tmp_path / "k.frame", named(KEYS))
    (tmp_path / "k.frame").rename(tmp_path / "x.frame")
    (tmp_path / "k.frame.json").rename(tmp_path / "x.frame.json")
    assert joined(open_frames(str(tmp_path / "x.frame"))) == [KEYS.tobytes()]


def test_open_frames_without_manifest_is_flat(tmp_path):
    (tmp_path / "k.frame").write_bytes(kvmnn.encode(KEYS))
    frames = open_frames(str(tmp_path / "k.frame"))
    assert frames.document is None
    assert frames.arrays[0].shape == (KEYS.size,)
    assert joined(frames) == [KEYS.tobytes()]
    assert open_frames(str(tmp_path / "k.frame"), options=DecodeOptions(dtype="bf16")).arrays[0].dtype == "bf16"
    with pytest.raises(FrameError, match=r"k\.frame: .*fp32"):
        open_frames(str(tmp_path / "k.frame"), options=DecodeOptions(dtype="fp32"))


@pytest.mark.parametrize("values", [KEYS, KEYS.astype(np.float32)], ids=["fp16", "fp32"])
def test_open_frames_concatenated_frames_without_manifest(tmp_path, values, run, monkeypatch):
    """A frame file of an array that was cut, without its manifest: its words, in order."""
    monkeypatch.chdir(tmp_path)
    np.save("k.npy", values)
    run("encode", "k.npy", "-o", "k.frame", "--chunk-bytes", "4K")
    count, size = -(-values.nbytes // 4096), values.nbytes
    Path("k.frame.json").rename("kept.json")
    frames = open_frames("k.frame")
    assert (frames.document, frames.num_chunks) == (None, count)
    assert frames.arrays[0].shape == (KEYS.size,)
    assert joined(frames) == [values.tobytes()]
    unknown = f"{count} frames one after another: shape and names are unknown"
    assert frames.unknown_properties.startswith(unknown)
    assert ("fp16 is assumed" in frames.unknown_properties) == (values.dtype.itemsize == 2)
    said = run("decode", "k.frame", "-o", "back.npy").out
    assert unknown in said
    assert "LOSSLESS" not in said
    assert np.load("back.npy").tobytes() == values.tobytes()
    said = run("verify", "k.frame").out
    assert f"DECODES (no manifest and no --against: nothing to compare with; {unknown}" in said
    assert "LOSSLESS (every byte compared with k.npy" in run("verify", "k.frame", "--against", "k.npy").out
    assert run("inspect", "k.frame").out.startswith(
        f"k.frame: {frames.unknown_properties}\n  {frames.arrays[0].dtype}, "
    )
    assert run("inspect", "-v", "k.frame").out.count(" frame: ") == count
    (found,) = json.loads(run("inspect", "k.frame", "--json").out)["inputs"]
    assert (found["kind"], found["raw_bytes"], len(found["frames"])) == ("frames", size, count)
    assert found["frames"][-1]["offset"] + found["frames"][-1]["frame_bytes"] == Path("k.frame").stat().st_size
    assert run("decode", "k.frame", "-o", "x.npy", "--max-input-bytes", size - 1, code=1).err
    Path("k.frame").write_bytes(Path("k.frame").read_bytes()[:-3])
    assert f"k.frame: after {count - 1} whole " in run("decode", "k.frame", "-o", "x.npy", code=1).err
    assert not Path("x.npy").exists()


def test_open_frames_manifest_can_be_ignored(tmp_path):
    frame_file(tmp_path / "k.frame", named(KEYS), EncodeOptions())
    assert open_frames(str(tmp_path / "k.frame"), use_manifest=False).arrays[0].shape == (KEYS.size,)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\x93NUMPY\x01\x00v\x00{", r"\(it is a .npy file\)"),
        (b"\xff" * 40, "k.frame: "),
        (kvmnn.encode(KEYS) + b"\0", "k.frame: "),
        (kvmnn.encode(KEYS)[:-1], "k.frame: "),
    ],
)
def test_open_frames_other_file_is_refused(tmp_path, data, message):
    (tmp_path / "k.frame").write_bytes(data)
    with pytest.raises(FrameError, match=message):
        open_frames(str(tmp_path / "k.frame"))


def test_open_frames_directory_without_manifest_is_refused(tmp_path):
    with pytest.raises(ManifestError, match="not a kvmnn bundle"):
        open_frames(str(tmp_path))


def test_open_frames_trailing_bytes_are_refused(tmp_path, monkeypatch, run):
    """A manifest covers only the bytes that it lists."""
    monkeypatch.chdir(tmp_path)
    np.savez("kv.npz", a=np.arange(8, dtype=np.float32), b=np.arange(4, dtype=np.float32))
    run("encode", "kv.npz", "-o", "kv/")
    (path,) = [path for path in (tmp_path / "kv").iterdir() if path.name.startswith("a")]
    path.write_bytes(path.read_bytes() + b"more")
    for argv in (["verify", "kv/"], ["decode", "kv/", "-o", "x.npz"], ["verify", "kv/", "--against", "kv.npz"]):
        assert f"{path.name}: 4 bytes after the last frame that the manifest lists" in run(*argv, code=1).err
    assert not (tmp_path / "x.npz").exists()
