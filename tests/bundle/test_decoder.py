"""Frames and a manifest back to arrays: the same bytes, or a clear refusal."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bundles import KEYS, bundle, edit, joined, named
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmnn.arrays.array import LazyArray
from kvmnn.bundle import EncodeOptions, FrameSet, compare_frame_set, decode_frames, open_frames
from kvmnn.errors import FrameError, KvmnnError, LimitError, ManifestError


@settings(max_examples=30, deadline=None)
@given(
    arrays=st.lists(
        st.tuples(
            st.sampled_from([("fp16", "<f2"), ("bf16", "<u2"), ("fp32", "<f4"), ("fp16", ">i2"), ("fp32", "|u1")]),
            st.lists(st.integers(1, 40), max_size=3),
            st.sampled_from(["C", "F"]),
            st.integers(0, 255),
        ),
        min_size=1,
        max_size=4,
    ),
    threads=st.sampled_from([1, 2, None]),
    effort=st.sampled_from(["exact", "balanced", "fast"]),
)
def test_decode_frames_any_arrays_round_trip(tmp_path_factory, arrays, threads, effort):
    folder = tmp_path_factory.mktemp("bundle")
    random = np.random.default_rng(len(arrays))
    made, expected = [], []
    for number, ((dtype, kind), shape, order, spread) in enumerate(arrays):
        width = np.dtype(kind).itemsize
        shape = [*shape, 4] if width == 1 else shape
        data = random.integers(0, spread + 1, int(np.prod(shape)) * width, np.uint8)
        reader = partial(lambda d, step: (d[i : i + step] for i in range(0, d.size, step)), data)
        made.append(LazyArray(name=f"a{number}", dtype=dtype, shape=tuple(shape), array_dtype=kind, order=order,
                               reader=reader))  # fmt: skip
        swapped = data.view(f"u{width}").byteswap().view(np.uint8) if kind.startswith(">") else data
        expected.append(swapped.tobytes())
    options = EncodeOptions(frame_bytes=4096, threads=threads, effort=effort)
    frames = open_frames(str(bundle(folder / "out", *made, options=options)))
    assert joined(frames, threads=threads) == expected
    assert compare_frame_set(frames, made) is None
    for entry, array in zip(frames.arrays, made, strict=True):
        assert (entry.name, entry.dtype, entry.shape, entry.array_dtype, entry.order) == (
            array.name, array.dtype, array.shape, array.array_dtype, array.order,
        )  # fmt: skip


def test_decode_frames_max_bytes_is_enforced(tmp_path):
    frames = open_frames(str(bundle(tmp_path / "out", named(KEYS))))
    assert joined(frames, max_bytes=KEYS.nbytes) == [KEYS.tobytes()]
    with pytest.raises(LimitError, match=f"above the limit of {KEYS.nbytes - 1}"):
        joined(frames, max_bytes=KEYS.nbytes - 1)


def damaged(tmp_path: Path, change, file: str = "manifest.json") -> FrameSet:
    folder = bundle(tmp_path / "out", named(KEYS), named(-KEYS, "v"))
    if file == "manifest.json":
        edit(folder / file, change)
    else:
        (folder / file).write_bytes(change((folder / file).read_bytes()))
    return open_frames(str(folder))


def test_decode_frames_changed_frame_is_refused(tmp_path):
    frames = damaged(tmp_path, lambda data: data[:-1] + bytes([data[-1] ^ 1]), "v.frame")
    with pytest.raises(ManifestError, match=r"array 'v': frame 12 \(offset \d+\) the frame does not match"):
        joined(frames)
    with pytest.raises(KvmnnError):
        list(decode_frames(frames))


def test_decode_frames_error_of_single_frame_has_no_number(tmp_path):
    folder = bundle(tmp_path / "out", named(KEYS), options=EncodeOptions(frame_bytes=0))
    frame = (folder / "k.frame").read_bytes()
    (folder / "k.frame").write_bytes(frame[:-1] + bytes([frame[-1] ^ 1]))
    with pytest.raises(ManifestError, match="array 'k': the frame does not match"):
        joined(open_frames(str(folder)))


def test_decode_frames_error_names_frame_number_and_offset(tmp_path):
    folder = bundle(tmp_path / "out", named(KEYS), options=EncodeOptions(frame_bytes=KEYS.nbytes // 2))
    data = (folder / "k.frame").read_bytes()
    (folder / "k.frame").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    frames = open_frames(str(folder))
    assert len(frames.arrays[0].frames) == 2
    with pytest.raises(ManifestError, match=r"array 'k': frame 1 \(offset \d+\) the frame does not match"):
        joined(frames)


def test_decode_frames_swapped_frames_fail_manifest_sha256(tmp_path):
    def change(document):
        parts = document["arrays"][1]["frames"]
        parts[0], parts[1] = parts[1], parts[0]

    with pytest.raises(ManifestError, match="array 'v': its bytes do not match the manifest's sha256"):
        list(decode_frames(damaged(tmp_path, change)))


@pytest.mark.parametrize("cut", [0, 100])
def test_decode_frames_truncated_file_is_refused(tmp_path, cut):
    with pytest.raises(ManifestError, match=f"has {cut} bytes, but the manifest puts a frame"):
        joined(damaged(tmp_path, lambda data: data[:cut], "v.frame"))


def test_decode_frames_size_mismatch_with_manifest_is_refused(tmp_path):
    def change(document):
        parts = document["arrays"][0]["frames"]
        parts[0]["raw_bytes"] += 2
        parts[1]["raw_bytes"] -= 2

    with pytest.raises(FrameError, match=r"array 'k': frame 0 \(offset 0\) holds 4096 bytes, the manifest says 4098"):
        joined(damaged(tmp_path, change))


def test_decode_frames_missing_or_escaping_file_is_refused(tmp_path):
    def rename(name: str):
        def change(document):
            for part in document["arrays"][0]["frames"]:
                part["file"] = name

        return change

    frames = damaged(tmp_path, rename("gone.frame"))
    with pytest.raises(ManifestError, match=r"'gone.frame' is missing"):
        joined(frames)
    os.mkfifo(tmp_path / "out" / "gone.frame")
    with pytest.raises(ManifestError, match=r"'gone.frame' is no regular file"):
        joined(open_frames(str(tmp_path / "out")))
    (tmp_path / "outside").write_bytes((tmp_path / "out" / "k.frame").read_bytes())
    (tmp_path / "out" / "link").symlink_to("../outside")
    edit(tmp_path / "out" / "manifest.json", rename("link"))
    with pytest.raises(ManifestError, match="'link' leads out of the manifest's directory"):
        joined(open_frames(str(tmp_path / "out")))
