"""Frames whose lanes are several zstd frames, one behind the other: pieces that are made on different threads.

MNN hands a whole payload to ``ZSTD_decompress``, which takes any number of frames (docs/format.md). Where an array is
cut depends on the array alone, so the bytes of a frame do not depend on the number of threads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias

from ..dtypes import Bytes
from ..errors import LimitError
from ..threads.pool import Job, map_pulled, run_pulled
from . import _encoder, _fast, zstd
from ._room import Room, Track
from .afar import NONE, Repeats, repeats_from_afar
from .options import CODECS, MIN_PARALLEL_BYTES, RLE_BIT, ZSTD_BIT, LaneOptions
from .predictors import NAMES as PREDICTORS

LANE_BYTES = 4 << 20
"""Of a lane, in a piece of effort "balanced": twice as far as libzstd looks back at that level, so that a cache loses
nothing where a piece begins, and what is compressed is still in the processor's cache."""

REPEATS = {2: 1.6, 4: 1.5}
"""By bytes of a word: an array that becomes so many times smaller, and has the same words in several pieces, ..."""
FEW = 16 << 10
"""... or makes so few bytes of each piece that what these begin with is not little, ..."""
LONGER = 8
"""... is made again, in pieces so many times as long, ..."""
LONGEST, MUCH = 64, 3
"""... and once more where it becomes `MUCH` times smaller."""

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

    Equal pieces for each lane, an even number but where it becomes much smaller.
    """
    words, least = data.size // options.stride, LANE_BYTES * options.stride

    def make(size: int, *before: Job) -> list[Lane]:
        count = -(-data.size // size)
        if size == least:
            count += count & 1
        ends = [words * (piece + 1) // count for piece in range(count)]
        return _smallest(data, options, list(zip([0, *ends], ends, strict=False)), threads, *before)

    def look() -> Repeats:
        return repeats_from_afar(data, options.stride, least // 2)

    lanes, _ = of_pieces(make, look, least, data.size, options.stride)
    return frame_of(words, with_runs(lanes, data, options), threads)


class Maker(Protocol):
    """Makes the lanes of an array in pieces of some size; on one of its threads `before` comes first."""

    def __call__(self, size: int, *before: Job) -> list[Lane]: ...


class _FromAfar(Exception):
    """Words are there again farther away than the pieces see that an array is being made of."""


def of_pieces(make: Maker, look: Callable[[], Repeats], size: int, nbytes: int, stride: int) -> tuple[list[Lane], int]:
    """The lanes of an array of `nbytes` bytes, and the size of its pieces: `size`, or more if these repeat each other.

    `look` tells how words are there again. It is asked beside the first pieces, since it takes half as long as one.
    """
    repeats = NONE

    def ask() -> None:
        nonlocal repeats
        repeats = look()
        if repeats.far:
            raise _FromAfar

    lanes, used = [], LONGER * size
    with suppress(_FromAfar):
        lanes, used = make(size, ask), size
    if not lanes:
        lanes = make(used)
    for times, smaller in ((LONGER, REPEATS[stride]), (LONGEST, MUCH)):
        made = sum(lane.nbytes for lane in lanes)
        is_few = made * size < FEW * nbytes
        if used >= nbytes or made * smaller > nbytes or not (repeats.across or is_few):
            break
        if used < times * size:
            used = times * size
            lanes = make(used)
    return lanes, used


def _smallest(
    data: Bytes, options: LaneOptions, spans: list[tuple[int, int]], threads: int, *before: Job
) -> list[Lane]:
    pairs = [
        (lane, mode)
        for lane in range(options.stride)
        for mode in range(len(PREDICTORS))
        if options.modes[lane] >> mode & 1
    ]
    most = [[_most(end - begin, mode) for begin, end in spans] for _, mode in pairs]
    tracks = tracks_for(most)

    def make(pair: int, piece: int) -> None:
        _encoder.write_payload(
            tracks[pair], piece, most[pair][piece], data, options.stride, *spans[piece], *pairs[pair], zstd.LEVEL
        )

    # High bytes take longest: they come first.
    jobs = [partial(make, pair, piece) for pair in reversed(range(len(pairs))) for piece in range(len(spans))]
    run_pulled([*before, *jobs], threads)
    best: dict[int, Lane] = {}
    for (lane, mode), track in zip(pairs, tracks, strict=True):
        found = lane_of(track, mode)
        if lane not in best or found.nbytes < best[lane].nbytes:
            best[lane] = found
    return [best[lane] for lane in range(options.stride)]


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


def lane_of(track: Track, mode: int) -> Lane:
    """The lane of zstd frames that are all on a track."""
    return Lane(mode, _ZSTD, tuple(Placed(nbytes, track.room, at) for nbytes, at in track.parts()))


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


def tracks_for(most: Sequence[Sequence[int]]) -> list[Track]:
    """Tracks for the parts of lanes, of so many bytes at most, all in one room; none lies before where it stays."""
    begins, at = [], 4
    for lane in most:
        *places, at = accumulate(lane, initial=at + _HEADER.size)
        begins.append(places)
    room = Room(at)
    return [Track(room, places) for places in begins]


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

    much = sum(nbytes_of(part) for _, part in others) >= MIN_PARALLEL_BYTES
    map_pulled(write, others, threads if much else 1)
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
