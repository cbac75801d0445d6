"""Progress while one frame is made: effort max tells of every candidate, not of the whole frame at its end."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import kvmnn
from kvmnn.bundle import EncodeOptions, encode_source

KEYS = np.random.default_rng(8).standard_normal((4, 64, 64)).cumsum(1).astype(np.float16)


class Counted:
    """What a callback was told, and that no two calls met."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._inside = threading.Lock()

    def __call__(self, done: int) -> None:
        assert self._inside.acquire(blocking=False), "called from two threads at one time"
        self.steps.append(done)
        self._inside.release()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("codecs", [("rle",), ("rle", "zstd")])
@pytest.mark.parametrize("values", [KEYS, KEYS.astype(np.float32)], ids=["fp16", "fp32"])
def test_progress_max_advances_with_every_candidate(values: np.ndarray, codecs: tuple[str, ...], threads: int) -> None:
    told = Counted()
    frame = kvmnn.encode(values, effort="max", codecs=codecs, threads=threads, progress=told)
    assert frame == kvmnn.encode(values, effort="max", codecs=codecs)
    assert sum(told.steps) == values.nbytes
    assert min(told.steps) > 0
    pairs = 3 * values.itemsize
    assert len(told.steps) >= pairs + ("zstd" in codecs) * 5 * values.itemsize
    assert max(told.steps) <= values.nbytes / 5
    assert "zstd" not in codecs or sum(told.steps[:pairs]) <= values.nbytes / 30


@pytest.mark.parametrize("effort", ["exact", "balanced", "fast"])
def test_progress_other_efforts_report_all_bytes(effort: str) -> None:
    told = Counted()
    assert kvmnn.encode(KEYS, effort=effort, progress=told) == kvmnn.encode(KEYS, effort=effort)
    assert sum(told.steps) == KEYS.nbytes


def test_progress_three_elements_are_reported() -> None:
    told = Counted()
    kvmnn.encode(KEYS[0, 0, :3], effort="max", progress=told)
    assert sum(told.steps) == 6


def test_progress_error_in_callback_ends_the_work() -> None:
    def stop(done: int) -> None:
        raise KeyboardInterrupt

    for threads in (1, 4):
        with pytest.raises(KeyboardInterrupt):
            kvmnn.encode(KEYS, effort="max", threads=threads, progress=stop)


def test_progress_parallel_chunks_of_a_bundle(tmp_path: Path) -> None:
    np.savez(tmp_path / "kv.npz", k=KEYS, v=-KEYS)
    told = Counted()
    options = EncodeOptions(effort="max", threads=4, frame_bytes=8 << 10)
    encode_source(kvmnn.open(tmp_path / "kv.npz"), tmp_path / "b", options, progress=told)
    assert sum(told.steps) == 2 * KEYS.nbytes
    assert len(told.steps) > 10 * 2 * KEYS.nbytes // (8 << 10)
