"""Lanes that are read where the frame has them: payloads of raw blocks, and what only looks like one."""

from __future__ import annotations

import struct

import codec_model
import numpy as np
import pytest
from codec_samples import verdict

import kvmnn
from kvmnn.frames import verify_roundtrip

RAW, RLE_BLOCK, COMPRESSED = 0, 1, 2
MAGIC = b"\x28\xb5\x2f\xfd"


def block(data: bytes, last: bool, kind: int = RAW, size: int | None = None) -> bytes:
    return (((len(data) if size is None else size) << 3) | kind << 1 | last).to_bytes(3, "little") + data


def zstd_frame(
    data: bytes,
    sizes: list[int],
    width: int = 4,
    descriptor: int = 0x20,
    content: int | None = None,
    window: int | None = None,
) -> bytes:
    """A frame with raw blocks of these sizes, of one segment where it has no window."""
    blocks, at = b"", 0
    for number, size in enumerate(sizes):
        blocks += block(data[at : at + size], number + 1 == len(sizes))
        at += size
    held = (at if content is None else content) - (256 if width == 2 else 0)
    code = {1: 0, 2: 1, 4: 2, 8: 3}[width] << 6
    head = bytes([descriptor | code] if window is None else [code, window])
    return MAGIC + head + (held % (1 << 8 * width)).to_bytes(width, "little") + blocks


def frame_of(words: int, payloads: list[bytes], modes: list[int] | None = None) -> bytes:
    streams = zip(payloads, modes or [0] * len(payloads), strict=True)
    headers = (struct.pack("<BBII", mode, 1, words, len(payload)) + payload for payload, mode in streams)
    return words.to_bytes(4, "little") + b"".join(headers)


