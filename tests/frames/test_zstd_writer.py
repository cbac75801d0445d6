"""The writer of zstd frames, from C: whatever it is handed, libzstd gives the lane back."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
import zstandard
from repository import NATIVE

from kvmnn import _simd

pytestmark = [
    pytest.mark.slow,  # compiles C
    pytest.mark.skipif(shutil.which("cc") is None or not NATIVE.exists(), reason="no C compiler or no sources"),
]

PERIOD = 64


class Repeat(ctypes.Structure):
    _fields_ = (("at", ctypes.c_uint32), ("length", ctypes.c_uint32), ("distance", ctypes.c_uint32))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("writer") / "writer.so"
    sources = [str(NATIVE / "frames" / f"{name}.c") for name in ("zstd_writer", "huffman", "fse")]
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", *sources, "-o", str(library)], check=True)
    found = ctypes.CDLL(str(library))
    for name in ("kvmnn_zstd_bound", "kvmnn_zstd_scratch_bytes", "kvmnn_zstd_write_frame"):
        getattr(found, name).restype = ctypes.c_size_t
    return found


def written(writer: ctypes.CDLL, level: int, lane: bytes, repeats: list[tuple[int, int, int]], flat: int = 0) -> bytes:
    tables = ctypes.create_string_buffer(1 << 16)
    writer.kvmnn_sequence_tables_init(tables)
    n = ctypes.c_size_t(len(lane))
    out = ctypes.create_string_buffer(writer.kvmnn_zstd_bound(n))
    scratch = ctypes.create_string_buffer(writer.kvmnn_zstd_scratch_bytes())
    given = (Repeat * max(1, len(repeats)))(*repeats)
    size = writer.kvmnn_zstd_write_frame(
        level, tables, lane, n, given, ctypes.c_size_t(len(repeats)), flat, scratch, out
    )
    return out.raw[:size]


@pytest.mark.parametrize(
    ("length", "gap"),
    [*((length, 0) for length in (3, 4, 5, 40, 2000)), *((length, gap) for length in (3, 40) for gap in (1, 7, 40))],
)
def test_zstd_writer_repeats_of_every_length_and_distance(writer: ctypes.CDLL, length: int, gap: int) -> None:
    """Up to more of them in a block than two bytes can say (32,512)."""
    lane = np.tile(np.random.default_rng(0).integers(0, 30, PERIOD, np.uint8), 5000)[:300_001].tobytes()
    begins = range(PERIOD, len(lane) - length - gap - PERIOD, length + gap)
    repeats = [(at + gap, length, PERIOD * (1 + k % min(7, at // PERIOD))) for k, at in enumerate(begins)]
    for flat in (0, 1):
        made = {written(writer, level, lane, repeats, flat) for level in range(len(_simd.simd_levels()))}
        assert len(made) == 1 and zstandard.ZstdDecompressor().decompress(made.pop()) == lane


@pytest.mark.parametrize("symbols", [2, 3, 20, 40, 41, 200])
def test_zstd_writer_literals_of_few_and_many_symbols(writer: ctypes.CDLL, symbols: int) -> None:
    """One and two at a time; the rarest take the most bits that a code may have."""
    rng = np.random.default_rng(symbols)
    kinds = rng.permutation(256)[:symbols]
    for n in (64, 255, 4095, 4096, 5000, 140_000, 300_000):
        lane = kinds[np.minimum(rng.geometric(0.4, n) - 1, symbols - 1)].astype(np.uint8)
        lane[rng.integers(0, n, symbols)] = kinds
        made = {written(writer, level, lane.tobytes(), []) for level in range(len(_simd.simd_levels()))}
        assert len(made) == 1 and zstandard.ZstdDecompressor().decompress(made.pop()) == lane.tobytes()


@pytest.mark.parametrize("rows", [1, 11, 12, 13, 16])
@pytest.mark.parametrize("few", [False, True])
def test_zstd_writer_literals_of_few_and_many_rows(writer: ctypes.CDLL, rows: int, few: bool) -> None:
    """Rows of 16 neighbours: AVX2 looks at 12 of them at most; `few` literals are in any of the others."""
    rng = np.random.default_rng(rows)
    kinds = rng.permutation(16)[:rows] * 16
    for n in (2047, 2048, 2079, 100_003, 131_072):
        for columns in (np.full(n, 15), rng.geometric(0.3, n)):
            lane = (rng.choice(kinds, n) + np.minimum(rng.integers(0, 16, n), columns)).astype(np.uint8)
            if few:
                lane[rng.integers(0, n, n // 2000)] = rng.integers(0, 256, n // 2000)
            made = {written(writer, level, lane.tobytes(), []) for level in range(len(_simd.simd_levels()))}
            assert len(made) == 1 and zstandard.ZstdDecompressor().decompress(made.pop()) == lane.tobytes()


@pytest.mark.parametrize("places", [1, 30, 255])
def test_zstd_writer_literals_missed_by_sample_have_codes(writer: ctypes.CDLL, places: int) -> None:
    """Some are anywhere in a lane, once each; one has to have a code wherever it stands."""
    rng = np.random.default_rng(places)
    for n in (16 << 10, (16 << 10) + 1, 100_003, 131_072, 400_000):
        lane = rng.integers(3, 7, n).astype(np.uint8)
        lane[rng.permutation(n)[:places]] = rng.permutation(256)[:places]
        for tail in (0, 1):
            lane[-1] = 255 if tail else 3
            made = {written(writer, level, lane.tobytes(), []) for level in range(len(_simd.simd_levels()))}
            assert len(made) == 1
            frame = made.pop()
            assert zstandard.ZstdDecompressor().decompress(frame) == lane.tobytes()
            assert len(frame) < 0.29 * n + 400


def test_zstd_writer_unrepresentative_sample_has_short_codes(writer: ctypes.CDLL) -> None:
    """The few looks see one byte; all others have as many bits as a byte can, and must not need more."""
    rng = np.random.default_rng(0)
    lane = rng.integers(0, 256, 131_072).astype(np.uint8)
    for i in range(0, lane.size, 128):
        quarter = (i * 0x9E3779B1 & 0xFFFFFFFF) >> 30
        lane[i + 32 * quarter : i + 32 * quarter + 32] = 9
    for level in range(len(_simd.simd_levels())):
        frame = written(writer, level, lane.tobytes(), [])
        assert zstandard.ZstdDecompressor().decompress(frame) == lane.tobytes() and len(frame) <= lane.size + 20


@pytest.mark.parametrize("kept", [249, 256])
def test_zstd_writer_negligible_huffman_gain_is_skipped(writer: ctypes.CDLL, kept: int) -> None:
    """249 of 256 kinds of bytes take 7.96 bits."""
    lane = np.random.default_rng(0).integers(0, kept, 131_072).astype(np.uint8).tobytes()
    frame = written(writer, 0, lane, [])
    assert zstandard.ZstdDecompressor().decompress(frame) == lane and lane in frame
