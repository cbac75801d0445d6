"""Lanes of several zstd frames: effort "balanced" above a size. test_fast.py has those of effort "fast"."""

from __future__ import annotations

from types import SimpleNamespace

import codec_model
import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from codec_samples import kv_like

import kvmnn
from kvmnn.frames import _encoder, _fast, pieces
from kvmnn.frames._room import Room

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
    data, room = words_of("fp16", 100), Room(10_000)
    for begin, end, lane, mode in ((0, 101, 0, 0), (5, 5, 0, 0), (0, 9, 2, 0), (0, 9, -1, 0), (0, 9, 0, 3)):
        with pytest.raises(kvmnn.KvmnnError, match="not there"):
            _encoder.write_payload(room, 0, 500, data, 2, begin, end, lane, mode, 3)
    with pytest.raises(kvmnn.KvmnnError, match="not there"):
        _encoder.write_payload(room, 9990, 11, data, 2, 0, 100, 0, 0, 3)
    most = (_fast.most_payload(100),) * 2
    for places, end in (((0, 9990), 100), ((0, 0), 101)):
        with pytest.raises(kvmnn.KvmnnError, match="not there"):
            _fast.write_payloads(room, places, most, data, 2, 0, end, [1, 1])
    for short in (_fast.raw_payload(100) - 1, 1):
        with pytest.raises(kvmnn.KvmnnError, match="too few"):
            _fast.write_payloads(room, (0, 500), (200, short), data, 2, 0, 100, [1, 1])
    with pytest.raises(kvmnn.KvmnnError, match="too few"):
        _fast.write_payloads(room, (0, 500), (200, _fast.raw_payload(100)), data, 2, 0, 100, [1, 2])
    with pytest.raises(kvmnn.KvmnnError, match="not there"):
        _fast.write_raw(room, 9950, data, 2, 0)


def test_noise_that_does_not_fit_as_libzstd_writes_it_becomes_raw_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a release that cuts it into more blocks."""
    noise = np.random.default_rng(1).integers(0, 256, 40_000, np.uint8)
    plain = kvmnn.encode(noise, dtype="fp16", effort="balanced")
    fits = SimpleNamespace(bound=_encoder.bound, write_payload=lambda *_: 0)
    monkeypatch.setattr(pieces, "_encoder", fits)
    frame = kvmnn.encode(noise, dtype="fp16", effort="balanced")
    assert kvmnn.decode(frame).tobytes() == noise.tobytes() and len(frame) <= len(plain)
    assert _encoder.write_payload(Room(100), 0, 99, noise, 2, 0, 100, 0, 0, 3) == 0


def test_a_room_has_what_was_written_and_is_gone_when_it_is_finished() -> None:
    room = Room(10)
    for at, part in ((11, b""), (10, b"x"), (8, b"abc")):
        with pytest.raises(kvmnn.KvmnnError, match="not there"):
            room.write(at, part)
    room.write(0, b"ab")
    room.write(4, b"cdefgh")
    room.move(2, 4, 6)
    assert bytes(room.view(1, 4)) == b"bcde"
    with pytest.raises(kvmnn.KvmnnError, match="not there"):
        room.move(5, 0, 6)
    with pytest.raises(kvmnn.KvmnnError, match="not there"):
        room.finish(11)
    assert room.finish(7) == b"abcdefg"
    for gone in (lambda: room.write(0, b"x"), lambda: room.view(0, 1), lambda: room.finish(0)):
        with pytest.raises(kvmnn.KvmnnError, match="not there"):
            gone()


@pytest.mark.parametrize("first, second, in_place", [(20, 30, True), (4, 12, True), (5, 13, True), (3, 30, False)])
def test_parts_of_several_rooms_are_put_together(first: int, second: int, in_place: bool) -> None:
    """In the room of the first one, but where one of its parts lies before where it stays."""
    room, other = Room(40), Room(8)
    room.write(first, b"first")
    room.write(second, b"second")
    other.write(0, b"01234567")
    parts = [
        b"head",
        pieces.Placed(5, room, first),
        pieces.Placed(3, other, 2),
        pieces.Placed(6, room, second),
        b"bytes",
    ]
    assert (pieces._home(parts) is room) == in_place
    assert pieces.joined(parts, 2) == pieces.joined(parts, 2, pieces._home(parts)) == b"headfirst234secondbytes"
