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
from .options import CODECS, MIN_PARALLEL_BYTES, ZSTD_BIT, LaneOptions

LANE_BYTES = 8 << 20
"""Of a lane, in a piece of effort "balanced": four times as far as libzstd looks back at that level, so that little is
lost where a piece begins."""

_ZSTD = CODECS.index("zstd")
_HEADER = struct.Struct("<BBII")
_U32_MAX = (1 << 32) - 1


def is_cut(data: Bytes, options: LaneOptions) -> bool:
    """Whether effort "balanced" makes several pieces of the words."""
    words, rest = divmod(data.size, options.stride)
    return LANE_BYTES < words <= _U32_MAX and not rest and bool(options.allow & ZSTD_BIT)


def encode_balanced(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """The frame of words for which `is_cut` holds; `options` allow one predictor for each lane.

    An even number of equal pieces for each lane, and no RLE, which is hardly ever smaller on so much.
    """
    words = data.size // options.stride
    count = 2 * -(-words // (2 * LANE_BYTES))
    ends = [words * (piece + 1) // count for piece in range(count)]
    spans = list(zip([0, *ends], ends, strict=False))
    modes = [bits.bit_length() - 1 for bits in options.modes]

    def make(task: tuple[int, tuple[int, int]]) -> bytes:
        lane, (begin, end) = task
        return _encoder.payload(data, options.stride, begin, end, lane, modes[lane], zstd.LEVEL)

    order = [lane for lane in reversed(range(options.stride)) for _ in spans]  # the high bytes take longest: first
    made = map_pulled(make, list(zip(order, spans * options.stride, strict=True)), threads)
    lanes = [made[count * place : count * (place + 1)] for place in range(options.stride)]
    return frame_of(words, list(zip(modes, reversed(lanes), strict=True)), threads)


class Later(NamedTuple):
    """Bytes that are written where they stay, when that is known."""

    nbytes: int
    write: Callable[[bytes, int], None]
    """Called with the frame, which is `_encoder.unwritten`, and the place."""


Part: TypeAlias = bytes | Later


def frame_of(words: int, lanes: Sequence[tuple[int, Sequence[Part]]], threads: int) -> bytes:
    """The frame of lanes, each the number of its predictor and its zstd frames."""
    parts: list[Part] = [words.to_bytes(4, "little")]
    for mode, payload in lanes:
        parts += [stream_header(words, mode, sum(map(nbytes_of, payload))), *payload]
    return joined(parts, threads)


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


def stream_header(words: int, mode: int, nbytes: int) -> bytes:
    """The header of a zstd stream of `words` bytes that became `nbytes`.

    Raises
    ------
    LimitError
        For more than a header can say.
    """
    if nbytes > _U32_MAX:
        raise LimitError("a payload above 2^32 - 1 bytes, which is what a stream header can say: encode pieces")
    return _HEADER.pack(mode, _ZSTD, words, nbytes)
