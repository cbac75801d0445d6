"""Frames whose lanes are several zstd frames, one behind the other: pieces that are made on different threads.

MNN hands a whole payload to ``ZSTD_decompress``, which takes any number of frames (docs/format.md). Where an array is
cut depends on the array alone, so the bytes of a frame do not depend on the number of threads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from ..dtypes import Bytes
from ..errors import LimitError
from ..threads.pool import map_pulled
from . import _encoder, zstd
from .options import CODECS, MIN_PARALLEL_BYTES, RLE_BIT, ZSTD_BIT, LaneOptions
from .predictors import NAMES as PREDICTORS

LANE_BYTES = 8 << 20
"""Of a lane, in a piece of effort "balanced": four times as far as libzstd looks back at that level, so that little is
lost where a piece begins."""

RUNS = 4
"""Lanes that became so many times smaller may be full of runs, ones of a cache are not."""

_RAW = PREDICTORS.index("raw")
_RLE, _ZSTD = CODECS.index("rle"), CODECS.index("zstd")
_HEADER = struct.Struct("<BBII")
_U32_MAX = (1 << 32) - 1


def is_cut(data: Bytes, options: LaneOptions) -> bool:
    """Whether effort "balanced" makes several pieces of the words."""
    words, rest = divmod(data.size, options.stride)
    return LANE_BYTES < words <= _U32_MAX and not rest and bool(options.allow & ZSTD_BIT)


def encode_balanced(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """The frame of words for which `is_cut` holds, of each lane the smallest by the predictors that `options` allow.

    An even number of equal pieces for each lane.
    """
    words = data.size // options.stride
    count = 2 * -(-words // (2 * LANE_BYTES))
    ends = [words * (piece + 1) // count for piece in range(count)]
    spans = list(zip([0, *ends], ends, strict=False))
    pairs = [
        (lane, mode)
        for lane in reversed(range(options.stride))  # the high bytes take longest: first
        for mode in range(len(PREDICTORS))
        if options.modes[lane] >> mode & 1
    ]

    def make(task: tuple[tuple[int, int], tuple[int, int]]) -> bytes:
        (lane, mode), (begin, end) = task
        return _encoder.payload(data, options.stride, begin, end, lane, mode, zstd.LEVEL)

    made = map_pulled(make, [(pair, span) for pair in pairs for span in spans], threads)
    best: dict[int, Lane] = {}
    for place, (lane, mode) in enumerate(pairs):
        found = Lane(mode, _ZSTD, tuple(made[count * place : count * (place + 1)]))
        if lane not in best or found.nbytes < best[lane].nbytes:
            best[lane] = found
    lanes = [best[lane] for lane in range(options.stride)]
    return frame_of(words, with_runs(lanes, data, options), threads)


class Later(NamedTuple):
    """Bytes that are written where they stay, when that is known."""

    nbytes: int
    write: Callable[[bytes, int], None]
    """Called with the frame, which is `_encoder.unwritten`, and the place."""


Part: TypeAlias = bytes | Later


class Lane(NamedTuple):
    """The numbers of a lane's predictor and codec, and its payload: parts, one behind the other."""

    mode: int
    codec: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(map(nbytes_of, self.parts))


def zstd_lane(mode: int, parts: tuple[Part, ...]) -> Lane:
    """A lane of zstd frames."""
    return Lane(mode, _ZSTD, parts)


def frame_of(words: int, lanes: Sequence[Lane], threads: int) -> bytes:
    """The frame of lanes."""
    parts: list[Part] = [words.to_bytes(4, "little")]
    for lane in lanes:
        parts += [stream_header(words, lane.mode, lane.nbytes, lane.codec), *lane.parts]
    return joined(parts, threads)


def lanes_of(frame: bytes, stride: int) -> list[Lane]:
    """The lanes of a frame that was just made."""
    found, at = [], 4
    for _ in range(stride):
        mode, codec, _, size = _HEADER.unpack_from(frame, at)
        at += _HEADER.size
        found.append(Lane(mode, codec, (frame[at : at + size],)))
        at += size
    return found


def with_runs(lanes: list[Lane], data: Bytes, options: LaneOptions) -> list[Lane]:
    """The lanes, those as RLE that are smaller so: no zstd frame says runs of some length in two bytes each."""
    return [_as_runs(lane, number, data, options) for number, lane in enumerate(lanes)]


def _as_runs(lane: Lane, number: int, data: Bytes, options: LaneOptions) -> Lane:
    nbytes = lane.nbytes
    if not options.allow & RLE_BIT or nbytes * RUNS > data.size // options.stride:
        return lane
    made = _encoder.candidate(data, options.stride, number, _RAW, RLE_BIT, zstd.LEVEL, True, nbytes)
    return lane if made is None else Lane(_RAW, _RLE, (made[3][_HEADER.size :],))


def joined(parts: Sequence[Part], threads: int = 1) -> bytes:
    """The parts, one behind the other, without the GIL."""
    *places, size = accumulate(map(nbytes_of, parts), initial=0)
    frame = _encoder.unwritten(size)

    def write(entry: tuple[int, Part]) -> None:
        at, part = entry
        if isinstance(part, bytes):
            _encoder.write_at(frame, at, part)
        else:
            part.write(frame, at)

    map_pulled(write, list(zip(places, parts, strict=True)), threads if size >= MIN_PARALLEL_BYTES else 1)
    return frame


def nbytes_of(part: Part) -> int:
    """Bytes that a part takes in a frame."""
    return len(part) if isinstance(part, bytes) else part.nbytes


def stream_header(words: int, mode: int, nbytes: int, codec: int = _ZSTD) -> bytes:
    """The header of a stream of `words` bytes that became `nbytes`.

    Raises
    ------
    LimitError
        For more than a header can say.
    """
    if nbytes > _U32_MAX:
        raise LimitError("a payload above 2^32 - 1 bytes, which is what a stream header can say: encode pieces")
    return _HEADER.pack(mode, codec, words, nbytes)
