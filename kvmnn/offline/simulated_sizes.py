"""Simulated sizes of byte lanes: zstd frames are made and measured, and thrown away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..arrays.named_array import Chunk
from ..dtypes import Part
from ..threads.pipeline import Progress
from . import _stream_meter
from .options import LANE_HALVES, LaneHalf, MeasureOptions, format_lane
from .predictors import PREDICTOR_NAMES
from .token_runs import TokenReader
from .units import CompressionUnit

ADAPTIVE_HEADER_BYTES = 8
"""What adaptive_v22 adds to a stream, besides one byte for each block."""

HIGH_HALF, LOW_HALF = 1, 0
_MIN_ZSTD_LEVEL = -(1 << 17)
_LEGACY_PREDICTORS: dict[LaneHalf, tuple[str, ...]] = {"hi": ("delta_seq",), "lo": ("raw",)}


@dataclass(frozen=True)
class StreamSizeEstimate:
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


class CompressorPool:
    """Meters that wait for their next stream, with their zstd contexts and buffers; safe for any number of threads.

    Parameters
    ----------
    max_idle_bytes
        Of one meter's buffers, between streams.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle: list[_stream_meter.StreamMeter] = []

    def acquire(self) -> _stream_meter.StreamMeter:
        """One for the calling thread."""
        try:
            return self._idle.pop()
        except IndexError:
            return _stream_meter.StreamMeter()

    def release(self, meter: _stream_meter.StreamMeter) -> None:
        """Keep one for the next stream, unless its buffers are large."""
        if meter.count_buffer_bytes() > self._max_idle_bytes:
            meter.free_buffers()
        self._idle.append(meter)


def estimate_stream_size(
    unit: CompressionUnit,
    part: Part,
    half: LaneHalf,
    options: MeasureOptions,
    compressor_pool: CompressorPool,
    progress: Progress | None = None,
) -> StreamSizeEstimate:
    """The simulated size of one byte lane of 16-bit words of K or V.

    Raises
    ------
    SourceError
        When a file cannot be read.
    """
    return _estimate_size(
        unit, part, half, half, TokenReader(unit.list_tensors(part)).iter_tokens, options, compressor_pool, progress
    )


def estimate_fp32_stream_size(
    unit: CompressionUnit,
    part: Part,
    lane: int,
    options: MeasureOptions,
    compressor_pool: CompressorPool,
    progress: Progress | None = None,
) -> StreamSizeEstimate:
    """The simulated size of one of the four byte lanes of fp32 words, the lowest byte first.

    The upper two lanes are tried under the predictors of the high bytes, the lower two under those of the low ones.
    Errors as for `estimate_stream_size`.
    """
    reader = TokenReader(unit.list_tensors(part), as_stored=True)

    def read_half_elements(tokens: int) -> Iterator[Chunk]:
        for chunk in reader.iter_tokens(tokens):
            yield np.ascontiguousarray(chunk.view("<u2")[lane // 2 :: 2]).view(np.uint8)

    return _estimate_size(
        unit,
        part,
        LANE_HALVES[1 - lane % 2],
        LANE_HALVES[lane < 2],
        read_half_elements,
        options,
        compressor_pool,
        progress,
    )


def _estimate_size(
    unit: CompressionUnit,
    part: Part,
    half: LaneHalf,
    predictor_half: LaneHalf,
    read_tokens: Callable[[int], Iterator[Chunk]],
    options: MeasureOptions,
    compressor_pool: CompressorPool,
    progress: Progress | None,
) -> StreamSizeEstimate:
    """The size of the `half` of 16-bit words that `read_tokens` gives for a number of tokens, by the predictors of
    `predictor_half`.
    """
    heads, dims = unit.get_geometry(part)
    is_adaptive = options.codec_mode == "adaptive_v22"
    names = (
        options.predictors.get_lane(format_lane(part, predictor_half))
        if is_adaptive
        else _LEGACY_PREDICTORS[predictor_half]
    )
    block_tokens = min(options.adaptive_block_seq, unit.chunk_tokens) if is_adaptive else unit.chunk_tokens
    meter = compressor_pool.acquire()
    meter.configure(
        HIGH_HALF if half == "hi" else LOW_HALF,
        heads,
        dims,
        block_tokens,
        [PREDICTOR_NAMES.index(name) for name in names],
        max(options.zstd_level, _MIN_ZSTD_LEVEL),
        options.bitshuffle,
        options.limits,
    )
    total_bytes, limit_bytes, modes = 0, 0.0, dict.fromkeys(names, 0)
    for tokens in unit.iter_chunk_tokens():
        meter.start(tokens)
        for chunk in read_tokens(tokens):
            meter.feed(chunk)
            if progress:
                progress(chunk.size // 2)
        size, blocks, mode_counts, entropy_bytes = meter.finish()
        total_bytes += size + (blocks + ADAPTIVE_HEADER_BYTES if is_adaptive else 0)
        limit_bytes += entropy_bytes
        for name, count in zip(names, mode_counts, strict=True):
            modes[name] += count
    compressor_pool.release(meter)
    return StreamSizeEstimate(unit.count_elements(part), total_bytes, modes, limit_bytes)


def estimate_memory_bytes(unit: CompressionUnit, part: Part, options: MeasureOptions) -> int:
    """Bytes of anonymous memory that a stream of `unit` may take (zstd's output counts as long as its input)."""
    chunk_elements = unit.count_chunk_bytes(part) // unit.get_itemsize(part)
    block_elements = chunk_elements
    if options.codec_mode == "adaptive_v22":
        heads, dims = unit.get_geometry(part)
        block_elements = min(chunk_elements, options.adaptive_block_seq * heads * dims)
    num_buffers = (1 if block_elements == chunk_elements else 2) + options.bitshuffle
    return 2 * chunk_elements + num_buffers * block_elements
