"""A slow second opinion: MNN's lossless KV codec in plain Python, written from its specification.

It shares nothing with kvmnn (and imports nothing of it), prefers the obvious to the fast, and is what the tests and the
fuzzer compare frames, outputs and verdicts with. A refusal is `Reject`.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from operator import xor
from typing import NamedTuple

import zstandard

RAW, DELTA_SEQ, XOR_SEQ = 0, 1, 2
MODES = {"raw": RAW, "delta_seq": DELTA_SEQ, "xor_seq": XOR_SEQ}
RLE, ZSTD = 0, 1
HEADER = 10


class Reject(Exception):
    """The engine's function returns false; of a frame, the message begins with the rule of docs/format.md."""


@contextmanager
def naming_rule(name: str) -> Iterator[None]:
    try:
        yield
    except Reject as error:
        raise Reject(f"{name}: {error}") from error


# -- lanes and predictors ---------------------------------------------------------------------------------------------


def split(data: bytes, stride: int) -> list[bytes]:
    return [data[lane::stride] for lane in range(stride)]


def join(lanes: list[bytes]) -> bytes:
    if any(len(lane) != len(lanes[0]) for lane in lanes):
        raise ValueError("lanes of unequal lengths")
    out = bytearray(sum(map(len, lanes)))
    for number, lane in enumerate(lanes):
        out[number :: len(lanes)] = lane
    return bytes(out)


def predict(stream: bytes, mode: int) -> bytes:
    if mode == RAW:
        return stream
    pairs = zip(stream, b"\0" + stream, strict=False)
    return bytes((byte - before) & 255 if mode == DELTA_SEQ else byte ^ before for byte, before in pairs)


def unpredict(stream: bytes, mode: int) -> bytes:
    if mode == RAW:
        return stream
    if mode == DELTA_SEQ:
        return bytes(total & 255 for total in accumulate(stream))
    return bytes(accumulate(stream, xor))


def parse_spec(spec: str, default_raw: bool) -> set[str]:
    if len(spec) == 0:
        return {"raw"} if default_raw else set()
    flags = set()
    for token in spec.split(","):
        while token and token[0] in " \t":
            token = token[1:]
        while token and token[-1] in " \t":
            token = token[:-1]
        if token in ("raw", "delta_seq", "xor_seq"):
            flags.add(token)
    return flags or {"raw"}


# -- RLE --------------------------------------------------------------------------------------------------------------


def _run(stream: bytes, at: int, cap: int = 131) -> int:
    end = at
    while end < len(stream) and end - at < cap and stream[end] == stream[at]:
        end += 1
    return end - at


def rle_encode(stream: bytes) -> bytes:
    if not stream:
        raise Reject("RLE of nothing")
    out, i = bytearray(), 0
    while i < len(stream):
        run = _run(stream, i)
        if run >= 4:
            out += bytes([0x80 | (run - 4), stream[i]])
            i += run
            continue
        block = bytearray()
        while i < len(stream) and len(block) < 128 and _run(stream, i, 4) < 4:
            block.append(stream[i])
            i += 1
        out.append(len(block) - 1)
        out += block
    return bytes(out)


def rle_decode(payload: bytes, expected: int) -> bytes:
    if not payload or expected == 0:
        raise Reject("empty RLE payload or output")
    out, i = bytearray(), 0
    while i < len(payload):
        control = payload[i]
        i += 1
        if control <= 127:
            token = payload[i : i + control + 1]
            if len(token) != control + 1:
                raise Reject("literals run past the payload")
            i += control + 1
        else:
            if i >= len(payload):
                raise Reject("no byte to repeat")
            token = payload[i : i + 1] * ((control & 127) + 4)
            i += 1
        if len(out) + len(token) > expected:
            raise Reject("more output than expected")
        out += token
    if len(out) != expected:
        raise Reject("less output than expected")
    return bytes(out)


# -- zstd: compress ---------------------------------------------------------------------------------------------------


def zstd_compress(stream: bytes) -> bytes:
    """ZSTD_compress at level 3: content size in the header, no checksum, no dictionary id."""
    return zstandard.ZstdCompressor(level=3).compress(stream)


# -- zstd: the verdict of ZSTD_decompress, in two independent ways ----------------------------------------------------

_MAGIC = b"\x28\xb5\x2f\xfd"
Decompress = Callable[[bytes, int], bytes]
"""payload, expected length -> content; `Reject` where ZSTD_decompress fails or gives another length."""


