"""Frames compared with arrays: the first difference is named."""

from __future__ import annotations

import struct
import zipfile

import numpy as np
import pytest
from bundles import KEYS, bundle, named

from kvmnn import formats
from kvmnn.bundle import compare_frame_set, open_frames


def test_compare_frame_set_reports_first_difference(tmp_path):
    frames = open_frames(str(bundle(tmp_path / "out", named(KEYS), named(-KEYS, "v"))))
    other = (-KEYS).copy()
    other[3, 7, 9] += 1
    other[5, 0, 0] += 1
    found = compare_frame_set(frames, [named(KEYS), named(other, "v")])
    assert found is not None
    assert found.array == "v"
    assert found.description.startswith("first differs at element [3, 7, 9]")


def test_compare_frame_set_different_arrays_are_reported(tmp_path):
    frames = open_frames(str(bundle(tmp_path / "out", named(KEYS), named(KEYS, "v"))))
    assert compare_frame_set(frames, [named(KEYS, "v"), named(KEYS)]) is None
    assert "frames only" in compare_frame_set(frames, [named(KEYS)]).description
    assert (
        "not in the frames" in compare_frame_set(frames, [named(KEYS), named(KEYS, "v"), named(KEYS, "w")]).description
    )
    assert (
        "shape [400, 64] became [8, 50, 64]"
        in compare_frame_set(frames, [named(KEYS.reshape(400, 64)), named(KEYS, "v")]).description
    )
    assert (
        "of the frames has 51200 bytes, that of the original 51072"
        in compare_frame_set(frames, [named(KEYS.ravel()[:-64]), named(KEYS, "v")]).description
    )
    assert compare_frame_set(frames, [named(KEYS.ravel()), named(KEYS, "v")]) is None


def test_compare_frame_set_different_memory_order_is_reported(tmp_path):
    np.save(tmp_path / "f.npy", np.asfortranarray(KEYS))
    frames = open_frames(str(bundle(tmp_path / "out", named(KEYS))))
    assert "order F became C" in compare_frame_set(frames, formats.open(str(tmp_path / "f.npy")).arrays).description


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_verify_npz_changed_crc_is_reported(tmp_path, run, save):
    """The checksum of every array is compared, not only that of the last one."""
    whole = np.stack([KEYS, -KEYS])
    save(tmp_path / "kv.npz", k=whole, v=whole)
    run("encode", tmp_path / "kv.npz", "-o", tmp_path / "f/")
    good = (tmp_path / "kv.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "kv.npz") as archive:
        sums = [struct.pack("<I", info.CRC) for info in archive.infolist()]
    assert sums[0] == sums[1]
    places = [at for at in range(len(good)) if good.startswith(sums[0], at)]
    assert len(places) == 4  # each twice: before the data, and in the directory
    for first, second in (places[::2], places[1::2]):
        wrong = bytearray(good)
        wrong[first] ^= 1
        wrong[second] ^= 1
        (tmp_path / "wrong.npz").write_bytes(wrong)
        for argv in (("verify", tmp_path / "f", "--against"), ("measure",)):
            said = run(*argv, tmp_path / "wrong.npz", code=1).err
            assert "the data does not match its checksum" in said and said.count("\n") == 1
    assert "LOSSLESS (every byte compared" in run("verify", tmp_path / "f", "--against", tmp_path / "kv.npz").out
