"""Lanes of several zstd frames: effort "balanced" above a size. test_fast.py has those of effort "fast"."""

from __future__ import annotations

import codec_model
import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from codec_samples import kv_like

import kvmnn
from kvmnn.frames import _encoder, pieces

LANE = 5_000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LANE_BYTES", LANE)


def payloads(frame: bytes, dtype: str) -> list[bytes]:
    streams = kvmnn.inspect(frame, dtype=dtype).streams
    return [frame[one.payload_offset : one.payload_offset + one.payload_bytes] for one in streams]


def words_of(dtype: str, count: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(kv_like(count, dtype), np.uint8)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("predictors", [None, "raw", "delta_seq", "xor_seq"])
@pytest.mark.parametrize(("count", "number"), [(LANE, 1), (LANE + 1, 2), (2 * LANE, 2), (2 * LANE + 1, 4), (33_333, 8)])
def test_pieces(dtype: str, predictors: str | None, count: int, number: int) -> None:
    data = words_of(dtype, count)
    options = {"dtype": dtype, "predictors": predictors, "effort": "balanced"}
    frame = kvmnn.encode(data, threads=1, **options)
    assert codec_model.decode(frame, data.size // count) == data.tobytes()
    assert kvmnn.decode(frame, dtype=dtype).tobytes() == data.tobytes()
    for lane in payloads(frame, dtype):
        found, left = 0, lane
        while left and number > 1:
            stream = zstandard.ZstdDecompressor().decompressobj()
            stream.decompress(left)
            found, left = found + 1, stream.unused_data
        assert found == number or number == 1
    for threads in (2, 3, 7):
        assert kvmnn.encode(data, threads=threads, **options) == frame


def test_predictors_of_their_own_for_the_high_lane() -> None:
    data = words_of("bf16", 20_000)
    options = {"dtype": "bf16", "predictors": "raw", "hi_predictors": "delta_seq", "effort": "balanced"}
    frame = kvmnn.encode(data, **options)
    assert codec_model.decode(frame, 2) == data.tobytes()
    assert [stream.predictor for stream in kvmnn.inspect(frame, dtype="bf16").streams] == ["raw", "delta_seq"]


def test_large_frames_are_put_together_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LANE_BYTES", 200_000)
    data = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8)
    for dtype, effort in (("fp16", "balanced"), ("fp32", "balanced"), ("fp32", "fast")):
        frame = kvmnn.encode(data, dtype=dtype, effort=effort, threads=1)
        assert kvmnn.decode(frame, dtype=dtype).tobytes() == data.tobytes()
        assert kvmnn.encode(data, dtype=dtype, effort=effort, threads=3) == frame


def test_exact_and_rle_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    data = words_of("fp16", 30_000)
    every = ({}, {"codecs": ("rle",)}, {"codecs": ("rle",), "effort": "balanced"})
    cut = [kvmnn.encode(data, dtype="fp16", **options) for options in every]
    monkeypatch.setattr(pieces, "LANE_BYTES", 8 << 20)
    assert [kvmnn.encode(data, dtype="fp16", **options) for options in every] == cut


def test_words_and_places_that_are_not_there() -> None:
    data = words_of("fp16", 100)
    for begin, end, lane, mode in ((0, 101, 0, 0), (5, 5, 0, 0), (0, 9, 2, 0), (0, 9, -1, 0), (0, 9, 0, 3)):
        with pytest.raises(kvmnn.KvmnnError, match="not there"):
            _encoder.payload(data, 2, begin, end, lane, mode, 3)
    for at, part in ((10, b"x"), (11, b""), (8, b"abc")):
        with pytest.raises(kvmnn.KvmnnError, match="not there"):
            _encoder.write_at(_encoder.unwritten(10), at, part)
