"""The cases of tools/fuzz/run.py: each makes its input from a seed and a number and checks what kvmnn does with it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import codec_model
import files
import numpy as np
import profile_cases
import zstandard
from damage import damaged

import kvmnn
from kvmnn.frames import zstd
from kvmnn.frames.options import PREDICTORS, parse_spec

STRIDE = {"fp16": 2, "bf16": 2, "fp32": 4}
LIMIT = 32 << 20  # raw bytes: above, a frame's claim must be refused by max_bytes, and the reference is not asked


def one_shot() -> codec_model.Decompress:
    """ZSTD_decompress of the libzstd release that kvmnn uses: releases differ about damaged blocks."""
    if zstd.get_binding() == "system":
        paths = ["libzstd.so.1", "libzstd.so"]
    else:
        paths = [str(path) for path in sorted(Path(zstandard.__file__).parent.glob("_cffi.*"))]
    return next(filter(None, map(codec_model.library, paths)), codec_model.zstd_decompress_by_frames)


DECOMPRESS = one_shot()


def run(seed: int, number: int, kinds: list[str]) -> tuple[int, int]:
    """Run a case; how often kvmnn was called, and how many inputs it accepted."""
    rng = Random(f"{seed}:{number}")
    kind = choose(rng, kinds)
    return KINDS[kind][1](rng, KINDS[kind][0](rng))


def describe(seed: int, number: int, kinds: list[str]) -> dict[str, Any]:
    """The input of a case, for a report."""
    rng = Random(f"{seed}:{number}")
    kind = choose(rng, kinds)
    made = KINDS[kind][0](rng)
    return {"kind": kind, "made": {k: v.hex() if isinstance(v, bytes) else repr(v) for k, v in made.items()}}


def choose(rng: Random, kinds: list[str]) -> str:
    return rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]


# -- raw bytes --------------------------------------------------------------------------------------------------------


def some_bytes(rng: Random, most: int) -> bytes:
    """Up to `most` bytes of one of the textures that matter to the codec."""
    n = rng.choice((1, 2, 3, 4, 5, 8, 9, 63, 64, 65, 127, 128, 129, 131, 132, 135, 255, 256, 262, 263, 300))
    if rng.random() < 0.5:
        n = rng.randrange(1, most + 1)
    n = min(n, most)
    texture = rng.randrange(7)
    if texture == 0:
        return rng.randbytes(n)
    if texture == 1:
        return bytes([rng.randrange(256)]) * n
    if texture == 2:
        out = bytearray()
        while len(out) < n:
            out += bytes([rng.choice((0, 0, 1, 128, 255, rng.randrange(256)))]) * rng.choice(
                (1, 1, 2, 3, 4, 5, 6, 127, 128, 129, 130, 131, 132, 134, 135, 262, 266)
            )
        return bytes(out[:n])
    if texture == 3:
        step = rng.randrange(256)
        return bytes(i * step + (i >> 7) & 255 for i in range(n))
    if texture == 4:
        alphabet = rng.randbytes(rng.randrange(1, 9))
        return bytes(rng.choices(alphabet, k=n))
    if texture == 5:
        unit = rng.randbytes(rng.randrange(1, 90))
        return (unit * (n // len(unit) + 1))[:n]
    scale = 10 ** rng.uniform(-3, 3)
    values = np.random.default_rng(rng.getrandbits(32)).normal(scale=scale, size=n // 2 + 1).cumsum()
    return values.astype(rng.choice(["<f2", "<f4"]) if scale < 100 else "<f4").tobytes()[:n]


def whole_words(rng: Random, stride: int, most: int) -> bytes:
    data = some_bytes(rng, most)
    return data + bytes(-len(data) % stride)


def some_predictors(rng: Random) -> tuple[str, ...]:
    names = tuple(name for name in PREDICTORS if rng.random() < 0.6)
    return names or PREDICTORS


def some_codecs(rng: Random) -> tuple[str, ...]:
    return rng.choice([("rle", "zstd"), ("rle", "zstd"), ("rle",)])


# -- hostile streams and frames ---------------------------------------------------------------------------------------


def rle_tokens(rng: Random) -> tuple[bytes, int]:
    """Any tokens at all, and the length of their output."""
    payload, size = bytearray(), 0
    for _ in range(rng.randrange(1, 20)):
        control = rng.choice((0, 1, 127, 128, 129, 255, rng.randrange(256)))
        payload.append(control)
        payload += rng.randbytes(1 if control > 127 else control + 1)
        size += (control & 127) + 4 if control > 127 else control + 1
    return bytes(payload), size


def zstd_blocks(rng: Random) -> tuple[bytes, int]:
    """A frame written block by block, and the length that its raw and RLE blocks add up to."""
    blocks, size = b"", 0
    count = rng.randrange(1, 5)
    for i in range(count):
        kind = rng.choice((0, 0, 1, 1, 2, 3 if rng.random() < 0.05 else 0))
        content = some_bytes(rng, 300)
        length = len(content)
        if kind == 1:
            length, content = rng.choice((0, 1, 100, 131072, 131073, 70000, (1 << 21) - 1)), content[:1]
        elif kind == 2:
            inner = zstandard.ZstdCompressor(level=rng.choice((1, 3, 19))).compress(content)
            content = inner[-rng.randrange(4, len(inner)) :]  # mostly a compressed block, or a piece of one
            length = len(content)
        size += length if kind < 2 else 0
        blocks += (length << 3 | kind << 1 | (i == count - 1)).to_bytes(3, "little") + content
    descriptor, rest = rng.choice((0, 0, 4, 8, 16)), bytes([rng.randrange(256)])
    if rng.random() < 0.5:
        code = rng.randrange(4)
        descriptor |= code << 6 | (32 if code == 0 or rng.random() < 0.3 else 0)
        width = (1, 2, 4, 8)[code]
        rest = rest if not descriptor & 32 else b""
        rest += (max(0, size - (256 if code == 1 else 0)) % (1 << 8 * width)).to_bytes(width, "little")
    if descriptor & 4:
        blocks += rng.randbytes(4)
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + rest + blocks, size


def zstd_payload(rng: Random) -> tuple[bytes, int]:
    """Frames of all kinds after each other, sometimes damaged, and the length of their content."""
    payload, size = b"", 0
    for _ in range(rng.randrange(1, 4)):
        kind = rng.randrange(5)
        if kind == 0:
            body = rng.randbytes(rng.randrange(20))
            payload += struct.pack("<II", 0x184D2A50 + rng.randrange(17), len(body)) + body
        elif kind == 1:
            made, length = zstd_blocks(rng)
            payload, size = payload + made, size + length
        else:
            content = b"" if rng.random() < 0.2 else some_bytes(rng, 600)
            compressor = zstandard.ZstdCompressor(
                level=rng.choice((-3, 1, 3, 3, 9, 19)),
                write_content_size=rng.random() < 0.6,
                write_checksum=rng.random() < 0.3,
            )
            payload, size = payload + compressor.compress(content), size + len(content)
    return (damaged(rng, payload) if rng.random() < 0.3 else payload), size


def stream(rng: Random, words: int) -> bytes:
    """A stream that claims to hold `words` bytes, or nearly."""
    draw = rng.random()
    if draw < 0.3:
        payload, codec = rle_tokens(rng)[0], 0
    elif draw < 0.6:
        payload, codec = zstd_payload(rng)[0], 1
    else:
        content = some_bytes(rng, 400 if words < 100_000 else 1)
        content = (content * (words // len(content) + 1))[:words]
        codec = rng.randrange(2)
        payload = codec_model.rle_encode(content) if codec == 0 else codec_model.zstd_compress(content)
    mode = rng.choice((0, 1, 2, 2, 1, 0, rng.randrange(256) if rng.random() < 0.1 else 0))
    raw_len = words if rng.random() < 0.95 else rng.choice((0, 1, words + 1, 1 << 31, (1 << 32) - 1))
    return struct.pack("<BBII", mode, codec, raw_len, len(payload)) + payload


def make_frame(rng: Random) -> dict[str, Any]:
    """A valid frame that something happened to."""
    stride = rng.choice((2, 4))
    data = whole_words(rng, stride, rng.choice((60, 60, 400, 4000)))
    frame = kvmnn.encode(
        data,
        dtype="fp16" if stride == 2 else "fp32",
        predictors=some_predictors(rng),
        codecs=rng.choice([("rle", "zstd"), ("rle",), ("zstd",)]),
        threads=1,
    )
    draw = rng.random()
    if draw < 0.1:  # streams in another order or number
        parts = [
            frame[s.offset : s.payload_offset + s.payload_bytes] for s in kvmnn.inspect(frame, entropy=False).streams
        ]
        frame = frame[:4] + b"".join(rng.choices(parts, k=rng.choice((1, 2, 2, 3, 4, 4, 5))))
    elif draw < 0.2:  # two frames spliced
        other = kvmnn.encode(whole_words(rng, stride, 200), dtype="fp16" if stride == 2 else "fp32", threads=1)
        frame = frame[: rng.randrange(len(frame) + 1)] + other[rng.randrange(len(other)) :]
    if draw > 0.05:
        frame = damaged(rng, frame)
    return {"frame": frame, "codecs": some_codecs(rng)}


def make_payloads(rng: Random) -> dict[str, Any]:
    """A frame of hand-made streams, whose lengths agree with the first one's content."""
    if rng.random() < 0.5:
        payload, words = rle_tokens(rng)
        codec = 0
    else:
        payload, words = zstd_payload(rng)
        codec = 1
    words = max(1, words + rng.choice((0, 0, 0, 0, 1, -1)))
    first = struct.pack("<BBII", rng.randrange(3), codec, words, len(payload)) + payload
    others = [stream(rng, words) for _ in range(rng.choice((1, 3)))]
    if rng.random() < 0.5:
        filler = bytes([rng.randrange(256)]) * words
        packed = codec_model.zstd_compress(filler)
        others = [struct.pack("<BBII", 2, 1, words, len(packed)) + packed for _ in others]
    parts = [first, *others]
    rng.shuffle(parts)
    return {"frame": words.to_bytes(4, "little") + b"".join(parts), "codecs": some_codecs(rng)}


