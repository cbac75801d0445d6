"""Lanes of several zstd frames: effort "balanced" above a size. test_fast.py has those of effort "fast"."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import codec_model
import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from codec_samples import kv_like

import kvmnn
from kvmnn.frames import _encoder, _fast_encoder, sampling, segments, tuning
from kvmnn.frames._content_hashes import count_duplicates, sample_hashes
from kvmnn.frames._output_buffer import OrderedWriter, OutputBuffer
from kvmnn.frames.sampling import RepeatInfo, detect_long_range_repeats

LANE = 5_000
NUMPY = {"fp16": np.float16, "fp32": np.float32}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SEGMENT_LANE_BYTES", LANE)
    monkeypatch.setattr(tuning, "SMALL_SEGMENT_BYTES", 100)


def payloads(frame: bytes, dtype: str) -> list[bytes]:
    streams = kvmnn.inspect(frame, dtype=dtype).streams
    return [frame[one.payload_offset : one.payload_offset + one.payload_bytes] for one in streams]


def words_of(dtype: str, count: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(kv_like(count, dtype), np.uint8)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("predictors", [None, "raw", "delta_seq", "xor_seq"])
@pytest.mark.parametrize(("count", "number"), [(LANE, 1), (LANE + 1, 2), (2 * LANE, 2), (2 * LANE + 1, 4), (33_333, 8)])
def test_segments_any_size_round_trip(dtype: str, predictors: str | None, count: int, number: int) -> None:
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


def test_segments_high_lane_has_its_own_predictors() -> None:
    data = words_of("bf16", 20_000)
    options = {"dtype": "bf16", "predictors": "raw", "hi_predictors": "delta_seq", "effort": "balanced"}
    frame = kvmnn.encode(data, **options)
    assert codec_model.decode(frame, 2) == data.tobytes()
    assert [stream.predictor for stream in kvmnn.inspect(frame, dtype="bf16").streams] == ["raw", "delta_seq"]


def test_segments_large_frame_is_assembled_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SEGMENT_LANE_BYTES", 200_000)
    data = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8)
    for dtype, effort in (("fp16", "balanced"), ("fp32", "balanced"), ("fp32", "fast")):
        frame = kvmnn.encode(data, dtype=dtype, effort=effort, threads=1)
        assert kvmnn.decode(frame, dtype=dtype).tobytes() == data.tobytes()
        assert kvmnn.encode(data, dtype=dtype, effort=effort, threads=3) == frame


def test_segments_exact_and_rle_are_never_split(monkeypatch: pytest.MonkeyPatch) -> None:
    data = words_of("fp16", 30_000)
    every = ({}, {"codecs": ("rle",)}, {"codecs": ("rle",), "effort": "balanced"})
    cut = [kvmnn.encode(data, dtype="fp16", **options) for options in every]
    monkeypatch.setattr(tuning, "SEGMENT_LANE_BYTES", 8 << 20)
    assert [kvmnn.encode(data, dtype="fp16", **options) for options in every] == cut


def test_fast_encoder_out_of_range_arguments_are_refused() -> None:
    data, most, short = (
        words_of("fp16", 100),
        _fast_encoder.max_payload_bytes(100),
        _fast_encoder.raw_payload_bytes(100) - 1,
    )
    for begin, end, lane, mode in ((0, 101, 0, 0), (5, 5, 0, 0), (0, 9, 2, 0), (0, 9, -1, 0), (0, 9, 0, 3)):
        with pytest.raises(kvmnn.KvmnnError, match="not there"):
            _encoder.write_payload(OrderedWriter(OutputBuffer(10_000), [0]), 0, 500, data, 2, begin, end, lane, mode, 3)
    for begins, piece in (([9990], 0), ([0], 1), ([0], -1)):
        with pytest.raises(kvmnn.KvmnnError, match="not there"):
            _encoder.write_payload(OrderedWriter(OutputBuffer(10_000), begins), piece, most, data, 2, 0, 100, 0, 0, 3)
    for mode, room in ((0, short), (1, _encoder.max_zstd_bytes(100) - 1)):
        with pytest.raises(kvmnn.KvmnnError, match="too few"):
            _encoder.write_payload(OrderedWriter(OutputBuffer(10_000), [0]), 0, room, data, 2, 0, 100, 0, mode, 3)
    for begins, piece, end in (([0, 9990], 0, 100), ([0, 500], 0, 101), ([0, 500], 1, 100), ([0], 0, 100)):
        room = OutputBuffer(10_000)
        with pytest.raises(kvmnn.KvmnnError, match="not there"):
            tracks = [OrderedWriter(room, [begin]) for begin in begins]
            _fast_encoder.write_payloads(tracks, piece, (most, most), data, 2, 0, end, [1, 1])
    for least, modes in ((short, [1, 1]), (1, [1, 1]), (_fast_encoder.raw_payload_bytes(100), [1, 2])):
        tracks = [OrderedWriter(OutputBuffer(500), [0]), OrderedWriter(OutputBuffer(500), [0])]
        with pytest.raises(kvmnn.KvmnnError, match="too few"):
            _fast_encoder.write_payloads(tracks, 0, (200, least), data, 2, 0, 100, modes)


def test_segments_noise_beyond_capacity_becomes_raw_blocks() -> None:
    """As with a release that cuts it into more blocks, or that asks for more room than it needs."""
    noise = np.random.default_rng(1).integers(0, 256, 600_000, np.uint8)
    least = _fast_encoder.raw_payload_bytes(300_000)
    track = OrderedWriter(OutputBuffer(least), [0])
    assert _encoder.write_payload(track, 0, least, noise, 2, 0, 300_000, 1, 0, 3) == least
    assert track.list_fragments() == [(least, 0)]
    assert zstandard.ZstdDecompressor().decompress(track.buffer.view(0, least)) == noise[1::2].tobytes()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2), (2, 0, 3, 1)])
def test_ordered_writer_segments_are_in_order(order: tuple[int, ...]) -> None:
    data = words_of("bf16", 4_000)
    most = _encoder.max_zstd_bytes(1_000)
    track = OrderedWriter(OutputBuffer(4 * most + 7), [7 + piece * most for piece in range(4)])
    for piece in order:
        with pytest.raises(kvmnn.KvmnnError, match="missing"):
            track.list_fragments()
        _encoder.write_payload(track, piece, most, data, 2, 1_000 * piece, 1_000 * (piece + 1), 1, 1, 3)
    (nbytes, places) = zip(*track.list_fragments(), strict=True)
    assert places == tuple(accumulate(nbytes[:-1], initial=7)) and max(nbytes) < 1_000
    made = b"".join(
        zstandard.ZstdDecompressor().decompress(track.buffer.view(at, n), max_output_size=1_000)
        for n, at in track.list_fragments()
    )
    assert (np.cumsum(np.frombuffer(made, np.uint8), dtype=np.uint8) == data[1::2]).all()


@pytest.mark.parametrize("effort", ["balanced", "fast"])
def test_segments_do_not_depend_on_threads(effort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pieces that are ready in no order."""
    monkeypatch.setattr(tuning, "FAST_SEGMENT_BYTES", 4 * LANE)
    for dtype in ("bf16", "fp32"):
        data = words_of(dtype, 300_000)
        frame = kvmnn.encode(data, dtype=dtype, effort=effort, threads=1)
        assert kvmnn.decode(frame, dtype=dtype).tobytes() == data.tobytes()
        assert all(kvmnn.encode(data, dtype=dtype, effort=effort, threads=8) == frame for _ in range(10))