class ZstdFrame(NamedTuple):
    """One frame of a payload."""

    header: bytes  # magic to content size; empty for a skippable frame
    content_size: int | None
    body: bytes  # blocks and checksum


def zstd_frames(payload: bytes) -> list[ZstdFrame]:
    """The frames that fill `payload`, by their headers alone."""
    frames, at = [], 0
    while at < len(payload):
        start = at
        magic = _field(payload, at, 4)
        if 0x184D2A50 <= int.from_bytes(magic, "little") <= 0x184D2A5F:
            at += 8 + int.from_bytes(_field(payload, start + 4, 4), "little")
            if at > len(payload):
                raise Reject("a skippable frame runs past the payload")
            frames.append(ZstdFrame(b"", None, b""))
            continue
        if magic != _MAGIC:
            raise Reject("not a zstd frame")
        descriptor = _field(payload, at + 4, 1)[0]
        if descriptor & 0x08:
            raise Reject("reserved bit of the frame header set")
        single = bool(descriptor & 0x20)
        at += 5
        if not single:
            if (_field(payload, at, 1)[0] >> 3) + 10 > 31:
                raise Reject("window log above 31")
            at += 1
        dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
        if any(_field(payload, at, dictionary_bytes)):
            raise Reject("wants a dictionary")
        at += dictionary_bytes
        size_bytes = (int(single), 2, 4, 8)[descriptor >> 6]
        content_size = int.from_bytes(_field(payload, at, size_bytes), "little") + (256 if size_bytes == 2 else 0)
        at += size_bytes
        body, last = at, False
        while not last:
            word = int.from_bytes(_field(payload, at, 3), "little")
            last, kind, size = bool(word & 1), word >> 1 & 3, word >> 3
            if kind == 3:
                raise Reject("reserved block type")
            at += 3 + (1 if kind == 1 else size)
        at += 4 if descriptor & 0x04 else 0
        if at > len(payload):
            raise Reject("a frame runs past the payload")
        frames.append(ZstdFrame(payload[start:body], content_size if size_bytes else None, payload[body:at]))
    return frames


def _field(payload: bytes, at: int, size: int) -> bytes:
    field = payload[at : at + size]
    if len(field) != size:
        raise Reject("a zstd field runs past the payload")
    return field


def zstd_decompress_by_frames(payload: bytes, raw_len: int) -> bytes:
    """With nothing but python-zstandard, which decodes single frames, and in one shot only if it knows their size.

    Streaming is stricter about window and block sizes than ZSTD_decompress. So the one frame whose header does not say
    its size is given the size that is left for it. Where several do not say it, this verdict is that of streaming.
    """
    frames = [frame for frame in zstd_frames(payload) if frame.header]
    left = raw_len - sum(frame.content_size or 0 for frame in frames)
    if left < 0:
        raise Reject("more content than expected")
    unsized = [frame for frame in frames if frame.content_size is None]
    out = b""
    for frame in frames:
        if frame.content_size is None and len(unsized) == 1:
            window_at = 5
            header = frame.header[:4] + bytes([frame.header[4] | 0xC0]) + frame.header[window_at:]
            frame = frame._replace(header=header + left.to_bytes(8, "little"), content_size=left)
        out += _one_frame(frame, raw_len - len(out))
    if len(out) != raw_len:
        raise Reject("not the expected length")
    return out


