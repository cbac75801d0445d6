"""Frames opened: with a manifest beside them or above them, or alone."""

from __future__ import annotations

import pytest
from bundles import KEYS, frame_file, joined, named

import kvmnn
from kvmnn.bundle import DecodeOptions, EncodeOptions, open_frames
from kvmnn.errors import FrameError, ManifestError


def test_a_renamed_pair_still_belongs_together(tmp_path):
    frame_file(tmp_path / "k.frame", named(KEYS))
    (tmp_path / "k.frame").rename(tmp_path / "x.frame")
    (tmp_path / "k.frame.json").rename(tmp_path / "x.frame.json")
    assert joined(open_frames(str(tmp_path / "x.frame"))) == [KEYS.tobytes()]


def test_a_frame_alone(tmp_path):
    (tmp_path / "k.frame").write_bytes(kvmnn.encode(KEYS))
    frames = open_frames(str(tmp_path / "k.frame"))
    assert frames.document is None
    assert frames.arrays[0].shape == (KEYS.size,)
    assert joined(frames) == [KEYS.tobytes()]
    assert open_frames(str(tmp_path / "k.frame"), options=DecodeOptions(dtype="bf16")).arrays[0].dtype == "bf16"
    with pytest.raises(FrameError, match=r"k\.frame: .*fp32"):
        open_frames(str(tmp_path / "k.frame"), options=DecodeOptions(dtype="fp32"))


def test_the_side_manifest_can_be_ignored(tmp_path):
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
def test_not_a_frame(tmp_path, data, message):
    (tmp_path / "k.frame").write_bytes(data)
    with pytest.raises(FrameError, match=message):
        open_frames(str(tmp_path / "k.frame"))


def test_a_directory_without_manifest(tmp_path):
    with pytest.raises(ManifestError, match="not a kvmnn bundle"):
        open_frames(str(tmp_path))
