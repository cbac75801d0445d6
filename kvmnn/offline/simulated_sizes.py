"""Simulated sizes of byte lanes: zstd frames are made and measured, and thrown away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..arrays.named_array import Piece
from ..dtypes import Part
from ..threads.pipeline import Progress
from . import _sizes
from .options import HALVES, Half, MeasureOptions, lane_of
from .predictors import NAMES
from .token_runs import RowReader
from .units import Unit

HEADER_BYTES = 8
"""What adaptive_v22 adds to a stream, besides one byte for each block."""

HI, LO = 1, 0
_MIN_LEVEL = -(1 << 17)
_LEGACY: dict[Half, tuple[str, ...]] = {"hi": ("delta_seq",), "lo": ("raw",)}


@dataclass(frozen=True)
class StreamSize:
    """One byte lane of K or V.

    Parameters
    ----------
    raw_bytes
        Bytes of the lane.
    bytes
        Simulated: the zstd frames of its pieces, mode bytes and headers.
    modes
        How many blocks took which predictor.
    limit_bytes
        What the order-0 entropy of the lane as it is amounts to, each piece with statistics of its own.
    """

    raw_bytes: int
    bytes: int
    modes: dict[str, int]
    limit_bytes: float


class Meters:
    """Meters that wait for their next stream, with their zstd contexts and buffers; safe for any number of threads.

    Parameters
    ----------
    keep_bytes
        Of one meter's buffers, between streams.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._idle: list[_sizes.StreamMeter] = []

    def take(self) -> _sizes.StreamMeter:
        """One for the calling thread."""
        try:
            return self._idle.pop()
        except IndexError:
            return _sizes.StreamMeter()

    def give_back(self, meter: _sizes.StreamMeter) -> None:
        """Keep one for the next stream, unless its buffers are large."""
        if meter.held() > self._keep_bytes:
            meter.forget()
        self._idle.append(meter)


def stream_size(
    unit: Unit, part: Part, half: Half, options: MeasureOptions, meters: Meters, progress: Progress | None = None
) -> StreamSize:
    """The simulated size of one byte lane of 16-bit words of K or V.

    Raises
    ------
    SourceError
        When a file cannot be read.
    """
    return _simulated(unit, part, half, half, RowReader(unit.tensors(part)).take, options, meters, progress)


def fp32_stream_size(
    unit: Unit, part: Part, lane: int, options: MeasureOptions, meters: Meters, progress: Progress | None = None
) -> StreamSize:
    """The simulated size of one of the four byte lanes of fp32 words, the lowest byte first.

    The upper two lanes are tried under the predictors of the high bytes, the lower two under those of the low ones.
    Errors as for `stream_size`.
    """
    reader = RowReader(unit.tensors(part), as_stored=True)

    def take(tokens: int) -> Iterator[Piece]:
        for run in reader.take(tokens):
            yield np.ascontiguousarray(run.view("<u2")[lane // 2 :: 2]).view(np.uint8)

    return _simulated(unit, part, HALVES[1 - lane % 2], HALVES[lane < 2], take, options, meters, progress)


def _simulated(
    unit: Unit,
    part: Part,
    half: Half,
    tried: Half,
    take: Callable[[int], Iterator[Piece]],
    options: MeasureOptions,
    meters: Meters,
    progress: Progress | None,
) -> StreamSize:
    """The size of the `half` of 16-bit words that `take` gives for a number of tokens, by the predictors of `tried`."""
    heads, dims = unit.geometry(part)
    adaptive = options.codec_mode == "adaptive_v22"
    names = options.predictors.of(lane_of(part, tried)) if adaptive else _LEGACY[tried]
    block = min(options.adaptive_block_seq, unit.piece_tokens) if adaptive else unit.piece_tokens
    meter = meters.take()
    meter.setup(
        HI if half == "hi" else LO,
        heads,
        dims,
        block,
        [NAMES.index(name) for name in names],
        max(options.zstd_level, _MIN_LEVEL),
        options.bitshuffle,
        options.limits,
    )
    total, limit, modes = 0, 0.0, dict.fromkeys(names, 0)
    for tokens in unit.pieces():
        meter.begin(tokens)
        for run in take(tokens):
            meter.feed(run)
            if progress:
                progress(run.size // 2)
        size, blocks, won, entropy_bytes = meter.finish()
        total += size + (blocks + HEADER_BYTES if adaptive else 0)
        limit += entropy_bytes
        for name, count in zip(names, won, strict=True):
            modes[name] += count
    meters.give_back(meter)
    return StreamSize(unit.words(part), total, modes, limit)


def memory_needed(unit: Unit, part: Part, options: MeasureOptions) -> int:
    """Bytes of anonymous memory that a stream of `unit` may take (zstd's output counts as long as its input)."""
    piece = unit.piece_bytes(part) // unit.word_bytes(part)
    block = piece
    if options.codec_mode == "adaptive_v22":
        heads, dims = unit.geometry(part)
        block = min(piece, options.adaptive_block_seq * heads * dims)
    slots = (1 if block == piece else 2) + options.bitshuffle
    return 2 * piece + slots * block
