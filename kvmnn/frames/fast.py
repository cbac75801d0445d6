"""Frames of effort "fast": every lane as zstd frames of its own writer, one for each piece of the array."""

from __future__ import annotations

from ..dtypes import Bytes
from ..threads.pool import map_pulled
from . import _fast
from .options import ZSTD_BIT, LaneOptions
from .pieces import Later, Part, frame_of, joined, nbytes_of

PIECE_BYTES = 4 << 20
"""Raw bytes of a piece: repeats are seen inside of one, and pieces are made on different threads."""
LONGER, REPEATS = 8, 3
"""Pieces of an array that becomes at least `REPEATS` times smaller are made again, so many times as long: what each of
them begins with costs much of such an array, and repeats little time."""

RAW, _RAW_BIT = 0, 1
_U32_MAX = (1 << 32) - 1


def has_fast_form(options: LaneOptions, nbytes: int) -> bool:
    """Whether the options leave effort "fast" what it makes: zstd, and streams that are not predicted."""
    words, rest = divmod(nbytes, options.stride)
    allowed = options.allow & ZSTD_BIT and all(modes & _RAW_BIT for modes in options.modes)
    return bool(allowed) and 0 < words <= _U32_MAX and not rest


def encode_fast(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """The frame of little-endian words, for which `has_fast_form` holds; its bytes do not depend on `threads`."""
    if data.size <= PIECE_BYTES:
        return _fast.encode(data, options.stride)
    lanes = [(RAW, payload) for payload in _lanes(data, options, threads)]
    return frame_of(data.size // options.stride, lanes, threads)


def fast_payloads(data: Bytes, options: LaneOptions, threads: int) -> list[bytes]:
    """For every lane its zstd frames, one for each piece, one behind the other."""
    return [joined(payload) for payload in _lanes(data, options, threads)]


def _lanes(data: Bytes, options: LaneOptions, threads: int) -> list[tuple[Part, ...]]:
    lanes = _in_pieces(data, PIECE_BYTES, options, threads)
    made = sum(nbytes_of(part) for lane in lanes for part in lane)
    return lanes if made * REPEATS > data.size else _in_pieces(data, LONGER * PIECE_BYTES, options, threads)


def _in_pieces(data: Bytes, size: int, options: LaneOptions, threads: int) -> list[tuple[Part, ...]]:
    def make(begin: int) -> list[Part]:
        piece = data[begin : begin + size]
        found = _fast.payloads(piece, options.stride)
        return [_raw(piece, options.stride, lane, one) for lane, one in enumerate(found)]

    return list(zip(*map_pulled(make, range(0, data.size, size), threads), strict=True))


def _raw(piece: Bytes, stride: int, lane: int, found: bytes | int) -> Part:
    if isinstance(found, bytes):
        return found
    return Later(found, lambda frame, at: _fast.write_raw(frame, at, piece, stride, lane))