def check_frame(rng: Random, made: dict[str, Any]) -> tuple[int, int]:
    """Verdict, output, `inspect` and `out=` of a frame, for every container."""
    frame, codecs = made["frame"], made["codecs"]
    accepted = calls = 0
    for dtype in (None, "fp16", "bf16", "fp32"):
        got = decoded(frame, dtype=dtype, codecs=codecs, max_bytes=LIMIT, threads=rng.choice((1, 2, None)))
        calls += 1
        if int.from_bytes(frame[:4], "little") * STRIDE[dtype or "fp32"] > LIMIT:
            continue
        expected = expect(frame, dtype, "zstd" in codecs)
        assert got == expected, f"decode as {dtype} gives {got!r:.300}, reference {expected!r:.300}"
        accepted += got is not None
    got = decoded(frame, codecs=codecs, max_bytes=LIMIT)
    out = bytearray(b"\xa5") * (len(got[1]) if got else rng.choice((0, 1, 2, 64, 400)))
    try:
        kvmnn.decode(frame, codecs=codecs, out=out, max_bytes=LIMIT)
        assert got is not None and bytes(out) == got[1], "decode into out differs"
    except kvmnn.KvmnnError:
        assert got is None and not out.strip(b"\xa5"), "out was touched by a refused frame"
    decode_too = claim(frame) <= LIMIT  # else inspect reads headers alone
    try:
        info = kvmnn.inspect(frame, codecs=codecs, entropy=decode_too)
    except kvmnn.KvmnnError:
        assert got is None, "inspect refuses what decode accepts"
    else:
        assert info.frame_bytes == len(frame), "inspect does not account for every byte"
        assert not decode_too or (got is not None and info.raw_bytes == len(got[1])), "inspect accepts more than decode"
    frames = [frame, kvmnn.encode(b"abcd", dtype="fp16")]
    try:
        arrays = kvmnn.decode_many(frames, codecs=codecs, max_bytes=LIMIT)
        assert got is not None and arrays[0].tobytes() == got[1] and arrays[1].tobytes() == b"abcd"
    except kvmnn.KvmnnError as error:
        assert got is None and str(error).startswith("item 0: "), f"decode_many: {error}"
    return calls + 4, accepted


