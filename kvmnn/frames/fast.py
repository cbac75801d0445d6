"""Frames of effort "fast": every lane as zstd frames of its own writer, one for each piece of the array."""

from __future__ import annotations

from functools import partial

from ..dtypes import Bytes
from ..threads.pool import Job, parallel_run
from . import _fast_encoder
from .afar import RepeatInfo, UnalignedRepeats, detect_long_range_repeats
from .options import ZSTD_BIT, LaneOptions
from .pieces import (
    RLE_TRIAL_MIN_RATIO,
    Lane,
    build_frame,
    concat,
    count_fragment_bytes,
    encode_segments,
    make_lane,
    make_writers,
    parse_lanes,
    try_rle,
)

FAST_SEGMENT_BYTES = 4 << 20
"""Raw bytes of a piece: repeats are seen inside of one, and pieces are made on different threads."""
NEGLIGIBLE_LANE_DIVISOR = 32
"""A lane of so small a share of all bytes need not become smaller."""

_RAW_MODE_BIT = 1
_MODE_BITS = (1, 2, 4)
_U32_MAX = (1 << 32) - 1


def supports_fast_path(options: LaneOptions, nbytes: int) -> bool:
    """Whether the options leave effort "fast" what it makes: zstd, and streams that need not be predicted."""
    num_elements, remainder = divmod(nbytes, options.itemsize)
    is_allowed = options.allowed_codecs & ZSTD_BIT and all(modes & _RAW_MODE_BIT for modes in options.modes)
    return bool(is_allowed) and 0 < num_elements <= _U32_MAX and not remainder


def encode_fast(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """The frame of little-endian words, for which `supports_fast_path` holds; its bytes do not depend on `threads`.

    Raises
    ------
    AtOddDistances
        For an array of several pieces that repeats itself so: this effort would make too much of it.
    """
    num_elements = data.size // options.itemsize
    if data.size > FAST_SEGMENT_BYTES:
        lanes = _encode_fast_lanes(data, options, threads)
        return build_frame(num_elements, try_rle(lanes, data, options), threads)
    frame = _fast_encoder.encode(data, options.itemsize, options.modes)
    if len(frame) * RLE_TRIAL_MIN_RATIO > data.size:
        return frame
    return build_frame(num_elements, try_rle(parse_lanes(frame, options.itemsize), data, options), threads)


def encode_fast_payloads(data: Bytes, options: LaneOptions, threads: int) -> list[tuple[int, bytes]]:
    """For every lane the number of its predictor, and its zstd frames, one for each piece, one behind the other."""
    lanes = _encode_fast_lanes(data, options, threads, allow_unaligned=True)
    return [(lane.mode, concat(lane.fragments)) for lane in lanes]


def _encode_fast_lanes(data: Bytes, options: LaneOptions, threads: int, allow_unaligned: bool = False) -> list[Lane]:
    modes, alternatives = _fast_encoder.select_modes(data, options.itemsize, options.modes)

    def detect_repeats() -> RepeatInfo:
        repeats = detect_long_range_repeats(data, options.itemsize, FAST_SEGMENT_BYTES)
        if repeats.unaligned and not allow_unaligned:
            raise UnalignedRepeats
        return repeats

    def encode_lanes(segment_bytes: int, *first_jobs: Job) -> list[Lane]:
        return _encode_fast_segments(data, segment_bytes, options.itemsize, modes, threads, *first_jobs)

    lanes, segment_bytes = encode_segments(
        encode_lanes, detect_repeats, FAST_SEGMENT_BYTES, data.size, options.itemsize
    )
    return _try_alternatives(lanes, data, segment_bytes, options.itemsize, alternatives, threads)


def _try_alternatives(
    lanes: list[Lane], data: Bytes, segment_bytes: int, itemsize: int, alternatives: list[int], threads: int
) -> list[Lane]:
    """Of each lane the smallest, by its predictor or by one of its rivals that makes the first piece smaller."""
    negligible_bytes = _count_payload_bytes(lanes) // NEGLIGIBLE_LANE_DIVISOR
    for bit in _MODE_BITS:
        trial_bits = [
            bit if alternative_bits & bit and lane.nbytes > negligible_bytes else 0
            for lane, alternative_bits in zip(lanes, alternatives, strict=True)
        ]
        if not any(trial_bits):
            continue
        first_segments = _encode_fast_segments(data[:segment_bytes], segment_bytes, itemsize, trial_bits, threads)
        trial_bits = [
            bit if bit and trial_lane.nbytes < count_fragment_bytes(lane.fragments[0]) else 0
            for lane, trial_lane, bit in zip(lanes, first_segments, trial_bits, strict=True)
        ]
        if any(trial_bits):
            trial_lanes = _encode_fast_segments(data, segment_bytes, itemsize, trial_bits, threads)
            lanes = [
                min(lane, trial_lane, key=lambda candidate: candidate.nbytes) if bit else lane
                for lane, trial_lane, bit in zip(lanes, trial_lanes, trial_bits, strict=True)
            ]
    return lanes


def _count_payload_bytes(lanes: list[Lane]) -> int:
    return sum(lane.nbytes for lane in lanes)


def _split_for_threads(num_elements: int, segment_elements: int) -> list[tuple[int, int]]:
    """Pieces of `segment_elements` words, shorter ones at the end, so that threads of unequal speed end together.

    The last quarter of them in halves, and the second half of that in quarters.
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


def _encode_fast_segments(
    data: Bytes, segment_bytes: int, itemsize: int, modes: list[int], threads: int, *first_jobs: Job
) -> list[Lane]:
    spans = _split_for_threads(data.size // itemsize, segment_bytes // itemsize)
    bound_functions = [
        _fast_encoder.raw_payload_bytes if bits == _RAW_MODE_BIT else _fast_encoder.max_payload_bytes for bits in modes
    ]
    max_bytes = [[bound(end - begin) for begin, end in spans] for bound in bound_functions]
    writers = make_writers(max_bytes)

    def encode_segment(segment: int) -> None:
        capacities = tuple(lane[segment] for lane in max_bytes)
        _fast_encoder.write_payloads(writers, segment, capacities, data, itemsize, *spans[segment], modes)

    parallel_run([*first_jobs, *(partial(encode_segment, piece) for piece in range(len(spans)))], threads)
    return [make_lane(writer, bits.bit_length() - 1) for writer, bits in zip(writers, modes, strict=True)]