@pytest.mark.parametrize("effort", ["balanced", "fast"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("period", [151, 300, 450])
def test_segments_distant_repeats_are_found(
    dtype: str, effort: str, period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows of 64 words: farther than pieces see, and about as far as libzstd does."""
    monkeypatch.setattr(tuning, "SEGMENT_LANE_BYTES", 1 << 15)
    monkeypatch.setattr(tuning, "FAST_SEGMENT_BYTES", 1 << 16)
    rng = np.random.default_rng(period)
    words = np.tile(rng.standard_normal((period, 64)).astype(NUMPY[dtype]), (35, 1))
    frame = kvmnn.encode(words, effort=effort)
    assert (kvmnn.decode(frame, dtype=dtype).reshape(words.shape) == words).all()
    assert len(frame) < 1.05 * len(kvmnn.encode(words)) + 200
    assert kvmnn.encode(words, effort=effort, threads=1) == frame


@pytest.mark.parametrize(
    ("across", "far", "nbytes", "sizes"),
    [
        (False, False, 700_000, [100_000]),
        (True, False, 700_000, [100_000]),
        (False, True, 700_000, [800_000]),
        (False, False, 300_000, [100_000]),
        (True, False, 300_000, [100_000, 800_000, 6_400_000]),
        (False, True, 300_000, [800_000]),
        (True, True, 300_000, [800_000, 6_400_000]),
        (False, False, 900, [100_000, 800_000, 6_400_000]),
    ],
)
def test_segments_become_longer_for_repeats(
    across: bool, far: bool, nbytes: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where they do not see what repeats itself; where they repeat each other; or where hardly any is left."""
    planned, encoded = [], []
    monkeypatch.setattr(sampling, "detect_long_range_repeats", lambda *_: RepeatInfo(across, far, False))

    def plan(size: int) -> segments.SegmentPlan:
        planned.append(size)
        writer = OrderedWriter(OutputBuffer(nbytes + 99), [4])
        fill = partial(_encoder.write_payload, writer, 0, nbytes + 90, noise, 2, 0, nbytes, 0, 0, 3)
        return segments.SegmentPlan([partial(encoded.append, size), fill], [writer], [(0, 0)])

    noise = np.random.default_rng(1).integers(0, 256, 2 * nbytes, np.uint8)
    lanes, size = segments.encode_segments(
        plan, np.zeros(1_000_000, np.uint8), 2, 100_000, 1, visible_bytes=100_000, allow_unaligned=False
    )
    assert abs(sum(lane.nbytes for lane in lanes) - nbytes) < 90
    assert size == sizes[-1]
    assert encoded == sizes
    assert planned == [100_000] * far + sizes


def test_segments_end_at_undetected_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "detect_long_range_repeats", lambda *_: RepeatInfo(False, False, True))
    encoded = []

    def plan(size: int) -> segments.SegmentPlan:
        return segments.SegmentPlan([partial(encoded.append, size)], [], [])

    data = np.zeros(1_000_000, np.uint8)
    segments.encode_segments(plan, data, 2, 100_000, 1, visible_bytes=100_000)
    assert encoded == [100_000, 800_000, 6_400_000]
    encoded.clear()
    result = segments.encode_segments(plan, data, 2, 100_000, 1, visible_bytes=100_000, allow_unaligned=False)
    assert (result, encoded) == (([], 100_000), [])


@pytest.mark.parametrize("stride", [2, 4])
def test_detect_long_range_repeats_finds_distant_copies(stride: int) -> None:
    once = np.random.default_rng(2).integers(0, 256, 1_280_000, np.uint8)
    odd = once[: (1 << 19) + 5 * stride]
    for data, size, across, far, is_odd in (
        (once, 1 << 11, False, False, False),
        (np.tile(once[: 1 << 19], 4), 1 << 19, True, True, False),
        (np.tile(once[: 1 << 19], 2), 1 << 20, False, False, False),
        (np.tile(odd, 4), 1 << 19, True, True, True),
        (np.tile(odd, 2), 1 << 21, False, False, True),
        (np.tile(odd, 2), 1 << 19, True, True, True),
        (np.tile(once[: 1 << 10], 2000), 1 << 19, True, False, False),
        (np.zeros(1 << 20, np.uint8), 1 << 11, False, False, False),
        (np.concatenate([once, once[:1_000]]), 1 << 11, False, False, False),
        (np.concatenate([once, once[:256_000]]), 1 << 11, True, True, False),
        (np.concatenate([np.zeros(1 << 20, np.uint8), once, once[:512_000]]), 1 << 21, True, True, False),
        (once[:stride], 1, False, False, False),
        (once[:0], 1, False, False, False),
        (np.tile(once[:100], 20), 1, False, False, False),
    ):
        assert detect_long_range_repeats(data, stride, size) == (across, far, is_odd)


def test_segments_repeats_missed_by_fast_search_use_libzstd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FAST_SEGMENT_BYTES", 1 << 18)
    monkeypatch.setattr(tuning, "SEGMENT_LANE_BYTES", 1 << 17)
    for distance in (60_001, 60_002, 60_004):
        words = np.tile(np.random.default_rng(1).standard_normal(distance).astype(np.float16), 12)
        frame = kvmnn.encode(words, effort="fast")
        assert kvmnn.decode(frame).tobytes() == words.tobytes()
        assert len(frame) < 1.02 * len(kvmnn.encode(words))


def test_output_buffer_has_written_bytes_until_finished() -> None:
    room = OutputBuffer(10)
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
def test_concat_buffers_of_several_owners(first: int, second: int, in_place: bool) -> None:
    """In the room of the first one, but where one of its parts lies before where it stays."""
    room, other = OutputBuffer(40), OutputBuffer(8)
    room.write(first, b"first")
    room.write(second, b"second")
    other.write(0, b"01234567")
    parts = [
        b"head",
        segments.BufferSlice(5, room, first),
        segments.BufferSlice(3, other, 2),
        segments.BufferSlice(6, room, second),
        b"bytes",
    ]
    assert (segments._find_owner(parts) is room) == in_place
    assert (
        segments.concat(parts, 2)
        == segments.concat(parts, 2, segments._find_owner(parts))
        == b"headfirst234secondbytes"
    )


def test_count_duplicates_equals_set_count() -> None:
    rng = np.random.default_rng(1)
    for n, most in ((0, 9), (1, 9), (2, 2), (3, 9), (1_000, 300), (9_000, 1 << 63)):
        numbers = rng.integers(1, most, n, np.uint64)
        assert count_duplicates(numbers) == n - np.unique(numbers).size
    assert count_duplicates(np.zeros(5, np.uint64)) == 4


def test_count_duplicates_colliding_hashes_take_no_longer() -> None:
    """So that all fall together in a table: they count as if there were more, and take no longer."""
    spread, whole = 0x9E3779B97F4A7C15, (1 << 64) - 1
    mixed = [pow(spread, -1, 1 << 64) * slot & whole for slot in range(1, 30_001)]
    numbers = np.array([x ^ x >> 29 ^ x >> 58 for x in mixed], np.uint64)
    assert (((numbers ^ numbers >> np.uint64(29)) * np.uint64(spread)) >> np.uint64(40) == 0).all()
    assert count_duplicates(numbers) > 20_000


def test_sample_hashes_do_not_depend_on_position() -> None:
    """Chosen are the same words wherever they are; outputs that are full end it."""
    data = np.tile(np.random.default_rng(1).integers(0, 256, 2_000, np.uint8), 2)
    for stride in (2, 4):
        numbers, places = np.empty(500, np.uint64), np.empty(500, np.int64)
        half = 2_000 // stride
        found = sample_hashes(data, stride, np.array([0, half]), half // 2, numbers, places)
        assert 0 < found < 500 and found % 2 == 0
        assert (numbers[: found // 2] == numbers[found // 2 : found]).all()
        assert (places[: found // 2] + half == places[found // 2 : found]).all()
        assert sample_hashes(data, stride, np.array([0, half]), half // 2, numbers[:3], places) == 3
        for begin, window in ((half * 2 - 31, 32), (-1, 32), (0, 7)):
            with pytest.raises(kvmnn.KvmnnError):
                sample_hashes(data, stride, np.array([begin]), window, numbers, places)
    with pytest.raises(kvmnn.KvmnnError, match="of 3 bytes"):
        sample_hashes(data, 3, np.array([0]), 32, numbers, places)
