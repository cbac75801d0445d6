"""Sizes of byte lanes: simulated by zstd frames that are discarded, or of frames that MNN would store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field

import numpy as np

from .._util.dataclass import dataclass
from .._util.parallel import Progress
from ..arrays.array import Chunk
from ..dtypes import PARTS, Part
from ..errors import KvmnnError
from ..frames import encode, verify_roundtrip
from . import _stream_meter
from .options import FP32_LANES, LANE_HALVES, LANES, PREDICTOR_NAMES, LaneHalf, MeasureOptions, format_lane
from .selection import CompressionUnit
from .tensor_reader import TokenReader

ADAPTIVE_HEADER_BYTES = 8
"""Bytes that adaptive_v22 adds to a stream, in addition to one byte for each block."""

HIGH_HALF, LOW_HALF = 1, 0
_MIN_ZSTD_LEVEL = -(1 << 17)
_LEGACY_PREDICTORS: dict[LaneHalf, tuple[str, ...]] = {"hi": ("delta_seq",), "lo": ("raw",)}


@dataclass(frozen=True)
class StreamSizeEstimate:
    """Estimated size of one byte lane of K or V."""

    #: Bytes of the lane.
    raw_bytes: int
    #: Simulated: the zstd frames of its pieces, mode bytes and headers.
    bytes: int
    #: Number of blocks by predictor.
    modes: dict[str, int]
    #: Bytes by the order-0 entropy of the lane without a predictor, with separate statistics for each piece.
    limit_bytes: float


class CompressorPool:
    """Pool of idle meters with their zstd contexts and buffers; thread-safe.

    Parameters
    ----------
    max_idle_bytes
        Of one meter's buffers, between streams.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle: list[_stream_meter.StreamMeter] = []

    def acquire(self) -> _stream_meter.StreamMeter:
        """Return a compressor for the calling thread."""
        try:
            return self._idle.pop()
        except IndexError:
            return _stream_meter.StreamMeter()

    def release(self, meter: _stream_meter.StreamMeter) -> None:
        """Return a meter to the pool for the next stream, unless its buffers are large."""
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
    """Estimate the size of one byte lane of 16-bit words of K or V in the simulated format."""
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
    """Estimate the size of one of the four byte lanes of fp32 words, numbered from the lowest byte.

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
    """Estimate the size of a `half` of the 16-bit words of `read_tokens`, with the predictors of `predictor_half`."""
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
    """Estimate the anonymous memory in bytes for a stream of `unit`, with zstd's output as long as its input."""
    chunk_elements = unit.count_chunk_bytes(part) // unit.get_itemsize(part)
    block_elements = chunk_elements
    if options.codec_mode == "adaptive_v22":
        heads, dims = unit.get_geometry(part)
        block_elements = min(chunk_elements, options.adaptive_block_seq * heads * dims)
    num_buffers = (1 if block_elements == chunk_elements else 2) + options.bitshuffle
    return 2 * chunk_elements + num_buffers * block_elements


MAX_FRAME_BYTES = 64 << 20
"""Raw bytes of a frame, at most; longer pieces take several."""


@dataclass(frozen=True)
class StoredSize:
    """Size of the frames of K or V."""

    #: Their total length, and how many there are.
    bytes: int
    frames: int

    def __add__(self, other: StoredSize) -> StoredSize:
        return StoredSize(self.bytes + other.bytes, self.frames + other.frames)


