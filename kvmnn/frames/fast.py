"""Frames of effort "fast": every lane as zstd frames of its own writer, one for each piece of the array."""

from __future__ import annotations

from functools import partial

from ..dtypes import Bytes
from ..threads.pool import Job, run_pulled
from . import _fast
from .afar import AtOddDistances, Repeats, repeats_from_afar
from .options import ZSTD_BIT, LaneOptions
from .pieces import RUNS, Lane, frame_of, joined, lane_of, lanes_of, nbytes_of, of_pieces, tracks_for, with_runs

PIECE_BYTES = 4 << 20
"""Raw bytes of a piece: repeats are seen inside of one, and pieces are made on different threads."""
LITTLE = 32
"""A lane of so small a share of all bytes need not become smaller."""

_RAW_BIT = 1
_BITS = (1, 2, 4)
_U32_MAX = (1 << 32) - 1


def has_fast_form(options: LaneOptions, nbytes: int) -> bool:
    """Whether the options leave effort "fast" what it makes: zstd, and streams that need not be predicted."""
    words, rest = divmod(nbytes, options.stride)
    allowed = options.allow & ZSTD_BIT and all(modes & _RAW_BIT for modes in options.modes)
    return bool(allowed) and 0 < words <= _U32_MAX and not rest


def encode_fast(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """The frame of little-endian words, for which `has_fast_form` holds; its bytes do not depend on `threads`.

    Raises
    ------
    AtOddDistances
        For an array of several pieces that repeats itself so: this effort would make too much of it.
    """
    words = data.size // options.stride
    if data.size > PIECE_BYTES:
        lanes = _lanes(data, options, threads)
        return frame_of(words, with_runs(lanes, data, options), threads)
    made = _fast.encode(data, options.stride, options.modes)
    if len(made) * RUNS > data.size:
        return made
    return frame_of(words, with_runs(lanes_of(made, options.stride), data, options), threads)


def fast_payloads(data: Bytes, options: LaneOptions, threads: int) -> list[tuple[int, bytes]]:
    """For every lane the number of its predictor, and its zstd frames, one for each piece, one behind the other."""
    lanes = _lanes(data, options, threads, odd_ones=True)
    return [(lane.mode, joined(lane.parts)) for lane in lanes]


def _lanes(data: Bytes, options: LaneOptions, threads: int, odd_ones: bool = False) -> list[Lane]:
    modes, rivals = _fast.likely_modes(data, options.stride, options.modes)

    def look() -> Repeats:
        repeats = repeats_from_afar(data, options.stride, PIECE_BYTES)
        if repeats.odd and not odd_ones:
            raise AtOddDistances
        return repeats

    def make(size: int, *before: Job) -> list[Lane]:
        return _in_pieces(data, size, options.stride, modes, threads, *before)

    lanes, size = of_pieces(make, look, PIECE_BYTES, data.size, options.stride)
    return _with_rivals(lanes, data, size, options.stride, rivals, threads)


def _with_rivals(lanes: list[Lane], data: Bytes, size: int, stride: int, rivals: list[int], threads: int) -> list[Lane]:
    """Of each lane the smallest, by its predictor or by one of its rivals that makes the first piece smaller."""
    little = _nbytes(lanes) // LITTLE
    for bit in _BITS:
        tried = [bit if found & bit and lane.nbytes > little else 0 for lane, found in zip(lanes, rivals, strict=True)]
        if not any(tried):
            continue
        first = _in_pieces(data[:size], size, stride, tried, threads)
        tried = [
            bit if bit and other.nbytes < nbytes_of(lane.parts[0]) else 0
            for lane, other, bit in zip(lanes, first, tried, strict=True)
        ]
        if any(tried):
            others = _in_pieces(data, size, stride, tried, threads)
            lanes = [
                min(lane, other, key=lambda each: each.nbytes) if bit else lane
                for lane, other, bit in zip(lanes, others, tried, strict=True)
            ]
    return lanes


def _nbytes(lanes: list[Lane]) -> int:
    return sum(lane.nbytes for lane in lanes)


def _spans(words: int, size: int) -> list[tuple[int, int]]:
    """Pieces of `size` words, shorter ones at the end, so that threads of unequal speed end together.

    The last quarter of them in halves, and the second half of that in quarters.
    """
    count = -(-words // size)
    halves, quarters = (min(words, (count - count // share) * size) for share in (4, 8))
    begins = [*range(0, halves, size), *range(halves, quarters, size // 2), *range(quarters, words, size // 4)]
    return list(zip(begins, [*begins[1:], words], strict=True))


def _in_pieces(data: Bytes, size: int, stride: int, modes: list[int], threads: int, *before: Job) -> list[Lane]:
    spans = _spans(data.size // stride, size // stride)
    of = [_fast.raw_payload if bits == _RAW_BIT else _fast.most_payload for bits in modes]
    most = [[bound(end - begin) for begin, end in spans] for bound in of]
    tracks = tracks_for(most)

    def make(piece: int) -> None:
        room = tuple(lane[piece] for lane in most)
        _fast.write_payloads(tracks, piece, room, data, stride, *spans[piece], modes)

    run_pulled([*before, *(partial(make, piece) for piece in range(len(spans)))], threads)
    return [lane_of(track, bits.bit_length() - 1) for track, bits in zip(tracks, modes, strict=True)]
