"""Small frames, cut and damaged at every byte, decode or are refused as in the reference."""

from collections.abc import Iterator

import codec_model
import pytest
from codec_samples import expected_verdict, kv_like, stream, verdict
from slow_cases import mark_most_slow

import kvmnn


def small_frames() -> dict[str, bytes]:
    ramp = bytes(i // 3 & 255 for i in range(240))
    rows = bytes(b for i in range(30) for b in (7, 7, 7, i, 0, 0, 0, 1))
    mixed = b"abcabcabc" * 8 + bytes(40) + bytes(range(80))
    frames = {}
    for dtype, stride in (("fp16", 2), ("fp32", 4)):
        for name, data in (("ramp", ramp), ("rows", rows), ("mixed", mixed), ("kv", kv_like(240 // stride, dtype))):
            for predictor in ("raw", "delta_seq", "xor_seq"):
                for codecs in (("rle",), ("zstd",)):
                    key = f"{dtype} {name} {predictor} {codecs[0]}"
                    frames[key] = kvmnn.encode(data, dtype=dtype, predictors=predictor, codecs=codecs)
    frames["one word"] = kvmnn.encode(b"ab", dtype="fp16")
    frames["one wide word"] = kvmnn.encode(b"abcd", dtype="fp32")
    low = stream(1, 0, 9, b"\x00a\x80b\x03cccc")
    high = stream(2, 1, 9, codec_model.zstd_compress(b"wxyz") + codec_model.zstd_compress(b"ab012"))
    frames["by hand"] = (9).to_bytes(4, "little") + low + high
    return frames


FRAMES = small_frames()
WALKED = [name for name in FRAMES if not name.startswith(("fp32 ramp", "fp32 rows"))]
"""Frames of which every byte is cut or flipped: those of two lanes, and some of four, whose lanes are read alike."""


def same(frame: bytes, dtypes: tuple[str | None, ...] = (None, "fp16", "fp32")) -> bool:
    """Whether kvmnn and the reference agree; the return value says whether the frame was accepted at all."""
    accepted = False
    for dtype in dtypes:
        expected = expected_verdict(frame, dtype)
        assert verdict(frame, dtype) == expected, (dtype, frame.hex())
        accepted |= expected is not None
    return accepted


def headers(frame: bytes) -> Iterator[int]:
    for part in kvmnn.inspect(frame).streams:
        yield part.offset


@pytest.mark.parametrize("name", mark_most_slow(WALKED, 5))
def test_frame_cut_at_every_byte_equals_reference(name: str) -> None:
    frame = FRAMES[name]
    assert same(frame)
    streams = kvmnn.inspect(frame).streams
    two_lanes = streams[1].payload_offset + streams[1].payload_bytes
    for end in range(len(frame)):
        # Two of an FP32 frame's four streams are an FP16 frame.
        assert same(frame[:end]) == (end == two_lanes)
        assert verdict(frame[:end], "fp16" if len(streams) == 2 else "fp32") is None
        same(frame[end + 1 :])
    for more in (b"\0", b"\x80a", bytes(10), frame):
        assert not same(frame + more)


@pytest.mark.parametrize("name", mark_most_slow(WALKED, 5))
def test_frame_flipped_bytes_equal_reference(name: str) -> None:
    frame = FRAMES[name]
    head = {at + i for at in headers(frame) for i in range(10)} | set(range(4))
    for at in range(len(frame)):
        flips = [1 << bit for bit in range(8)] + [255] if at in head else [1 << at % 8, 128, 255 - at % 7]
        for flip in flips:
            same(frame[:at] + bytes([frame[at] ^ flip]) + frame[at + 1 :], (None,))


@pytest.mark.parametrize("name", [name for name in FRAMES if "mixed" in name or "word" in name or "hand" in name])
def test_frame_any_mode_and_codec_equals_reference(name: str) -> None:
    frame = FRAMES[name]
    accepted = 0
    for at in headers(frame):
        for offset in (0, 1):
            for value in range(256):
                accepted += same(frame[: at + offset] + bytes([value]) + frame[at + offset + 1 :], (None,))
    streams = len(kvmnn.inspect(frame).streams)
    assert accepted == 4 * streams  # modes 0, 1, 2 and the one true codec


@pytest.mark.parametrize("name", [name for name in FRAMES if "ramp" in name])
def test_frame_any_length_field_equals_reference(name: str) -> None:
    frame = FRAMES[name]
    for at in [0, *(at + field for at in headers(frame) for field in (2, 6))]:
        for value in [*range(260), 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]:
            same(frame[:at] + value.to_bytes(4, "little") + frame[at + 4 :], (None,))


@pytest.mark.parametrize("name", [name for name in FRAMES if "kv" in name])
def test_frame_reordered_streams_equal_reference(name: str) -> None:
    frame = FRAMES[name]
    info = kvmnn.inspect(frame)
    parts = [frame[s.offset : s.payload_offset + s.payload_bytes] for s in info.streams]
    words = frame[:4]
    assert same(words + b"".join(reversed(parts)))
    assert same(words + parts[0] * len(parts))
    assert not same(words + b"".join(parts[1:])) or len(parts) == 3
    assert not same(words + b"".join(parts) + parts[0])
    assert same(words + b"".join(parts[:2] * 2))
    assert same(words + b"".join(parts[:2]))
    empty = stream(0, 0, 0, b"")
    for at in range(len(parts)):
        assert not same(words + b"".join([*parts[:at], empty, *parts[at + 1 :]]))
        assert not same(words + b"".join([*parts[:at], empty, *parts[at:]]))
    assert not same(bytes(4) + empty * len(parts))


def test_stream_empty_ignores_mode_and_codec() -> None:
    from kvmnn.frames import _decoder

    for mode, codec in ((0, 0), (2, 1), (9, 9), (255, 7)):
        data = stream(mode, codec, 0, b"")
        assert _decoder.decode_stream(data, 3) == (b"", 10)
        assert codec_model.decode_stream(data) == (b"", 10)
    for data in (stream(0, 0, 0, b"x"), stream(0, 0, 0, b"")[:9], b""):
        with pytest.raises(kvmnn.FrameError):
            _decoder.decode_stream(data, 3)


def test_stream_damaged_equals_reference() -> None:
    from kvmnn.frames import _decoder, _encoder

    for data in (b"", b"a", b"aaaaaaaa", bytes(range(200)), kv_like(300)):
        encoded = _encoder.encode_stream(data, 7, 3)
        assert encoded == codec_model.encode_stream(data, codec_model.MODES)
        assert _encoder.encode_stream(data, 7, 1) == codec_model.encode_stream(data, codec_model.MODES, zstd=False)
        assert _decoder.decode_stream(encoded + b"tail", 3) == (data, len(encoded))
        for end in range(len(encoded)):
            with pytest.raises(kvmnn.FrameError):
                _decoder.decode_stream(encoded[:end], 3)