def check(frame: bytes, stride: int, dtype: str) -> bytes | None:
    """The reference's verdict and bytes, by every way to decode."""
    try:
        expected = codec_model.decode(frame, stride)
    except codec_model.Reject:
        assert verdict(frame, dtype) is None
        return None
    assert verdict(frame, dtype) == (dtype, expected)
    for threads in (1, 2):
        assert kvmnn.decode(frame, dtype=dtype, threads=threads).tobytes() == expected
    assert verify_roundtrip(frame, expected, dtype=dtype)
    assert not verify_roundtrip(frame, expected[:-1] + bytes([expected[-1] ^ 1]), dtype=dtype)
    rows = np.zeros((5, len(expected) // stride + 7, stride), np.uint8)
    kvmnn.decode(frame, dtype=dtype, out=rows[2, : len(expected) // stride])
    assert rows[2].tobytes() == expected + bytes(7 * stride) and not rows[3:].any()
    return expected


@pytest.mark.parametrize("stride", [2, 4])
def test_lane_reader_raw_blocks_of_every_size(stride: int) -> None:
    rng, dtype = np.random.default_rng(stride), {2: "fp16", 4: "fp32"}[stride]
    for words in (1, 2, 3, 300, 5000):
        lanes = [rng.bytes(words) for _ in range(stride)]
        payloads = []
        for lane in lanes:  # cut at other places in each lane, and into frames one after the other
            cuts = sorted({0, words, *rng.integers(0, words + 1, 4).tolist()})
            sizes, ends = np.diff(cuts).tolist(), int(rng.integers(1, len(cuts)))
            first = zstd_frame(lane, sizes[:ends], window=None if ends % 2 else 7 + ends << 3)
            rest = zstd_frame(lane[cuts[ends] :], sizes[ends:], 8) if ends < len(sizes) else b""
            payloads.append(first + rest)
        assert check(frame_of(words, payloads), stride, dtype) == codec_model.join(lanes)
        if words > 4:
            for lane in range(stride):
                modes = [0] * stride
                modes[lane] = 1
                check(frame_of(words, payloads, modes), stride, dtype)


def test_lane_reader_other_frames_have_the_verdict_of_libzstd() -> None:
    lane, good = bytes(range(200)), zstd_frame(bytes(range(200)), [200], 1)
    others = [
        zstd_frame(lane, [200], 1, content=199),
        zstd_frame(lane, [200], 1, content=201),
        zstd_frame(lane, [150], 1),
        zstd_frame(lane, [100, 100], 1)[:-1],
        zstd_frame(lane, [100, 100], 1) + b"\0",
        zstd_frame(lane, [200], 1, descriptor=0x24),  # a checksum that is not there
        zstd_frame(lane, [200], 1, descriptor=0x28),  # the reserved bit
        zstd_frame(lane, [200], 1, descriptor=0x30),  # the unused bit
        zstd_frame(lane, [200], 1, descriptor=0x21),  # a dictionary
        zstd_frame(lane, [200], 2),
        zstd_frame(lane, [200], 4),
        zstd_frame(lane, [200], 8, content=1 << 60),
        zstd_frame(lane, [100, 0, 100], 1),
        zstd_frame(lane, [200, 0], 1),
        zstd_frame(b"", [0], 1) + good,
        good + zstd_frame(b"", [0], 1),
        good + zstd_frame(lane, [1], 1),
        MAGIC + b"\x20\xc8" + block(lane, False),
        MAGIC + b"\x20\xc8" + block(lane[:100], False) + block(b"\x07", True, RLE_BLOCK, 100),
        MAGIC + b"\x20\xc8" + block(lane[:100], False) + block(lane[:100], True, 3),
        b"\x50\x2a\x4d\x18\x02\0\0\0ab" + good,
        good[:4],
        good[:5],
        good[:6],
        good[:8],
        good[1:],
    ]
    assert check(frame_of(200, [good, good]), 2, "fp16") == codec_model.join([lane, lane])
    found = [check(frame_of(200, [good, other]), 2, "fp16") for other in others]
    assert 4 < sum(one is not None for one in found) < len(found) - 8


def test_lane_reader_largest_block_and_one_above() -> None:
    lane = np.random.default_rng(1).bytes((128 << 10) + 1)
    for sizes in ([128 << 10, 1], [1, 128 << 10], [(128 << 10) + 1]):
        check(frame_of(len(lane), [zstd_frame(lane, sizes)] * 2), 2, "fp16")


@pytest.mark.parametrize("window", range(0, 256, 3))
def test_lane_reader_windows_of_every_size(window: int) -> None:
    """Blocks may be as large as the window, and windows as large as a release takes."""
    lane = np.random.default_rng(window).bytes(128 << 10)
    for size in (300, 1 << 10, (1 << 10) + 1, 1 << 16, (1 << 16) + 1, 128 << 10):
        check(frame_of(size, [zstd_frame(lane, [size], 8, window=window)] * 2), 2, "fp16")
    check(frame_of(200, [zstd_frame(lane, [200], 1, window=window)] * 2), 2, "fp16")  # says no size
    check(frame_of(600, [zstd_frame(lane, [600], 2, window=window)] * 2), 2, "fp16")


def test_lane_reader_long_noise_lane() -> None:
    """Longer than libzstd's window: a lane of raw blocks as it writes them."""
    raw = np.random.default_rng(5).bytes(6 << 20)
    frame = kvmnn.encode(raw, dtype="fp16")
    assert {frame[14 + 4] & 0xE0} == {0x80}  # a window, and a size of four bytes
    assert check(frame, 2, "fp16") == raw


def test_decode_frame_overlapping_its_output() -> None:
    raw = np.random.default_rng(2).bytes(6000)
    frame = np.frombuffer(kvmnn.encode(raw, dtype="fp16", codecs=("zstd",)), np.uint8)
    for at in (0, 1, 2999, 5999):
        room = np.zeros(frame.size + 6000, np.uint8)
        room[at : at + frame.size] = frame
        kvmnn.decode(room[at : at + frame.size], dtype="fp16", out=room[:6000])
        assert room[:6000].tobytes() == raw
        room[at : at + frame.size] = frame
        rows = room[:6000].reshape(3, 2000)[::-1]
        kvmnn.decode(room[at : at + frame.size], dtype="fp16", out=rows)
        assert rows.tobytes() == raw


def test_decode_frame_changed_concurrently_stays_in_bounds() -> None:
    """What was checked when the frame was opened is checked again: nothing outside of it is read, and it ends."""
    from kvmnn.frames import _decoder

    raw = np.random.default_rng(3).bytes(400_000)
    frame = np.frombuffer(kvmnn.encode(raw, dtype="fp16", effort="fast"), np.uint8)
    out = np.zeros((1, len(raw)), np.uint8)
    for place in range(14, 40):
        for value in (0, 1, 7, 0xFF):
            changing = frame.copy()
            opened = _decoder.ParsedFrame(changing, 2, 3)
            opened.decode()
            changing[place] = value
            opened.join(out)
            opened.close()
    assert out.any()
