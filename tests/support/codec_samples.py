"""Inputs for the codec's tests: bytes by name, arrays by kind, and zstd payloads with the verdict they must get."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import codec_model
import numpy as np
import zstandard
from hypothesis import settings
from hypothesis import strategies as st

import kvmnn
from kvmnn.frames import zstd

EXAMPLES = settings(deadline=None, max_examples=60)
NUMPY = {"fp16": np.dtype("<f2"), "bf16": np.dtype("<u2"), "fp32": np.dtype("<f4")}
STRIDE = {"fp16": 2, "bf16": 2, "fp32": 4}
PREDICTOR_SETS = [
    ("raw",),
    ("delta_seq",),
    ("xor_seq",),
    ("raw", "delta_seq"),
    ("raw", "xor_seq"),
    ("delta_seq", "xor_seq"),
    ("raw", "delta_seq", "xor_seq"),
]

# -- structured bytes -------------------------------------------------------------------------------------------------


def kv_like(words: int, dtype: str = "fp16", seed: int = 1) -> bytes:
    """Words as a language model's cache has them: a scale for each channel, slow drift over the tokens."""
    rng = np.random.default_rng(seed)
    dim = 64
    rows = -(-words // dim)
    drift = np.cumsum(rng.normal(size=(rows, dim)), axis=0) / np.sqrt(np.arange(1, rows + 1))[:, None]
    values = (drift * rng.lognormal(0, 1.5, dim) + rng.normal(size=dim)).reshape(-1)[:words]
    if dtype == "bf16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype(NUMPY[dtype]).tobytes()


def structured(words: int, stride: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Named inputs of `words` words, one for each way in which a candidate can win or tie."""
    rng = np.random.default_rng(seed + words * 8 + stride)
    n = words * stride
    yield "zeros", bytes(n)
    yield "constant", b"\xa5" * n
    yield "ramp", np.arange(words).astype(f"<u{stride}").tobytes()
    yield "byte ramp", bytes(i & 255 for i in range(n))
    yield "random", rng.bytes(n)
    yield "two values", rng.integers(0, 2, n, np.uint8).tobytes()
    yield "low alphabet", rng.integers(0, 9, n, np.uint8).tobytes()
    yield "sparse", (rng.integers(1, 255, n, np.uint8) * (rng.random(n) < 0.02)).astype(np.uint8).tobytes()
    yield "quantised", (np.round(rng.normal(size=words) * 4) / 4).astype(f"<f{stride}").tobytes()
    yield "repeats", (rng.bytes(96) * (n // 96 + 1))[:n]
    yield "toggle", b"".join(codec_model.split(bytes(n) + b"\x55\xaa" * n, 2))[n // 2 :][:n]
    yield "runs", runs(rng, words, stride)
    yield "kv", kv_like(words, "fp16" if stride == 2 else "fp32", seed)


def runs(rng: np.random.Generator, words: int, stride: int) -> bytes:
    """Lanes made of runs whose lengths surround every limit of the RLE tokens."""
    lengths = [1, 2, 3, 4, 5, 6, 127, 128, 129, 130, 131, 132, 133, 134, 135, 136, 261, 262, 263, 265, 266, 396]
    lanes = np.empty((words, stride), np.uint8)
    for lane in range(stride):
        pieces, filled = [], 0
        while filled < words:
            length = int(rng.choice(lengths))
            pieces.append(np.full(length, rng.integers(256), np.uint8))
            filled += length
        lanes[:, lane] = np.concatenate(pieces)[:words]
    return lanes.tobytes()


def sized(words: int) -> Callable[[int], bytes]:
    return lambda stride: np.random.default_rng(words).bytes(words * stride)


# -- hypothesis strategies --------------------------------------------------------------------------------------------


@st.composite
def run_bytes(draw: st.DrawFn, most: int = 40) -> bytes:
    """Bytes as a list of runs, long and short ones, over an alphabet that makes neighbours meet."""
    length = st.one_of(st.integers(1, 6), st.sampled_from([127, 128, 129, 130, 131, 132, 134, 135, 262, 265, 266]))
    pieces = draw(st.lists(st.tuples(st.integers(0, 3), length), min_size=1, max_size=most))
    return b"".join(bytes([value]) * n for value, n in pieces)


def word_bytes(stride: int) -> st.SearchStrategy[bytes]:
    """A whole number of words, at least one."""
    whole = st.binary(min_size=stride, max_size=400) | run_bytes()
    return whole.map(lambda data: data + bytes(-len(data) % stride))


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verdict(frame: bytes, dtype: str | None = None, **options: object) -> tuple[str, bytes] | None:
    """(dtype, raw bytes) that kvmnn decodes, None where it refuses the frame."""
    try:
        out = kvmnn.decode(frame, dtype=dtype, **options)
    except kvmnn.KvmnnError:
        return None
    return {"<f2": "fp16", "<u2": "bf16", "<f4": "fp32"}[out.dtype.newbyteorder("<").str], out.tobytes()


DECOMPRESS = codec_model.zstd_decompress_by_frames
if zstd.get_binding() == "system":  # another libzstd release than zstandard's has another mind about damaged payloads
    DECOMPRESS = codec_model.library("libzstd.so.1") or DECOMPRESS


def expected_verdict(frame: bytes, dtype: str | None = None, with_zstd: bool = True) -> tuple[str, bytes] | None:
    """The same from the codec_model."""
    try:
        if dtype is None:
            stride, raw = codec_model.decode_any(frame, with_zstd, DECOMPRESS)
            return ("fp16" if stride == 2 else "fp32"), raw
        return dtype, codec_model.decode(frame, STRIDE[dtype], with_zstd, DECOMPRESS)
    except codec_model.Reject:
        return None


def stream(mode: int, codec: int, raw_len: int, payload: bytes) -> bytes:
    return struct.pack("<BBII", mode, codec, raw_len, len(payload)) + payload


def frame_around(payload: bytes, raw_len: int, codec: int, mode: int = 0) -> bytes:
    """An FP16 frame whose low lane is `payload`."""
    other = stream(0, 0, raw_len, codec_model.rle_encode(bytes(raw_len)))
    return raw_len.to_bytes(4, "little") + stream(mode, codec, raw_len, payload) + other


# -- zstd payloads ----------------------------------------------------------------------------------------------------


class Payload(NamedTuple):
    name: str
    payload: bytes
    raw: bytes  # what the stream should hold
    accepted: bool


def zstd_payloads() -> list[Payload]:
    """What ZSTD_decompress must say to payloads that are not just one frame of ZSTD_compress."""
    data = bytes(np.random.default_rng(7).integers(0, 5, 3000, np.uint8))
    head, tail = data[:1100], data[1100:]
    pack = zstandard.ZstdCompressor(level=3).compress
    plain, empty = pack(data), pack(b"")
    unsized = zstandard.ZstdCompressor(level=3, write_content_size=False).compress
    summed = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)
    words = zstandard.ZstdCompressionDict(data * 3, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    trained = zstandard.train_dictionary(1024, [data[i : i + 60] for i in range(0, 2900, 10)])

    def skippable(body: bytes, number: int = 0) -> bytes:
        return struct.pack("<II", 0x184D2A50 + number, len(body)) + body

    def window(log: int, fraction: int = 0, content: bytes = data) -> bytes:
        """Raw blocks in a frame with a window descriptor and no content size."""
        blocks = (len(content) << 3 | 1).to_bytes(3, "little") + content
        return b"\x28\xb5\x2f\xfd\x00" + bytes([(log - 10) << 3 | fraction]) + blocks

    def rle_block(size: int, log: int = 21) -> bytes:
        return b"\x28\xb5\x2f\xfd\x00" + bytes([(log - 10) << 3]) + (size << 3 | 3).to_bytes(3, "little") + b"a"

    def flipped(payload: bytes, at: int, bits: int) -> bytes:
        return payload[:at] + bytes([payload[at] ^ bits]) + payload[at + 1 :]

    def long_matches(count: int) -> bytes:
        """Eight bytes, then a compressed block of `count` repetitions of the longest match, two bytes for each."""
        block = bytes([0, count, 0x54, 0, 0, 52]) + b"\xff\xff" * count + b"\x01"
        block_headers = [size.to_bytes(3, "little") for size in (8 << 3, len(block) << 3 | 2 << 1 | 1)]
        return b"\x28\xb5\x2f\xfd\x00\x58" + block_headers[0] + b"a" * 8 + block_headers[1] + block

    big = bytes(300_000)
    huge_skippable = struct.pack("<II", 0x184D2A50, 0xFFFFFFFF)
    return [
        Payload("plain", plain, data, True),
        Payload("two frames", pack(head) + pack(tail), data, True),
        Payload("sized and unsized frames", unsized(head) + pack(tail), data, True),
        Payload("two unsized frames", unsized(head) + unsized(tail), data, True),
        Payload("frame in front of empty ones", plain + empty + empty, data, True),
        Payload("empty frame first", empty + plain, data, True),
        Payload("empty unsized frame appended", plain + unsized(b""), data, True),
        Payload("empty unsized frame first", unsized(b"") + plain, data, True),
        Payload("empty frame only", empty, data, False),
        Payload("skippable first", skippable(b"hello") + plain, data, True),
        Payload("skippable last", plain + skippable(b"", 15), data, True),
        Payload("skippable between", pack(head) + skippable(bytes(99), 7) + pack(tail), data, True),
        Payload("skippable only", skippable(b"hello"), data, False),
        Payload("skippable beyond the end", plain + huge_skippable, data, False),
        Payload("skippable header cut", plain + skippable(b"")[:7], data, False),
        Payload("skippable cut", plain + skippable(b"hello")[:-1], data, False),
        Payload("no content size", unsized(data), data, True),
        Payload("no content size, 300 kB", unsized(big), big, True),
        Payload("300 kB", pack(big), big, True),
        Payload("checksum", summed, data, True),
        Payload("wrong checksum", flipped(summed, len(summed) - 1, 1), data, False),
        Payload("checksum cut", summed[:-1], data, False),
        Payload("checksum missing", summed[:-4], data, False),
        Payload("checksum flag without checksum", flipped(plain, 4, 4), data, False),
        *(
            Payload(f"level {level}", zstandard.ZstdCompressor(level=level).compress(data), data, True)
            for level in (-5, 1, 9, 19, 22)
        ),
        Payload("window log 12", window(12), data, True),
        Payload("window log 10, a larger raw block", window(10), data, True),
        Payload("window log 10, a larger RLE block", rle_block(3000, 10), b"a" * 3000, True),
        Payload("window log 27", window(27), data, True),
        Payload("window log 27 and a fraction", window(27, 1), data, True),
        Payload("window log 29", window(29), data, True),
        Payload("window log 31", window(31), data, True),
        Payload("window log 31 and a fraction", window(31, 7), data, True),
        Payload("window log 32", window(32), data, False),
        Payload("window log 41", window(41, 7), data, False),
        Payload("one byte of garbage after", plain + b"\x00", data, False),
        Payload("four bytes of garbage after", plain + b"\x28\xb5\x2f\xfd", data, False),
        Payload("garbage after", plain + b"garbage, and enough of it", data, False),
        Payload("garbage in front", b"\x00" + plain, data, False),
        Payload("no zstd at all", data[:80], data, False),
        Payload("cut", plain[:-1], data, False),
        Payload("cut to its header", plain[:8], data, False),
        Payload("cut to its magic", plain[:4], data, False),
        Payload("one byte", plain[:1], data, False),
        Payload("nothing", b"", data, False),
        Payload("more than said", pack(data + b"x"), data, False),
        Payload("more than said, unsized", unsized(data + b"x"), data, False),
        Payload("less than said", pack(data[:-1]), data, False),
        Payload("less than said, unsized", unsized(data[:-1]), data, False),
        Payload("two frames too many", plain + plain, data, False),
        Payload(
            "raw content dictionary without an id",
            zstandard.ZstdCompressor(level=3, dict_data=words).compress(data),
            data,
            False,
        ),
        Payload("dictionary id", zstandard.ZstdCompressor(level=3, dict_data=trained).compress(data), data, False),
        Payload("reserved bit", flipped(plain, 4, 8), data, False),
        Payload("unused bit", flipped(plain, 4, 16), data, True),
        Payload("reserved block type", window(27)[:6] + bytes([window(27)[6] | 6]) + window(27)[7:], data, False),
        Payload("legacy magic", b"\x1e" + plain[1:], data, False),
        Payload("RLE block of 128 KiB", rle_block(131072), b"a" * 131072, True),
        Payload("RLE block above 128 KiB", rle_block(131073), b"a" * 131073, True),
        Payload("RLE block of 2 MiB", rle_block((1 << 21) - 1), b"a" * ((1 << 21) - 1), True),
        Payload("raw block above 128 KiB", window(21, 0, big), big, True),
        *(
            Payload(f"compressed block of {k} long matches", long_matches(k), b"a" * (8 + k * 131074), accepted)
            for k, accepted in ((1, True), (2, False), (16, True))
        ),
    ]
