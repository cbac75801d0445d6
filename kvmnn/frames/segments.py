"""Frames whose lanes are several zstd frames, one behind the other: pieces that are made on different threads.

MNN hands a whole payload to ``ZSTD_decompress``, which takes any number of frames (docs/format.md). Where an array is
cut depends on the array alone, so the bytes of a frame do not depend on the number of threads.

Frames of effort "fast": every lane as zstd frames of its own writer, one for each piece of the array.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias

from .._util.parallel import Job, parallel_map, parallel_run
from ..dtypes import Bytes
from ..errors import LimitError
from . import _encoder, _fast_encoder, zstd
from ._output_buffer import OrderedWriter, OutputBuffer
from .options import CODECS, MIN_PARALLEL_BYTES, RLE_BIT, ZSTD_BIT, LaneOptions
from .predictors import PREDICTORS as PREDICTORS
from .sampling import NO_REPEATS, RepeatInfo, UnalignedRepeats, detect_long_range_repeats

SEGMENT_LANE_BYTES = 4 << 20
"""Of a lane, in a piece of effort "balanced": twice as far as libzstd looks back at that level, so that a cache loses
nothing where a piece begins, and what is compressed is still in the processor's cache."""

SEGMENT_GROWTH_MIN_RATIO = {2: 1.6, 4: 1.5}
"""By bytes of a word: an array that becomes so many times smaller, and has the same words in several pieces, ..."""
SMALL_SEGMENT_BYTES = 16 << 10
"""... or makes so few bytes of each piece that what these begin with is not little, ..."""
SEGMENT_GROWTH = 8
"""... is made again, in pieces so many times as long, ..."""
MAX_SEGMENT_GROWTH, MAX_SEGMENT_GROWTH_MIN_RATIO = 64, 3
"""... and once more where it becomes `MAX_SEGMENT_GROWTH_MIN_RATIO` times smaller."""

RLE_TRIAL_MIN_RATIO = 4
"""Lanes that became so many times smaller may be full of runs, ones of a cache are not."""

_ZSTD_BLOCK_BYTES, _ZSTD_BLOCK_HEADER_BYTES, _ZSTD_FRAME_HEADER_BYTES = 128 << 10, 3, 10
"""Of a zstd frame longer than its window."""

_RAW_MODE = PREDICTORS.index("raw")
_RLE_CODEC, _ZSTD_CODEC = CODECS.index("rle"), CODECS.index("zstd")
_STREAM_HEADER = struct.Struct("<BBII")
_U32_MAX = (1 << 32) - 1


def is_segmented(data: Bytes, options: LaneOptions) -> bool:
    """Whether effort "balanced" makes several pieces of the words."""
    num_elements, remainder = divmod(data.size, options.itemsize)
    return SEGMENT_LANE_BYTES < num_elements <= _U32_MAX and not remainder and bool(options.allowed_codecs & ZSTD_BIT)


