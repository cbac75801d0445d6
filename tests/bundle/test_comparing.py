"""Frames compared with arrays: the first difference is named."""

from __future__ import annotations

import numpy as np
from bundles import KEYS, bundle, named

from kvmnn import formats
from kvmnn.bundle import compare, open_frames


def test_the_first_difference_is_named(tmp_path):
    frames = open_frames(str(bundle(tmp_path / "out", named(KEYS), named(-KEYS, "v"))))
    other = (-KEYS).copy()
    other[3, 7, 9] += 1
    other[5, 0, 0] += 1
    found = compare(frames, [named(KEYS), named(other, "v")])
    assert found is not None
    assert found.array == "v"
    assert found.what.startswith("first differs at element [3, 7, 9]")


def test_sets_of_arrays_must_be_the_same(tmp_path):
    frames = open_frames(str(bundle(tmp_path / "out", named(KEYS), named(KEYS, "v"))))
    assert compare(frames, [named(KEYS, "v"), named(KEYS)]) is None
    assert "frames only" in compare(frames, [named(KEYS)]).what
    assert "not in the frames" in compare(frames, [named(KEYS), named(KEYS, "v"), named(KEYS, "w")]).what
    assert (
        "shape [400, 64] became [8, 50, 64]" in compare(frames, [named(KEYS.reshape(400, 64)), named(KEYS, "v")]).what
    )
    assert "has 51200 bytes, 'k' has 51072" in compare(frames, [named(KEYS.ravel()[:-64]), named(KEYS, "v")]).what
    assert compare(frames, [named(KEYS.ravel()), named(KEYS, "v")]) is None


def test_memory_order_counts(tmp_path):
    np.save(tmp_path / "f.npy", np.asfortranarray(KEYS))
    frames = open_frames(str(bundle(tmp_path / "out", named(KEYS))))
    assert "order F became C" in compare(frames, formats.open(str(tmp_path / "f.npy")).arrays).what
