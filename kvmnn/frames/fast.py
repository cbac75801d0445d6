"""Frames of effort "fast": every lane as zstd frames of its own writer, one for each piece of the array."""

from __future__ import annotations

import struct

from ..dtypes import Bytes
from ..errors import LimitError
from ..threads.pool import map_pulled
from . import _fast
from .options import CODECS, ZSTD_BIT, LaneOptions

PIECE_BYTES = 4 << 20
"""Raw bytes of a piece: repeats are seen inside of one, and pieces are made on different threads."""

_RAW, _RAW_BIT = 0, 1
_ZSTD = CODECS.index("zstd")
_HEADER = struct.Struct("<BBII")
_U32_MAX = (1 << 32) - 1


def has_fast_form(options: LaneOptions, nbytes: int) -> bool:
    """Whether the options leave effort "fast" what it makes: zstd, and streams that are not predicted."""
    words, rest = divmod(nbytes, options.stride)
    allowed = options.allow & ZSTD_BIT and all(modes & _RAW_BIT for modes in options.modes)
    return bool(allowed) and 0 < words <= _U32_MAX and not rest


def encode_fast(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """The frame of little-endian words, for which `has_fast_form` holds; its bytes do not depend on `threads`."""
    words = data.size // options.stride
    parts = [words.to_bytes(4, "little")]
    for payload in fast_payloads(data, options, threads):
        parts += [fast_stream(words, sum(map(len, payload))), *payload]
    return b"".join(parts)


def fast_payloads(data: Bytes, options: LaneOptions, threads: int) -> list[tuple[bytes, ...]]:
    """For every lane its zstd frames, one for each piece."""
    begins = range(0, data.size, PIECE_BYTES)
    pieces = map_pulled(
        lambda begin: _fast.payloads(data[begin : begin + PIECE_BYTES], options.stride, options.search), begins, threads
    )
    return list(zip(*pieces, strict=True))


def fast_stream(words: int, nbytes: int) -> bytes:
    """The header of a stream of `words` bytes that became `nbytes`.

    Raises
    ------
    LimitError
        For more than a header can say.
    """
    if nbytes > _U32_MAX:
        raise LimitError("a payload above 2^32 - 1 bytes, which is what a stream header can say: encode pieces")
    return _HEADER.pack(_RAW, _ZSTD, words, nbytes)