def encode_balanced(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """The frame of words for which `is_segmented` holds, of each lane the smallest by the predictors that `options`
    allow.

    Equal pieces for each lane, an even number but where it becomes much smaller.
    """
    num_elements, initial_segment_bytes = data.size // options.itemsize, SEGMENT_LANE_BYTES * options.itemsize

    def encode_lanes(segment_bytes: int, *first_jobs: Job) -> list[Lane]:
        count = -(-data.size // segment_bytes)
        if segment_bytes == initial_segment_bytes:
            count += count & 1
        ends = [num_elements * (segment + 1) // count for segment in range(count)]
        return _encode_smallest_lanes(data, options, list(zip([0, *ends], ends, strict=False)), threads, *first_jobs)

    def detect_repeats() -> RepeatInfo:
        return detect_long_range_repeats(data, options.itemsize, initial_segment_bytes // 2)

    lanes, _ = encode_segments(encode_lanes, detect_repeats, initial_segment_bytes, data.size, options.itemsize)
    return build_frame(num_elements, try_rle(lanes, data, options), threads)


class SegmentEncoder(Protocol):
    """Makes the lanes of an array in pieces of some size; on one of its threads `first_jobs` comes first."""

    def __call__(self, segment_bytes: int, *first_jobs: Job) -> list[Lane]: ...


class _NeedsLongerSegments(Exception):
    """Words are there again farther away than the pieces see that an array is being made of."""


def encode_segments(
    encoder: SegmentEncoder,
    detect_repeats: Callable[[], RepeatInfo],
    initial_segment_bytes: int,
    nbytes: int,
    itemsize: int,
) -> tuple[list[Lane], int]:
    """The lanes of an array of `nbytes` bytes, and the size of its pieces: `initial_segment_bytes`, or more if these
    repeat each other.

    `detect_repeats` tells how words are there again. It is asked beside the first pieces, since it takes half as long
    as one.
    """
    repeats = NO_REPEATS

    def check_repeats() -> None:
        nonlocal repeats
        repeats = detect_repeats()
        if repeats.beyond_segment:
            raise _NeedsLongerSegments

    lanes, segment_bytes = [], SEGMENT_GROWTH * initial_segment_bytes
    with suppress(_NeedsLongerSegments):
        lanes, segment_bytes = encoder(initial_segment_bytes, check_repeats), initial_segment_bytes
    if not lanes:
        lanes = encoder(segment_bytes)
    for growth, min_ratio in (
        (SEGMENT_GROWTH, SEGMENT_GROWTH_MIN_RATIO[itemsize]),
        (MAX_SEGMENT_GROWTH, MAX_SEGMENT_GROWTH_MIN_RATIO),
    ):
        payload_bytes = sum(lane.nbytes for lane in lanes)
        is_small = payload_bytes * initial_segment_bytes < SMALL_SEGMENT_BYTES * nbytes
        if segment_bytes >= nbytes or payload_bytes * min_ratio > nbytes or not (repeats.across_segments or is_small):
            break
        if segment_bytes < growth * initial_segment_bytes:
            segment_bytes = growth * initial_segment_bytes
            lanes = encoder(segment_bytes)
    return lanes, segment_bytes


def _encode_smallest_lanes(
    data: Bytes, options: LaneOptions, spans: list[tuple[int, int]], threads: int, *first_jobs: Job
) -> list[Lane]:
    lane_modes = [
        (lane, mode)
        for lane in range(options.itemsize)
        for mode in range(len(PREDICTORS))
        if options.modes[lane] >> mode & 1
    ]
    max_bytes = [[_compute_max_payload_bytes(end - begin, mode) for begin, end in spans] for _, mode in lane_modes]
    writers = make_writers(max_bytes)

    def encode_segment(lane_mode: int, segment: int) -> None:
        _encoder.write_payload(
            writers[lane_mode],
            segment,
            max_bytes[lane_mode][segment],
            data,
            options.itemsize,
            *spans[segment],
            *lane_modes[lane_mode],
            zstd.DEFAULT_LEVEL,
        )

    # High bytes take longest: they come first.
    jobs = [
        partial(encode_segment, pair, segment)
        for pair in reversed(range(len(lane_modes)))
        for segment in range(len(spans))
    ]
    parallel_run([*first_jobs, *jobs], threads)
    best: dict[int, Lane] = {}
    for (lane, mode), writer in zip(lane_modes, writers, strict=True):
        candidate = make_lane(writer, mode)
        if lane not in best or candidate.nbytes < best[lane].nbytes:
            best[lane] = candidate
    return [best[lane] for lane in range(options.itemsize)]


# -- parts of frames --------------------------------------------------------------------------------------------------


def _compute_max_payload_bytes(nbytes: int, mode: int) -> int:
    """Room for a zstd frame; without a predictor just as much as noise needs, which lies where it stays then."""
    if mode != _RAW_MODE:
        return _encoder.max_zstd_bytes(nbytes)
    return max(
        nbytes + _ZSTD_BLOCK_HEADER_BYTES * -(-nbytes // _ZSTD_BLOCK_BYTES) + _ZSTD_FRAME_HEADER_BYTES,
        _fast_encoder.raw_payload_bytes(nbytes),
    )


class BufferSlice(NamedTuple):
    """Bytes that lie in a room."""

    nbytes: int
    buffer: OutputBuffer
    offset: int


Fragment: TypeAlias = bytes | BufferSlice


class Lane(NamedTuple):
    """The numbers of a lane's predictor and codec, and its payload: parts, one behind the other."""

    mode: int
    codec: int
    fragments: tuple[Fragment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(map(count_fragment_bytes, self.fragments))


def make_lane(writer: OrderedWriter, mode: int) -> Lane:
    """The lane of zstd frames that are all on a track."""
    return Lane(
        mode,
        _ZSTD_CODEC,
        tuple(BufferSlice(nbytes, writer.buffer, offset) for nbytes, offset in writer.list_fragments()),
    )


def build_frame(num_elements: int, lanes: Sequence[Lane], threads: int) -> bytes:
    """The frame of lanes."""
    fragments: list[Fragment] = [num_elements.to_bytes(4, "little")]
    for lane in lanes:
        fragments += [pack_stream_header(num_elements, lane.mode, lane.nbytes, lane.codec), *lane.fragments]
    return concat(fragments, threads, _find_owner(fragments))


def parse_lanes(frame: bytes, itemsize: int) -> list[Lane]:
    """The lanes of a frame that was just made."""
    lanes, offset = [], 4
    for _ in range(itemsize):
        mode, codec, _, payload_bytes = _STREAM_HEADER.unpack_from(frame, offset)
        offset += _STREAM_HEADER.size
        lanes.append(Lane(mode, codec, (frame[offset : offset + payload_bytes],)))
        offset += payload_bytes
    return lanes


def try_rle(lanes: list[Lane], data: Bytes, options: LaneOptions) -> list[Lane]:
    """The lanes, those as RLE that are smaller so: no zstd frame says runs of some length in two bytes each."""
    return [_try_rle_lane(lane, lane_index, data, options) for lane_index, lane in enumerate(lanes)]


def _try_rle_lane(lane: Lane, lane_index: int, data: Bytes, options: LaneOptions) -> Lane:
    nbytes = lane.nbytes
    if not options.allowed_codecs & RLE_BIT or nbytes * RLE_TRIAL_MIN_RATIO > data.size // options.itemsize:
        return lane
    candidate = _encoder.encode_candidate(
        data, options.itemsize, lane_index, _RAW_MODE, RLE_BIT, zstd.DEFAULT_LEVEL, True, nbytes
    )
    return lane if candidate is None else Lane(_RAW_MODE, _RLE_CODEC, (candidate[3][_STREAM_HEADER.size :],))


def make_writers(max_bytes: Sequence[Sequence[int]]) -> list[OrderedWriter]:
    """Tracks for the parts of lanes, of so many bytes at most, all in one room; none lies before where it stays."""
    starts, offset = [], 4
    for lane_max_bytes in max_bytes:
        *offsets, offset = accumulate(lane_max_bytes, initial=offset + _STREAM_HEADER.size)
        starts.append(offsets)
    buffer = OutputBuffer(offset)
    return [OrderedWriter(buffer, offsets) for offsets in starts]


def concat(fragments: Sequence[Fragment], threads: int = 1, owner: OutputBuffer | None = None) -> bytes:
    """The parts, one behind the other, without the GIL.

    `owner`: a room in which no part lies before where it stays; parts that lie there are moved, and it is gone.
    """
    *offsets, total_bytes = accumulate(map(count_fragment_bytes, fragments), initial=0)
    buffer = OutputBuffer(total_bytes) if owner is None else owner
    copies = []
    for offset, fragment in zip(offsets, fragments, strict=True):
        if isinstance(fragment, BufferSlice) and fragment.buffer is buffer:
            buffer.move(offset, fragment.offset, fragment.nbytes)
        else:
            copies.append((offset, fragment))

    def write_fragment(entry: tuple[int, Fragment]) -> None:
        offset, fragment = entry
        buffer.write(
            offset, fragment if isinstance(fragment, bytes) else fragment.buffer.view(fragment.offset, fragment.nbytes)
        )

    is_large = sum(count_fragment_bytes(fragment) for _, fragment in copies) >= MIN_PARALLEL_BYTES
    parallel_map(write_fragment, copies, threads if is_large else 1)
    return buffer.finish(total_bytes)


def _find_owner(fragments: Sequence[Fragment]) -> OutputBuffer | None:
    """The room of the first part that lies in one, if none in it lies before where it stays."""
    owner = next((fragment.buffer for fragment in fragments if isinstance(fragment, BufferSlice)), None)
    offsets = accumulate(map(count_fragment_bytes, fragments), initial=0)
    for offset, fragment in zip(offsets, fragments, strict=False):
        if isinstance(fragment, BufferSlice) and fragment.buffer is owner and fragment.offset < offset:
            return None
    return owner


def count_fragment_bytes(fragment: Fragment) -> int:
    """Bytes that a part takes in a frame."""
    return len(fragment) if isinstance(fragment, bytes) else fragment.nbytes


def pack_stream_header(num_elements: int, mode: int, payload_bytes: int, codec: int = _ZSTD_CODEC) -> bytes:
    """The header of a stream of `num_elements` bytes that became `payload_bytes`.

    Raises
    ------
    LimitError
        For more than a header can say.
    """
    if payload_bytes > _U32_MAX:
        raise LimitError("a payload above 2^32 - 1 bytes, which is what a stream header can say: encode pieces")
    return _STREAM_HEADER.pack(mode, codec, num_elements, payload_bytes)


FAST_SEGMENT_BYTES = 4 << 20
"""Raw bytes of a piece: repeats are seen inside of one, and pieces are made on different threads."""
NEGLIGIBLE_LANE_DIVISOR = 32
"""A lane of so small a share of all bytes need not become smaller."""

_RAW_MODE_BIT = 1
_MODE_BITS = (1, 2, 4)


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
