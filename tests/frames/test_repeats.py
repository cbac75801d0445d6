"""The search for repeats in a lane, from C: what it finds is there, with vector instructions and without."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from codec_samples import kv_like, structured
from repository import NATIVE

from kvmnn import _simd

pytestmark = pytest.mark.skipif(shutil.which("cc") is None or not NATIVE.exists(), reason="no C compiler or no sources")

Bytes = npt.NDArray[np.uint8]


class Repeat(ctypes.Structure):
    _fields_ = (("at", ctypes.c_uint32), ("length", ctypes.c_uint32), ("distance", ctypes.c_uint32))


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[ctypes.CDLL]:
    """With what this compiler has for the processor, and with plain words of eight bytes."""
    found = []
    for name, flags in (("native", []), ("plain", ["-U__SSE2__"])):
        library = tmp_path_factory.mktemp("repeats") / f"{name}.so"
        source = NATIVE / "frames" / "match_finder.c"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", *flags, str(source), "-o", str(library)], check=True)
        found.append(ctypes.CDLL(str(library)))
        found[-1].kvmnn_repeats_find.restype = found[-1].kvmnn_repeats_table_size.restype = ctypes.c_size_t
    return found


def repeats(library: ctypes.CDLL, level: int, lane: Bytes, dear: bool) -> list[tuple[int, int, int]]:
    n = ctypes.c_size_t(lane.size)
    table = (ctypes.c_uint32 * library.kvmnn_repeats_table_size(n))()
    out = (Repeat * (lane.size // 4 + 1))()
    count = library.kvmnn_repeats_find(level, lane.ctypes.data_as(ctypes.c_void_p), n, int(dear), table, out)
    assert count <= len(out)
    return [(one.at, one.length, one.distance) for one in out[:count]]


def lanes() -> Iterator[Bytes]:
    for words in (1, 72, 73, 80, 4096, 30_000):
        for _, raw in structured(words, 2):
            yield np.frombuffer(raw, np.uint8)[1::2].copy()
    for dtype in ("fp16", "bf16"):
        yield np.frombuffer(kv_like(1 << 16, dtype), np.uint8)[1::2].copy()
    rng = np.random.default_rng(0)
    for width, kept in ((64, 0.2), (64, 0.6), (80, 0.9), (256, 0.4), (7, 0.8)):  # rows that have a share in common
        rows = rng.integers(0, 200, (40_000 // width, width), np.uint8)
        for row in range(1, len(rows)):
            rows[row] = np.where(rng.random(width) < kept, rows[rng.integers(0, row)], rows[row])
        yield rows.reshape(-1)


@pytest.mark.slow
@pytest.mark.parametrize("dear", [False, True])
def test_match_finder_matches_exist_on_every_simd_level(builds: list[ctypes.CDLL], dear: bool) -> None:
    covered = 0
    for lane in lanes():
        found = repeats(builds[1], 0, lane, dear)
        assert all(found == repeats(builds[0], level, lane, dear) for level in range(len(_simd.simd_levels())))
        done = 0
        for at, length, distance in found:
            assert done <= at and at + length <= lane.size and 1 <= distance <= at and length >= 4
            for i in range(0, length, distance):  # a repeat may go on in itself
                size = min(distance, length - i)
                assert (lane[at + i : at + i + size] == lane[at + i - distance : at + i - distance + size]).all()
            done = at + length
            covered += length
    assert covered > 100_000
