"""Frames whose lanes are concatenated zstd frames: segments that are encoded on different threads.

MNN passes a whole payload to ``ZSTD_decompress``, which accepts any number of frames (docs/format.md). Where an array
is split depends on the array alone, so the bytes of a frame do not depend on the number of threads.

There are two kinds of segments: those of effort "balanced" are libzstd's, those of effort "fast" come from kvmnn's own
writer (`_fast_encoder`).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeAlias

from .._util.named_tuple import NamedTuple
from .._util.parallel import Job, parallel_run
from ..dtypes import Bytes
from ..errors import LimitError
from . import _encoder, _fast_encoder, tuning, zstd
from ._output_buffer import OrderedWriter, OutputBuffer
from .options import CODECS, MAX_ELEMENTS, PREDICTORS, RAW_MODE_BIT, RLE_BIT, ZSTD_BIT, LaneOptions
from .sampling import RepeatInfo, check_repeats

_ZSTD_BLOCK_BYTES, _ZSTD_BLOCK_HEADER_BYTES, _ZSTD_FRAME_HEADER_BYTES = 128 << 10, 3, 10
"""Sizes in a zstd frame that is longer than its window (RFC 8878)."""

_RAW_MODE = PREDICTORS.index("raw")
_RLE_CODEC, _ZSTD_CODEC = CODECS.index("rle"), CODECS.index("zstd")
_STREAM_HEADER = struct.Struct("<BBII")
_U32_MAX = (1 << 32) - 1


# -- segments of any kind ---------------------------------------------------------------------------------------------


class SegmentPlan(NamedTuple):
    """Jobs that encode the segments of an array, their writers, and the lane and mode of each writer."""

    jobs: Sequence[Job]
    writers: Sequence[OrderedWriter]
    lane_modes: Sequence[tuple[int, int]]
    """The lane and the mode number of each writer; a lane may have several writers, of which the smallest is used."""


def run_plan(
    plan: SegmentPlan, threads: int, first_job: Job | None = None, stop: threading.Event | None = None
) -> list[Lane]:
    """Run the jobs of a plan, after `first_job`, and return the smallest candidate of each lane.

    If `first_job` sets `stop`, jobs that have not started are skipped and no lanes are returned.
    """
    parallel_run([*([first_job] if first_job else ()), *plan.jobs], threads, stop)
    if stop is not None and stop.is_set():
        return []
    best: dict[int, Lane] = {}
    for (lane, mode), writer in zip(plan.lane_modes, plan.writers, strict=True):
        candidate = make_lane(writer, mode)
        if lane not in best or candidate.nbytes < best[lane].nbytes:
            best[lane] = candidate
    return [best[lane] for lane in sorted(best)]


def encode_segments(
    make_plan: Callable[[int], SegmentPlan],
    data: Bytes,
    itemsize: int,
    initial_segment_bytes: int,
    threads: int,
    *,
    visible_bytes: int,
    allow_unaligned: bool = True,
) -> tuple[list[Lane], int]:
    """Encode the lanes of an array in segments that are long enough for its repeats."""
    results: list[RepeatInfo] = []
    stop, segment_bytes = threading.Event(), initial_segment_bytes
    check = partial(check_repeats, data, itemsize, visible_bytes, allow_unaligned, results, stop)
    # The check takes half as long as one segment, so it runs alongside the first ones: before them it took 3 % of what
    # two threads need for 64 MiB.
    lanes = run_plan(make_plan(segment_bytes), threads, check, stop)
    repeats = results[0]
    if repeats.unaligned and not allow_unaligned:
        return [], segment_bytes
    if not lanes:
        segment_bytes = tuning.SEGMENT_GROWTH * initial_segment_bytes
        lanes = run_plan(make_plan(segment_bytes), threads)
    for growth, min_ratio in (
        (tuning.SEGMENT_GROWTH, tuning.SEGMENT_GROWTH_MIN_RATIO[itemsize]),
        (tuning.MAX_SEGMENT_GROWTH, tuning.MAX_SEGMENT_GROWTH_MIN_RATIO),
    ):
        payload_bytes = sum(lane.nbytes for lane in lanes)
        is_small = payload_bytes * initial_segment_bytes < tuning.SMALL_SEGMENT_BYTES * data.size
        if (
            segment_bytes >= data.size
            or payload_bytes * min_ratio > data.size
            or not (repeats.across_segments or is_small)
        ):
            break
        if segment_bytes < growth * initial_segment_bytes:
            segment_bytes = growth * initial_segment_bytes
            lanes = run_plan(make_plan(segment_bytes), threads)
    return lanes, segment_bytes


def list_lane_modes(options: LaneOptions) -> list[tuple[int, int]]:
    """Return every lane and mode number that the options permit, lane by lane."""
    return [
        (lane, mode) for lane, bits in enumerate(options.modes) for mode in range(len(PREDICTORS)) if bits >> mode & 1
    ]


# -- segments of effort "balanced" ------------------------------------------------------------------------------------


def is_segmented(data: Bytes, options: LaneOptions) -> bool:
    """Return whether effort "balanced" encodes the elements in several segments."""
    num_elements, remainder = divmod(data.size, options.itemsize)
    is_long = tuning.SEGMENT_LANE_BYTES < num_elements <= MAX_ELEMENTS
    return is_long and not remainder and bool(options.allowed_codecs & ZSTD_BIT)


def encode_balanced_segments(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """Encode elements for which `is_segmented` returns True, each lane by the best predictor that `options` permit."""
    num_elements, initial_segment_bytes = data.size // options.itemsize, tuning.SEGMENT_LANE_BYTES * options.itemsize
    lane_modes = list_lane_modes(options)

    def make_plan(segment_bytes: int) -> SegmentPlan:
        count = -(-data.size // segment_bytes)
        if segment_bytes == initial_segment_bytes:
            count += count & 1  # an even number, so that two threads end together
        ends = [num_elements * (segment + 1) // count for segment in range(count)]
        spans = list(zip([0, *ends], ends, strict=False))
        max_bytes = [[_compute_max_payload_bytes(end - begin, mode) for begin, end in spans] for _, mode in lane_modes]
        writers = make_writers(max_bytes)
        # High bytes take longest: they come first.
        jobs = [
            partial(
                _encoder.write_payload, writers[pair], segment, max_bytes[pair][segment], data, options.itemsize,
                *spans[segment], *lane_modes[pair], zstd.DEFAULT_LEVEL,
            )
            for pair in reversed(range(len(lane_modes)))
            for segment in range(count)
        ]  # fmt: skip
        return SegmentPlan(jobs, writers, lane_modes)

    lanes, _ = encode_segments(
        make_plan, data, options.itemsize, initial_segment_bytes, threads, visible_bytes=initial_segment_bytes // 2
    )
    return build_frame(num_elements, try_rle(lanes, data, options), threads)


def _compute_max_payload_bytes(nbytes: int, mode: int) -> int:
    """Return an upper bound of the payload of a lane; in raw mode that of uncompressed zstd blocks, which is lower."""
    if mode != _RAW_MODE:
        return _encoder.max_zstd_bytes(nbytes)
    return max(
        nbytes + _ZSTD_BLOCK_HEADER_BYTES * -(-nbytes // _ZSTD_BLOCK_BYTES) + _ZSTD_FRAME_HEADER_BYTES,
        _fast_encoder.raw_payload_bytes(nbytes),
    )


# -- segments of effort "fast" ----------------------------------------------------------------------------------------


def encode_fast_frame(data: Bytes, options: LaneOptions, threads: int) -> bytes | None:
    """Encode elements that `options.supports_fast_path` with kvmnn's own zstd writer."""
    if data.size > tuning.FAST_SEGMENT_BYTES:
        lanes = encode_fast_lanes(data, options, threads, allow_unaligned=False)
        if not lanes:
            return None
    else:
        frame = _fast_encoder.encode(data, options.itemsize, options.modes)
        if len(frame) * tuning.RLE_TRIAL_MIN_RATIO > data.size:
            return frame
        lanes = parse_lanes(frame, options.itemsize)
    return build_frame(data.size // options.itemsize, try_rle(lanes, data, options), threads)


def encode_fast_lanes(data: Bytes, options: LaneOptions, threads: int, *, allow_unaligned: bool = True) -> list[Lane]:
    """Encode the lanes of data for which `options.supports_fast_path`.

    Without `allow_unaligned`, return an empty list for data that repeat at distances that the fast match finder cannot
    see (`tuning.MATCH_POSITION_STRIDE_ELEMENTS`).
    """
    modes, alternatives = _fast_encoder.select_modes(data, options.itemsize, options.modes)
    lanes, segment_bytes = encode_segments(
        partial(_plan_fast_segments, data, options.itemsize, modes),
        data,
        options.itemsize,
        tuning.FAST_SEGMENT_BYTES,
        threads,
        visible_bytes=tuning.FAST_SEGMENT_BYTES,
        allow_unaligned=allow_unaligned,
    )
    if any(alternatives) and lanes:
        lanes = _try_alternatives(lanes, data, segment_bytes, options.itemsize, alternatives, threads)
    return lanes


def _try_alternatives(
    lanes: list[Lane], data: Bytes, segment_bytes: int, itemsize: int, alternatives: list[int], threads: int
) -> list[Lane]:
    """Return each lane by its predictor, or by a smaller alternative that also makes the first segment smaller."""
    negligible_bytes = sum(lane.nbytes for lane in lanes) // tuning.NEGLIGIBLE_LANE_DIVISOR
    for bit in (1 << mode for mode in range(len(PREDICTORS))):
        trial_bits = [
            bit if alternative_bits & bit and lane.nbytes > negligible_bytes else 0
            for lane, alternative_bits in zip(lanes, alternatives, strict=True)
        ]
        if not any(trial_bits):
            continue
        first_plan = _plan_fast_segments(data[:segment_bytes], itemsize, trial_bits, segment_bytes)
        trial_bits = [
            bit if bit and trial_lane.nbytes < count_fragment_bytes(lane.fragments[0]) else 0
            for lane, trial_lane, bit in zip(lanes, run_plan(first_plan, threads), trial_bits, strict=True)
        ]
        if any(trial_bits):
            trial_lanes = run_plan(_plan_fast_segments(data, itemsize, trial_bits, segment_bytes), threads)
            lanes = [
                min(lane, trial_lane, key=lambda candidate: candidate.nbytes) if bit else lane
                for lane, trial_lane, bit in zip(lanes, trial_lanes, trial_bits, strict=True)
            ]
    return lanes


def _plan_fast_segments(data: Bytes, itemsize: int, modes: list[int], segment_bytes: int) -> SegmentPlan:
    """Return the plan for one predictor bit for each lane, or 0 for a lane that is left out and remains empty."""
    spans = _split_for_threads(data.size // itemsize, segment_bytes // itemsize)
    bound_functions = [
        _fast_encoder.raw_payload_bytes if bits == RAW_MODE_BIT else _fast_encoder.max_payload_bytes for bits in modes
    ]
    max_bytes = [[bound(end - begin) for begin, end in spans] for bound in bound_functions]
    writers = make_writers(max_bytes)
    jobs = [
        partial(_fast_encoder.write_payloads, writers, segment, capacities, data, itemsize, begin, end, modes)
        for segment, ((begin, end), capacities) in enumerate(zip(spans, zip(*max_bytes, strict=True), strict=True))
    ]
    return SegmentPlan(jobs, writers, [(lane, bits.bit_length() - 1) for lane, bits in enumerate(modes)])


def _split_for_threads(num_elements: int, segment_elements: int) -> list[tuple[int, int]]:
    """Return spans of `segment_elements`, then halves and quarters of them, so that unequal threads end together.

    The last quarter of the segments is halved, and the second half of that is quartered: 2 to 6 % of the time of two
    threads.
    """
    count = -(-num_elements // segment_elements)
    halves_start, quarters_start = (
        min(num_elements, (count - count // divisor) * segment_elements) for divisor in (4, 8)
    )
    starts = [
        *range(0, halves_start, segment_elements),
        *range(halves_start, quarters_start, segment_elements // 2),
        *range(quarters_start, num_elements, segment_elements // 4),
    ]
    return list(zip(starts, [*starts[1:], num_elements], strict=True))


# -- lanes and frames -------------------------------------------------------------------------------------------------


class BufferSlice(NamedTuple):
    """Bytes in an output buffer."""

    nbytes: int
    buffer: OutputBuffer
    offset: int


Fragment: TypeAlias = bytes | BufferSlice


class Lane(NamedTuple):
    """The numbers of a lane's predictor and codec, and the fragments of its payload in order."""

    mode: int
    codec: int
    fragments: tuple[Fragment, ...]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the payload."""
        return sum(map(count_fragment_bytes, self.fragments))


def make_lane(writer: OrderedWriter, mode: int) -> Lane:
    """Return the lane of the zstd frames of a writer."""
    fragments = (BufferSlice(nbytes, writer.buffer, offset) for nbytes, offset in writer.list_fragments())
    return Lane(mode, _ZSTD_CODEC, tuple(fragments))


def make_writers(max_bytes: Sequence[Sequence[int]]) -> list[OrderedWriter]:
    """Return writers that share one buffer, one for each list of the maximum bytes of its segments.

    No segment is written before its final position in a frame of all writers.
    """
    starts, offset = [], 4
    for lane_max_bytes in max_bytes:
        *offsets, offset = accumulate(lane_max_bytes, initial=offset + _STREAM_HEADER.size)
        starts.append(offsets)
    buffer = OutputBuffer(offset)
    return [OrderedWriter(buffer, offsets) for offsets in starts]


def parse_lanes(frame: bytes, itemsize: int) -> list[Lane]:
    """Return the lanes of a frame that this program has encoded."""
    lanes, offset = [], 4
    for _ in range(itemsize):
        mode, codec, _, payload_bytes = _STREAM_HEADER.unpack_from(frame, offset)
        offset += _STREAM_HEADER.size
        lanes.append(Lane(mode, codec, (frame[offset : offset + payload_bytes],)))
        offset += payload_bytes
    return lanes


def try_rle(lanes: list[Lane], data: Bytes, options: LaneOptions) -> list[Lane]:
    """Return the lanes, as RLE where that is smaller: no zstd frame stores runs of any length in two bytes each."""
    if not options.allowed_codecs & RLE_BIT:
        return lanes
    max_bytes = data.size // options.itemsize // tuning.RLE_TRIAL_MIN_RATIO
    smallest = []
    for lane_index, lane in enumerate(lanes):
        candidate = None
        if lane.nbytes <= max_bytes:
            candidate = _encoder.encode_candidate(
                data, options.itemsize, lane_index, _RAW_MODE, RLE_BIT, zstd.DEFAULT_LEVEL, True, lane.nbytes
            )
        smallest.append(
            lane if candidate is None else Lane(_RAW_MODE, _RLE_CODEC, (candidate[3][_STREAM_HEADER.size :],))
        )
    return smallest


def build_frame(num_elements: int, lanes: Sequence[Lane], threads: int) -> bytes:
    """Return the frame of these lanes."""
    fragments: list[Fragment] = [num_elements.to_bytes(4, "little")]
    for lane in lanes:
        fragments += [pack_stream_header(num_elements, lane.mode, lane.nbytes, lane.codec), *lane.fragments]
    return concat(fragments, threads, _find_owner(fragments))


def pack_stream_header(num_elements: int, mode: int, payload_bytes: int, codec: int = _ZSTD_CODEC) -> bytes:
    """Return the header of a stream of `num_elements` bytes with a payload of `payload_bytes`."""
    if payload_bytes > _U32_MAX:
        raise LimitError("a payload above 2^32 - 1 bytes, which is what a stream header can say: encode pieces")
    return _STREAM_HEADER.pack(mode, codec, num_elements, payload_bytes)


def concat(fragments: Sequence[Fragment], threads: int = 1, owner: OutputBuffer | None = None) -> bytes:
    """Concatenate fragments without the GIL."""
    *offsets, total_bytes = accumulate(map(count_fragment_bytes, fragments), initial=0)
    buffer = OutputBuffer(total_bytes) if owner is None else owner
    copies, copied_bytes = [], 0
    for offset, fragment in zip(offsets, fragments, strict=True):
        if isinstance(fragment, BufferSlice) and fragment.buffer is buffer:
            buffer.move(offset, fragment.offset, fragment.nbytes)
            continue
        data = fragment if isinstance(fragment, bytes) else fragment.buffer.view(fragment.offset, fragment.nbytes)
        copies.append((offset, data))
        copied_bytes += len(data)
    if copied_bytes >= tuning.MIN_PARALLEL_BYTES:
        parallel_run([partial(buffer.write, *copy) for copy in copies], threads)
    else:
        for copy in copies:
            buffer.write(*copy)
    return buffer.finish(total_bytes)


def _find_owner(fragments: Sequence[Fragment]) -> OutputBuffer | None:
    """Return the buffer of the first fragment in one, unless a fragment in it is before its final position."""
    owner = next((fragment.buffer for fragment in fragments if isinstance(fragment, BufferSlice)), None)
    offsets = accumulate(map(count_fragment_bytes, fragments), initial=0)
    for offset, fragment in zip(offsets, fragments, strict=False):
        if isinstance(fragment, BufferSlice) and fragment.buffer is owner and fragment.offset < offset:
            return None
    return owner


def count_fragment_bytes(fragment: Fragment) -> int:
    """Return the number of bytes of a fragment."""
    return len(fragment) if isinstance(fragment, bytes) else fragment.nbytes