def _one_frame(frame: ZstdFrame, room: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    try:
        if frame.content_size:
            return decompressor.decompress(frame.header + frame.body)
        pusher = decompressor.decompressobj()  # the other call does not look into a frame that claims to be empty
        out = pusher.decompress(frame.header + frame.body)
    except zstandard.ZstdError as error:
        raise Reject(str(error)) from None
    if not pusher.eof or pusher.unused_data:
        raise Reject("the frame does not end where its blocks do")
    if len(out) > (room if frame.content_size is None else 0):
        raise Reject("more output than expected")
    return out


def library(name: str) -> Decompress | None:
    """One-shot ZSTD_decompress of a shared library, or None where it cannot be opened.

    Releases of libzstd disagree about some damaged blocks (1.5.4 decodes a few that 1.5.6 refuses), so verdicts on
    damage can be compared with those of the same release only.
    """
    try:
        lib = ctypes.CDLL(name)
        decompress, is_error = lib.ZSTD_decompress, lib.ZSTD_isError
    except (OSError, AttributeError):
        return None
    decompress.restype = ctypes.c_size_t
    decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    is_error.argtypes = [ctypes.c_size_t]

    def zstd_decompress(payload: bytes, raw_len: int) -> bytes:
        room = min(raw_len, 1 << 29)  # claims beyond that are lies in every test
        with mmap.mmap(-1, max(room, 1)) as memory:  # takes only the pages that are written
            first = ctypes.c_char.from_buffer(memory)
            got = decompress(ctypes.addressof(first), room, payload, len(payload))
            del first
            if is_error(got) or got != raw_len:
                raise Reject("ZSTD_decompress")
            return memory[:got]

    return zstd_decompress


# -- one stream -------------------------------------------------------------------------------------------------------


def encode_stream(stream: bytes, predictors: Iterable[str], zstd: bool = True) -> bytes:
    if not stream:
        return bytes(HEADER)
    best: tuple[int, int, bytes] | None = None
    enabled = {MODES[name] for name in predictors} or {RAW}
    for mode in (RAW, DELTA_SEQ, XOR_SEQ):
        if mode not in enabled:
            continue
        predicted = predict(stream, mode)
        candidates = [(RLE, rle_encode(predicted))]
        if zstd:
            candidates.append((ZSTD, zstd_compress(predicted)))
        for codec, payload in candidates:
            if best is None or len(payload) < len(best[2]):
                best = mode, codec, payload
    assert best is not None
    mode, codec, payload = best
    return bytes([mode, codec]) + _u32(len(stream)) + _u32(len(payload)) + payload


def decode_stream(
    data: bytes, at: int = 0, zstd: bool = True, decompress: Decompress = zstd_decompress_by_frames
) -> tuple[bytes, int]:
    """The stream at `at` and the offset after it."""
    if len(data) - at < HEADER:
        raise Reject("R3: truncated header")
    mode, codec = data[at], data[at + 1]
    raw_len = int.from_bytes(data[at + 2 : at + 6], "little")
    payload_len = int.from_bytes(data[at + 6 : at + 10], "little")
    end = at + HEADER + payload_len
    if end > len(data):
        raise Reject("R4: payload runs past the frame")
    payload = data[at + HEADER : end]
    if raw_len == 0:
        if payload_len != 0:
            raise Reject("R5: payload of an empty stream")
        return b"", end
    if codec == RLE:
        with naming_rule("R7"):
            stream = rle_decode(payload, raw_len)
    elif codec == ZSTD:
        if not zstd:
            raise Reject("R12: no zstd")
        with naming_rule("R8"):
            if not payload:
                raise Reject("empty payload")
            stream = decompress(payload, raw_len)
    else:
        raise Reject("R6: unknown codec")
    if mode not in (RAW, DELTA_SEQ, XOR_SEQ):
        raise Reject("R9: unknown mode")
    return unpredict(stream, mode), end


# -- containers -------------------------------------------------------------------------------------------------------


def encode(
    data: bytes,
    stride: int,
    predictors: Iterable[str] = tuple(MODES),
    hi_predictors: Iterable[str] | None = None,
    zstd: bool = True,
) -> bytes:
    """The FP16 (stride 2) or FP32 (stride 4) container."""
    if len(data) < stride or len(data) % stride:
        raise Reject("no whole number of words")
    sets = [tuple(predictors)] * stride
    if hi_predictors is not None:
        sets[1] = tuple(hi_predictors)
    streams = [encode_stream(lane, names, zstd) for lane, names in zip(split(data, stride), sets, strict=True)]
    return _u32(len(data) // stride) + b"".join(streams)


def decode(frame: bytes, stride: int, zstd: bool = True, decompress: Decompress = zstd_decompress_by_frames) -> bytes:
    if len(frame) < 4:
        raise Reject("R1: no word count")
    words = int.from_bytes(frame[:4], "little")
    if words == 0:
        raise Reject("R2: no words")
    lanes, at = [], 4
    for _ in range(stride):
        lane, at = decode_stream(frame, at, zstd, decompress)
        if len(lane) != words:
            raise Reject("R10: a lane of another length")
        lanes.append(lane)
    if at != len(frame):
        raise Reject("R11: bytes left over")
    return join(lanes)


def decode_any(
    frame: bytes, zstd: bool = True, decompress: Decompress = zstd_decompress_by_frames
) -> tuple[int, bytes]:
    """(stride, bytes) of a frame whose container nobody told."""
    try:
        return 2, decode(frame, 2, zstd, decompress)
    except Reject:
        return 4, decode(frame, 4, zstd, decompress)


def fnv1a64(data: bytes, seed: int = 1469598103934665603) -> int:
    for byte in data:
        seed = ((seed ^ byte) * 1099511628211) & (1 << 64) - 1
    return seed


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")
