"""Frames whose lanes are several zstd frames, one behind the other: pieces that are made on different threads.

MNN hands a whole payload to ``ZSTD_decompress``, which takes any number of frames (docs/format.md). Where an array is
cut depends on the array alone, so the bytes of a frame do not depend on the number of threads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from ..dtypes import Bytes
from ..errors import LimitError
from ..threads.pool import map_pulled
from . import _encoder, _fast, zstd
from ._room import Room
from .options import CODECS, MIN_PARALLEL_BYTES, RLE_BIT, ZSTD_BIT, LaneOptions
from .predictors import NAMES as PREDICTORS

LANE_BYTES = 8 << 20
"""Of a lane, in a piece of effort "balanced": four times as far as libzstd looks back at that level, so that little is
lost where a piece begins."""

RUNS = 4
"""Lanes that became so many times smaller may be full of runs, ones of a cache are not."""

_BLOCK, _RAW_HEADERS, _FRAME_HEADER = 128 << 10, 3, 10
"""Of a zstd frame longer than its window."""

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
        for lane in range(options.stride)
        for mode in range(len(PREDICTORS))
        if options.modes[lane] >> mode & 1
    ]
    most = [[_most(end - begin, mode) for begin, end in spans] for _, mode in pairs]
    room, places = room_for(most)

    def make(task: tuple[int, int]) -> int:
        pair, piece = task
        (begin, end), at = spans[piece], places[pair][piece]
        made = _encoder.write_payload(
            room, at, most[pair][piece], data, options.stride, begin, end, *pairs[pair], zstd.LEVEL
        )
        words = data[begin * options.stride : end * options.stride]
        return made or _fast.write_raw(room, at, words, options.stride, pairs[pair][0])

    tasks = [(pair, piece) for pair in reversed(range(len(pairs))) for piece in range(count)]  # high bytes take longest
    made = dict(zip(tasks, map_pulled(make, tasks, threads), strict=True))
    best: dict[int, Lane] = {}
    for pair, (lane, mode) in enumerate(pairs):
        parts = tuple(Placed(made[pair, piece], room, places[pair][piece]) for piece in range(count))
        found = Lane(mode, _ZSTD, parts)
        if lane not in best or found.nbytes < best[lane].nbytes:
            best[lane] = found
    lanes = [best[lane] for lane in range(options.stride)]
    return frame_of(words, with_runs(lanes, data, options), threads)


# -- parts of frames --------------------------------------------------------------------------------------------------


def _most(nbytes: int, mode: int) -> int:
    """Room for a zstd frame; without a predictor just as much as noise needs, which lies where it stays then."""
    if mode != _RAW:
        return _encoder.bound(nbytes)
    return max(nbytes + _RAW_HEADERS * -(-nbytes // _BLOCK) + _FRAME_HEADER, _fast.raw_payload(nbytes))


class Placed(NamedTuple):
    """Bytes that lie in a room."""

    nbytes: int
    room: Room
    at: int


Part: TypeAlias = bytes | Placed


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
    return joined(parts, threads, _home(parts))


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


def room_for(most: Sequence[Sequence[int]]) -> tuple[Room, list[list[int]]]:
    """Room for the parts of lanes, of so many bytes at most, and their places: none lies before where it stays."""
    places, at = [], 4
    for lane in most:
        *begins, at = accumulate(lane, initial=at + _HEADER.size)
        places.append(begins)
    return Room(at), places


def joined(parts: Sequence[Part], threads: int = 1, home: Room | None = None) -> bytes:
    """The parts, one behind the other, without the GIL.

    `home`: a room in which no part lies before where it stays; parts that lie there are moved, and it is gone.
    """
    *places, size = accumulate(map(nbytes_of, parts), initial=0)
    room = Room(size) if home is None else home
    others = []
    for at, part in zip(places, parts, strict=True):
        if isinstance(part, Placed) and part.room is room:
            room.move(at, part.at, part.nbytes)
        else:
            others.append((at, part))

    def write(entry: tuple[int, Part]) -> None:
        at, part = entry
        room.write(at, part if isinstance(part, bytes) else part.room.view(part.at, part.nbytes))

    map_pulled(write, others, threads if size >= MIN_PARALLEL_BYTES else 1)
    return room.finish(size)


def _home(parts: Sequence[Part]) -> Room | None:
    """The room of the first part that lies in one, if none in it lies before where it stays."""
    home = next((part.room for part in parts if isinstance(part, Placed)), None)
    places = accumulate(map(nbytes_of, parts), initial=0)
    for at, part in zip(places, parts, strict=False):
        if isinstance(part, Placed) and part.room is home and part.at < at:
            return None
    return home


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
