"""Frames that claim far more than they hold (written here by hand, after docs/format.md)."""

import struct

from codec_samples import stream

UINT32_MAX = (1 << 32) - 1
ZSTD_HEADER = b"\x28\xb5\x2f\xfd\x00\x58"


def frame(words: int, *streams: bytes) -> bytes:
    return struct.pack("<I", words) + b"".join(streams)


BOMBS = {
    "14 bytes": frame(UINT32_MAX, struct.pack("<BBII", 0, 0, UINT32_MAX, 0)),
    "14 bytes, zstd": frame(UINT32_MAX, struct.pack("<BBII", 0, 1, UINT32_MAX, 0)),
    "two empty payloads": frame(UINT32_MAX, stream(0, 0, UINT32_MAX, b""), stream(0, 0, UINT32_MAX, b"")),
    "four empty payloads": frame(UINT32_MAX, *[stream(0, 1, UINT32_MAX, b"")] * 4),
    "RLE of two bytes": frame(UINT32_MAX, *[stream(0, 0, UINT32_MAX, b"\xffa")] * 2),
    "RLE of a thousand bytes": frame(UINT32_MAX, *[stream(0, 0, UINT32_MAX, b"\xffa" * 500)] * 4),
    "zstd of one block": frame(UINT32_MAX, *[stream(0, 1, UINT32_MAX, ZSTD_HEADER + b"\x03\x00\x10a")] * 2),
    "zstd that claims it": frame(
        UINT32_MAX,
        *[stream(0, 1, UINT32_MAX, b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", UINT32_MAX) + b"\x01\0\0")] * 2,
    ),
    "raw_len beyond the word count": frame(1, stream(0, 0, UINT32_MAX, b"\xffa" * 500), stream(0, 0, 1, b"\0a")),
    "payload_len beyond the frame": frame(8, struct.pack("<BBII", 0, 0, 8, UINT32_MAX) + b"\x84a"),
}


def honest_but_large() -> bytes:
    """128 MiB words of one byte value in a few kilobytes: a frame that may be decoded if one wants to."""
    blocks = b"\x02\x00\x10a" * 1023 + b"\x03\x00\x10a"
    words = 128 << 20
    return frame(words, *[stream(0, 1, words, ZSTD_HEADER + blocks)] * 2)