def measure_stored_size(unit: CompressionUnit, part: Part, progress: Progress | None = None) -> StoredSize:
    """Encode every chunk of K or V of `unit`, decode and compare it, and count its bytes."""
    heads, dims = unit.get_geometry(part)
    itemsize = unit.get_itemsize(part)
    dtype = "fp32" if itemsize == 4 else "fp16"  # a frame of bf16 words has the same bytes as one of fp16 words
    tokens_per_frame = max(1, MAX_FRAME_BYTES // (itemsize * heads * dims))
    reader = TokenReader(unit.list_tensors(part))
    total = StoredSize(0, 0)
    for num_tokens in unit.iter_chunk_tokens():
        for start in range(0, num_tokens, tokens_per_frame):
            elements = reader.read_tokens(min(tokens_per_frame, num_tokens - start))
            frame = encode(elements, dtype=dtype, threads=1)
            if not verify_roundtrip(frame, elements, dtype=dtype, threads=1):
                raise KvmnnError("a frame did not decode to its own input (please report this)")
            total += StoredSize(len(frame), 1)
            if progress:
                progress(elements.size)
    return total


@dataclass
class LaneSizeStats:
    """Size of one byte lane of a layer, or of all layers."""

    raw_bytes: int = 0
    simulated_bytes: int = 0
    limit_bytes: float = 0.0
    modes: Counter[str] = field(default_factory=Counter)

    def add_stream(self, size: StreamSizeEstimate) -> None:
        """Add the size of a stream."""
        self.raw_bytes += size.raw_bytes
        self.simulated_bytes += size.bytes
        self.limit_bytes += size.limit_bytes
        for name, count in size.modes.items():
            self.modes[name] += count


@dataclass
class Fp32SizeStats:
    """Sizes of fp32 elements of a layer, or of all layers, in four byte lanes."""

    #: By part and number, the lowest byte first.
    lanes: dict[tuple[Part, int], LaneSizeStats] = field(
        default_factory=lambda: {(part, lane): LaneSizeStats() for part in PARTS for lane in FP32_LANES}
    )
    #: By part: framing and tables.
    extra_bytes: Counter[Part] = field(default_factory=Counter)

    def sum_lanes(self, parts: Sequence[Part] = PARTS) -> LaneSizeStats:
        """Sum the lanes of `parts`, framing and tables included."""
        lanes = [lane for (part, _), lane in self.lanes.items() if part in parts]
        return LaneSizeStats(
            raw_bytes=sum(lane.raw_bytes for lane in lanes),
            simulated_bytes=sum(lane.simulated_bytes for lane in lanes) + sum(self.extra_bytes[part] for part in parts),
            limit_bytes=sum(lane.limit_bytes for lane in lanes),
        )


@dataclass
class AggregateSizeStats:
    """Sizes of a layer, or of all layers."""

    #: Number of measured tokens of the layer; for all layers, their sum.
    tokens: int = 0
    #: Sizes of the lanes of 16-bit words, by name: ``"k_hi"``, ``"k_lo"``, ``"v_hi"``, ``"v_lo"``.
    lanes: dict[str, LaneSizeStats] = field(default_factory=lambda: {lane: LaneSizeStats() for lane in LANES})
    #: Bytes of framing and tables by part, which belong to the simulated size.
    extra_bytes: Counter[Part] = field(default_factory=Counter)
    #: Sizes of encoded and decoded frames by part; empty unless requested.
    stored_sizes: dict[Part, StoredSize] = field(default_factory=dict)
    #: Sizes of fp32 words in four byte lanes; None without fp32 words.
    fp32: Fp32SizeStats | None = None
    #: Whether `fp32` counts in the sums. It does not if fp32 was rounded and the 16-bit words are measured.
    is_fp32_counted: bool = False

    def raw_bytes(self, parts: Sequence[Part] = PARTS) -> int:
        """Return the uncompressed bytes of the lanes that count in the sums."""
        return sum(lane.raw_bytes for lane in self.list_counted_lanes(parts))

    def simulated_bytes(self, parts: Sequence[Part] = PARTS) -> int:
        """Return the size of the simulated format in bytes."""
        return sum(lane.simulated_bytes for lane in self.list_counted_lanes(parts)) + sum(
            self.extra_bytes[part] for part in parts
        )

    def limit_bytes(self, parts: Sequence[Part] = PARTS) -> float:
        """Return the number of bytes that the order-0 entropy of the byte lanes amounts to."""
        return sum(lane.limit_bytes for lane in self.list_counted_lanes(parts))

    def stored_bytes(self, parts: Sequence[Part] = PARTS) -> int:
        """Return the number of bytes of the frames that were encoded and decoded."""
        return sum(self.stored_sizes[part].bytes for part in parts if part in self.stored_sizes)

    def stored_frames(self, parts: Sequence[Part] = PARTS) -> int:
        """Return the number of frames that were encoded and decoded."""
        return sum(self.stored_sizes[part].frames for part in parts if part in self.stored_sizes)

    def list_counted_lanes(self, parts: Sequence[Part]) -> list[LaneSizeStats]:
        """List the lanes of `parts` that count in the sums."""
        lanes = [self.lanes[format_lane(part, half)] for part in parts for half in LANE_HALVES]
        return lanes + [self.fp32_lanes[part, lane] for part in parts for lane in FP32_LANES if self.fp32_lanes]

    @property
    def fp32_lanes(self) -> dict[tuple[Part, int], LaneSizeStats]:
        """Sizes of the fp32 byte lanes that count in the sums, by part and lane number; empty without fp32 elements."""
        return self.fp32.lanes if self.fp32 is not None and self.is_fp32_counted else {}

    def count_modes(self, part: Part, half: LaneHalf) -> dict[str, int]:
        """Count which predictor the blocks of the upper or lower bytes use; of fp32, the two upper or lower lanes."""
        mode_counts = Counter(self.lanes[format_lane(part, half)].modes)
        for lane in FP32_LANES[2:] if half == "hi" else FP32_LANES[:2]:
            if self.fp32_lanes:
                for name, number in self.fp32_lanes[part, lane].modes.items():
                    mode_counts[name] += number
        return dict(mode_counts)
