"""Frames of effort "fast": every lane as zstd frames of its own writer, one for each piece of the array."""

from __future__ import annotations

from ..dtypes import Bytes
from ..threads.pool import map_pulled
from . import _fast
from .options import ZSTD_BIT, LaneOptions
from .pieces import Later, Part, frame_of, joined, nbytes_of

PIECE_BYTES = 4 << 20
"""Raw bytes of a piece: repeats are seen inside of one, and pieces are made on different threads."""
REPEATS = {2: 2.2, 4: 1.7}
"""By bytes of a word: an array that becomes so many times smaller, as a cache hardly does, ..."""
LONGER = 8
"""... is made again, in pieces so many times as long: what each of them begins with costs much of it, and repeats
little time, ..."""
LONGEST, MUCH = 64, 16
"""... and once more where it becomes `MUCH` times smaller."""
MANY = 8
"""Of an array that becomes so many times smaller, predicted lanes are made without a predictor as well: what comes
again from afar is in no sample."""

_RAW_BIT = 1
_U32_MAX = (1 << 32) - 1


def has_fast_form(options: LaneOptions, nbytes: int) -> bool:
    """Whether the options leave effort "fast" what it makes: zstd, and streams that need not be predicted."""
    words, rest = divmod(nbytes, options.stride)
    allowed = options.allow & ZSTD_BIT and all(modes & _RAW_BIT for modes in options.modes)
    return bool(allowed) and 0 < words <= _U32_MAX and not rest


def encode_fast(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """The frame of little-endian words, for which `has_fast_form` holds; its bytes do not depend on `threads`."""
    if data.size <= PIECE_BYTES:
        return _fast.encode(data, options.stride, options.modes)
    return frame_of(data.size // options.stride, _lanes(data, options, threads), threads)


def fast_payloads(data: Bytes, options: LaneOptions, threads: int) -> list[tuple[int, bytes]]:
    """For every lane the number of its predictor, and its zstd frames, one for each piece, one behind the other."""
    return [(mode, joined(payload)) for mode, payload in _lanes(data, options, threads)]


def _lanes(data: Bytes, options: LaneOptions, threads: int) -> list[tuple[int, tuple[Part, ...]]]:
    modes = _fast.likely_modes(data, options.stride, options.modes)
    size = PIECE_BYTES
    lanes = _in_pieces(data, size, options.stride, modes, threads)
    for times, smaller in ((LONGER, REPEATS[options.stride]), (LONGEST, MUCH)):
        if data.size <= size or _nbytes(lanes) * smaller > data.size:
            break
        size = times * PIECE_BYTES
        lanes = _in_pieces(data, size, options.stride, modes, threads)
    if _nbytes(lanes) * MANY > data.size or all(bits == _RAW_BIT for bits in modes):
        return lanes
    raw = _in_pieces(data, size, options.stride, [_RAW_BIT] * options.stride, threads)
    return [
        min(lane, other, key=lambda lane: sum(map(nbytes_of, lane[1]))) for lane, other in zip(lanes, raw, strict=True)
    ]


def _nbytes(lanes: list[tuple[int, tuple[Part, ...]]]) -> int:
    return sum(nbytes_of(part) for _, lane in lanes for part in lane)


def _in_pieces(
    data: Bytes, size: int, stride: int, modes: list[int], threads: int
) -> list[tuple[int, tuple[Part, ...]]]:
    words = data.size // stride

    def make(begin: int) -> list[Part]:
        end = min(begin + size // stride, words)
        found = _fast.payloads(data, stride, begin, end, modes)
        return [_raw(data[begin * stride : end * stride], stride, lane, one) for lane, one in enumerate(found)]

    lanes = zip(*map_pulled(make, range(0, words, size // stride), threads), strict=True)
    return [(bits.bit_length() - 1, lane) for bits, lane in zip(modes, lanes, strict=True)]


def _raw(piece: Bytes, stride: int, lane: int, found: bytes | int) -> Part:
    if isinstance(found, bytes):
        return found
    return Later(found, lambda frame, at: _fast.write_raw(frame, at, piece, stride, lane))