def claim(frame: bytes) -> int:
    return 4 * int.from_bytes(frame[:4], "little")


def decoded(frame: bytes, **options: Any) -> tuple[int, bytes] | None:
    try:
        array = kvmnn.decode(frame, **options)
    except kvmnn.KvmnnError:
        return None
    return array.itemsize, array.tobytes()


def expect(frame: bytes, dtype: str | None, with_zstd: bool) -> tuple[int, bytes] | None:
    try:
        if dtype is None:
            return codec_model.decode_any(frame, with_zstd, DECOMPRESS)
        return STRIDE[dtype], codec_model.decode(frame, STRIDE[dtype], with_zstd, DECOMPRESS)
    except codec_model.Reject:
        return None


# -- encoding ---------------------------------------------------------------------------------------------------------


def make_values(rng: Random) -> dict[str, Any]:
    dtype = rng.choice(("fp16", "bf16", "fp32"))
    return {
        "data": whole_words(rng, STRIDE[dtype], rng.choice((40, 400, 400, 6000, 6000, 40_000))),
        "dtype": dtype,
        "names": some_predictors(rng),
        "hi": some_predictors(rng) if dtype != "fp32" and rng.random() < 0.3 else None,
        "codecs": some_codecs(rng),
    }


def check_values(rng: Random, made: dict[str, Any]) -> tuple[int, int]:
    """Exact frames byte for byte; the other efforts through the reference decoder; blocks and many at once."""
    data, dtype, codecs = made["data"], made["dtype"], made["codecs"]
    stride, with_zstd = STRIDE[dtype], "zstd" in codecs
    options = {"dtype": dtype, "predictors": made["names"], "hi_predictors": made["hi"], "codecs": codecs}
    frame = kvmnn.encode(data, threads=rng.choice((1, 2)), **options)
    assert frame == codec_model.encode(data, stride, made["names"], made["hi"], with_zstd), "exact frame differs"
    assert decoded(frame, dtype=dtype, codecs=codecs) == (stride, data), "round trip"
    effort = "max" if len(data) < 500 and rng.random() < 0.2 else rng.choice(["balanced", "fast"])
    other = kvmnn.encode(data, effort=effort, **options)
    assert codec_model.decode(other, stride, with_zstd, DECOMPRESS) == data, f"effort {effort} loses data"
    if effort != "fast":
        assert (len(other) <= len(frame)) if effort == "max" else (len(other) >= len(frame)), f"effort {effort}: size"
    frames = kvmnn.encode_many([data, data[:stride]], **options)
    assert frames[0] == frame, "encode_many differs"
    options.pop("hi_predictors")
    block = kvmnn.encode_block(
        data, data[:stride], dtype=dtype, predictors_k=made["names"], predictors_v="raw", codecs=codecs
    )
    assert block.raw_hash == codec_model.fnv1a64(data[:stride], kvmnn.fnv1a64(data)), "raw hash"
    assert block.is_stored == (block.attempted_bytes < block.raw_bytes), "joint rule"
    return 6, 1


