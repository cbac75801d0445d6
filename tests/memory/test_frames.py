"""The tool works through large files in bounded memory: anonymous memory, mapped file pages left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from process_memory import anonymous_peak

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")

FILE_BYTES = 240 << 20
FRAME_BYTES = 20 << 20


@pytest.fixture(scope="module", params=["<f4"])
def large(request, tmp_path_factory):
    """A file of which a part is hard to compress and the rest is easy, so that the test is quick."""
    path = tmp_path_factory.mktemp("large") / "large.npy"
    rows = FILE_BYTES // np.dtype(request.param).itemsize // 65536
    array = np.lib.format.open_memmap(path, "w+", request.param, (rows, 65536))
    array[: rows // 8] = np.random.default_rng(0).standard_normal((rows // 8, 65536)).astype(request.param)
    array.flush()
    return path


@pytest.mark.slow
def test_encode_verify_decode_memory_is_bounded_by_frames(large):
    frame, idle = str(large.with_suffix(".frame")), anonymous_peak("--version")
    # Encoding holds about 2.2 times a piece and its frame, decoding a piece and scratch; below 32 MiB malloc's heap,
    # which gives memory back late, may double that. What counts is that it is far less than the file.
    bounds = {
        ("encode", str(large), "-o", frame, "--chunk-bytes", str(FRAME_BYTES)): 7 * FRAME_BYTES,
        ("verify", frame): 5 * FRAME_BYTES,
        ("verify", frame, "--against", str(large)): 5 * FRAME_BYTES,
        ("decode", frame, "-o", str(large.with_suffix(".back.npy"))): 5 * FRAME_BYTES,
    }
    for argv, bound in bounds.items():
        assert anonymous_peak(*argv) - idle < bound, argv
    assert large.with_suffix(".back.npy").stat().st_size == large.stat().st_size


@pytest.mark.slow
def test_encode_deflated_member_memory_is_bounded(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", k=np.zeros((1920, 65536), np.float16))
    argv = ["encode", str(tmp_path / "a.npz"), "-o", str(tmp_path / "a.frame"), "--chunk-bytes", str(FRAME_BYTES)]
    assert anonymous_peak(*argv) - anonymous_peak("--version") < 9 * FRAME_BYTES