def make_specs(rng: Random) -> dict[str, Any]:
    words = (
        "raw",
        "delta_seq",
        "xor_seq",
        "pair_delta",
        "RAW",
        "",
        " ",
        "\t",
        "raw\n",
        "\xa0raw",
        "raw raw",
        "\0",
        "ra",
    )
    tokens = [
        rng.choice(("", " ", "\t ")) + rng.choice(words) + rng.choice(("", " ", "\t")) for _ in range(rng.randrange(5))
    ]
    return {"spec": ",".join(tokens), "default": rng.random() < 0.5}


def check_specs(rng: Random, made: dict[str, Any]) -> tuple[int, int]:
    spec, default = made["spec"], made["default"]
    names = codec_model.parse_spec(spec, default)
    assert parse_spec(spec, default) == names, f"{spec!r} is read differently"
    data = whole_words(rng, 2, 200)
    expected = codec_model.encode(data, 2, codec_model.parse_spec(spec, True))
    assert kvmnn.encode(data, dtype="fp16", predictors=spec) == expected, f"{spec!r} encodes differently"
    return 2, 1


Make = Callable[[Random], dict[str, Any]]
Check = Callable[[Random, dict[str, Any]], tuple[int, int]]
KINDS: dict[str, tuple[Make, Check]] = {
    "frames": (make_frame, check_frame),
    "payloads": (make_payloads, check_frame),
    "values": (make_values, check_values),
    "specs": (make_specs, check_specs),
    "files": (files.make, files.check),
    "profiles": (profile_cases.make_profile, profile_cases.check_profile),
    "streams": (profile_cases.make_stream, profile_cases.check_stream),
}
WEIGHTS = {"frames": 50, "payloads": 35, "values": 8, "specs": 2, "files": 5, "profiles": 4, "streams": 4}
