"""Encode frames of effort "fast": zstd payloads by kvmnn's own writer, limited to what pays for K and V
(docs/format.md).

A lane without redundancy becomes raw blocks. In others, matches with earlier rows at the same columns are copied, and
the rest gets Huffman codes. Where samples show that bytes depend on their predecessors, which those of K and V do not,
predictors and libzstd are tried as well. `_fast_lane` encodes one lane.
"""

from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy

from cpython.bytes cimport PyBytes_AsString
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF

from kvmnn.frames._fast_lane cimport (
    MAX_TRIAL_BYTES, TRY_UNDECIDED, LaneEncoding, LaneResult, LaneStats, Scratch, SegmentInput, allocate_scratch,
    encode_lane, gather_lanes, max_payload_size, raw_frame_size, sample_lanes, select_encoding, try_alternatives,
    write_raw_frame,
)
from kvmnn.frames._output_buffer cimport OrderedWriter
from kvmnn.frames._stream_header cimport CODEC_ZSTD, NUM_MODES, STREAM_HEADER_BYTES, store_le32
from kvmnn.frames._streams cimport KVMNN_MODE_RAW, MIN_BYPASS_BYTES, lane_kernels
from kvmnn.frames._workspace cimport Workspace, acquire, allocate_bytes, release, shrink_bytes

from ..errors import KvmnnError

cdef enum:
    NEGLIGIBLE_LANE_DIVISOR = 32  # so small a share of all lanes need not become smaller
    MIN_IN_PLACE_BYTES = 1 << 20  # bytes of an array whose payloads are made where they stay: room costs less than to
                                  # copy them


cdef size_t stream_capacity(size_t num_elements) noexcept nogil:
    return STREAM_HEADER_BYTES + max_payload_size(num_elements)


cdef LaneEncoding make_plain_encoding(LaneStats stats) noexcept nogil:
    """Return the encoding without a predictor; libzstd is fast where all bytes are equal (converted words)."""
    return LaneEncoding(KVMNN_MODE_RAW, stats.is_constant, 0, 1, 0)


cdef bint encode_in_place(
    Workspace ws, SegmentInput *segment, const LaneStats *lane_stats, Scratch scratch, uint8_t *spare_slot,
    uint8_t *streams, LaneResult *lane_results
) noexcept nogil:
    """Encode the lanes of a segment without predictors at their final places; False if memory is exhausted."""
    cdef uint8_t *slots[2]
    cdef LaneEncoding encoding
    cdef int lane
    for lane in range(segment.itemsize):
        encoding = make_plain_encoding(lane_stats[lane])
        slots[0], slots[1] = streams + STREAM_HEADER_BYTES, spare_slot
        if not encode_lane(
                ws, segment, lane, &encoding, lane_stats[lane].entropy_bits, scratch, slots, &lane_results[lane]):
            return False
        if lane_results[lane].payload == spare_slot:
            memcpy(streams + STREAM_HEADER_BYTES, spare_slot, lane_results[lane].payload_size)
            lane_results[lane].payload = streams + STREAM_HEADER_BYTES
        streams += STREAM_HEADER_BYTES + lane_results[lane].payload_size
    return True


cdef bint encode_lanes(
    Workspace ws, const uint8_t *src, size_t num_elements, int itemsize, bint has_previous, const int *modes,
    uint8_t *streams, LaneResult *lane_results
) noexcept nogil:
    """Encode the lanes of a segment, each with a predictor of its bit set in `modes`; skip lanes with an empty set.

    `has_previous`: predictors continue from the word before the segment. `streams`: final places of the lanes,
    consecutive, with stream_capacity(num_elements) bytes each, or NULL; lanes with raw blocks or predictors are not
    moved there. Return False if memory is exhausted.
    """
    cdef size_t capacity = max_payload_size(num_elements), total = 0
    cdef uint8_t *out
    cdef uint8_t *slots[5]
    cdef Scratch scratch
    cdef LaneStats[4] lane_stats
    cdef LaneEncoding[4] encodings
    cdef SegmentInput segment = SegmentInput(
        src, num_elements, itemsize, has_previous, sample_lanes(src, num_elements, itemsize, lane_stats), False,
        TRY_UNDECIDED)
    cdef int lane
    cdef bint is_plain = not segment.is_predictable
    for lane in range(itemsize):
        is_plain = is_plain and modes[lane] & 1 << KVMNN_MODE_RAW
    segment.is_gathered = is_plain
    if not is_plain:
        streams = NULL
    out = ws.get_buffer(1, <size_t>(itemsize + 1 if streams == NULL else 1) * capacity)
    if out == NULL or not allocate_scratch(ws, num_elements, itemsize if segment.is_gathered else 1, &scratch):
        return False
    if segment.is_gathered:
        gather_lanes(&segment, scratch.lane)
    if streams != NULL:
        return encode_in_place(ws, &segment, lane_stats, scratch, out, streams, lane_results)
    for lane in range(itemsize + 1):
        slots[lane] = out + <size_t>lane * capacity
    for lane in range(itemsize):
        encodings[lane] = make_plain_encoding(lane_stats[lane])
        if not modes[lane]:
            lane_results[lane] = LaneResult(KVMNN_MODE_RAW, slots[lane], 0, NULL)
            continue
        if segment.is_predictable or not modes[lane] & 1 << KVMNN_MODE_RAW:
            encodings[lane] = select_encoding(ws, &segment, lane, modes[lane], lane_stats[lane], scratch, slots + lane)
            if encodings[lane].mode < 0:
                return False
        if not encode_lane(
                ws, &segment, lane, &encodings[lane], lane_stats[lane].entropy_bits, scratch, slots + lane,
                &lane_results[lane]):
            return False
        total += lane_results[lane].payload_size
    if segment.is_predictable:
        for lane in range(itemsize):
            if encodings[lane].use_libzstd and lane_results[lane].payload_size * NEGLIGIBLE_LANE_DIVISOR > total:
                try_alternatives(
                    ws, &segment, lane, modes[lane], &encodings[lane], scratch, &lane_results[lane], slots + itemsize)
    return True


cdef size_t measure_frame(Workspace ws, const uint8_t *src, size_t num_elements, int itemsize) noexcept nogil:
    """Return the size of the frame of one segment with all predictors, without RLE; 0 if memory is exhausted."""
    cdef LaneResult[4] lane_results
    cdef int[4] modes
    cdef size_t size = 4
    cdef int lane
    for lane in range(itemsize):
        modes[lane] = (1 << NUM_MODES) - 1
    if not encode_lanes(ws, src, num_elements, itemsize, False, modes, NULL, lane_results):
        return 0
    for lane in range(itemsize):
        size += STREAM_HEADER_BYTES + lane_results[lane].payload_size
    return size


cdef Workspace encode_lanes_in_workspace(
    const uint8_t *src, size_t num_elements, int itemsize, bint has_previous, modes, uint8_t *streams,
    LaneResult *lane_results
):
    """Run `encode_lanes` in a workspace that the caller releases after copying the lanes."""
    cdef Workspace ws = acquire(True, False)
    cdef int[4] mode_sets
    cdef bint is_ok
    for lane in range(itemsize):
        mode_sets[lane] = modes[lane]
    with nogil:
        is_ok = encode_lanes(ws, src, num_elements, itemsize, has_previous, mode_sets, streams, lane_results)
    if not is_ok:
        release(ws)
        raise MemoryError("no memory for the streams of a frame")
    return ws


cdef void write_lane(
    const LaneResult *lane_result, const uint8_t *src, size_t num_elements, int itemsize, int lane, bint bypass_cache,
    uint8_t *dst
) noexcept nogil:
    """Write a payload that is elsewhere, or is raw blocks, to its place; large ones bypass the caches."""
    if lane_result.payload == NULL and lane_result.raw_lane != NULL:
        write_raw_frame(lane_result.raw_lane, num_elements, 1, 0, bypass_cache, dst)
    elif lane_result.payload == NULL:
        write_raw_frame(src, num_elements, itemsize, lane, bypass_cache, dst)
    elif bypass_cache:
        lane_kernels().copy_nontemporal(dst, lane_result.payload, lane_result.payload_size)
    else:
        memcpy(dst, lane_result.payload, lane_result.payload_size)


cdef void write_frame(
    const LaneResult *lane_results, const uint8_t *src, size_t num_elements, int itemsize, uint8_t *dst
) noexcept nogil:
    """Write headers, and payloads that are not in their places yet."""
    cdef int lane
    store_le32(dst, <uint32_t>num_elements)
    dst += 4
    for lane in range(itemsize):
        dst[0], dst[1] = lane_results[lane].mode, CODEC_ZSTD
        store_le32(dst + 2, <uint32_t>num_elements)
        store_le32(dst + 6, <uint32_t>lane_results[lane].payload_size)
        dst += STREAM_HEADER_BYTES
        if lane_results[lane].payload != dst:
            write_lane(&lane_results[lane], src, num_elements, itemsize, lane, False, dst)
        dst += lane_results[lane].payload_size


# -- for Python -------------------------------------------------------------------------------------------------------

def encode(const uint8_t[::1] data not None, int itemsize, modes) -> bytes:
    """Encode one segment of at least one whole word as a frame.

    `modes`: for each lane a bit set of predictors (1 raw, 2 delta_seq, 4 xor_seq) that contains raw.
    """
    cdef size_t num_elements = data.shape[0] // itemsize, frame_size = 4
    cdef size_t capacity = 4 + <size_t>itemsize * stream_capacity(num_elements)
    cdef LaneResult[4] lane_results
    cdef uint8_t *streams = NULL
    cdef uint8_t *out
    cdef int lane
    cdef PyObject *frame = NULL
    cdef Workspace ws
    if num_elements * <size_t>itemsize >= MIN_IN_PLACE_BYTES:
        frame = allocate_bytes(capacity)
        streams = <uint8_t *>PyBytes_AsString(<object>frame) + 4
    try:
        ws = encode_lanes_in_workspace(&data[0], num_elements, itemsize, False, modes, streams, lane_results)
        try:
            for lane in range(itemsize):
                frame_size += STREAM_HEADER_BYTES + lane_results[lane].payload_size
            if frame == NULL:
                frame = allocate_bytes(frame_size)
            out = <uint8_t *>PyBytes_AsString(<object>frame)
            with nogil:  # new pages cost as much as the copy
                write_frame(lane_results, &data[0], num_elements, itemsize, out)
        finally:
            release(ws)
        return shrink_bytes(&frame, frame_size)
    finally:
        Py_XDECREF(frame)


def select_modes(const uint8_t[::1] data not None, int itemsize, modes) -> tuple:
    """Select for each lane a bit set with the one predictor of all its segments, and one with possible alternatives.

    `modes` as for `encode`.
    """
    cdef size_t num_elements = data.shape[0] // itemsize, max_elements = min(num_elements, <size_t>MAX_TRIAL_BYTES)
    cdef LaneStats[4] lane_stats
    cdef SegmentInput segment = SegmentInput(&data[0], num_elements, itemsize, False, True, False, TRY_UNDECIDED)
    cdef int lane, lane_modes
    cdef LaneEncoding encoding
    cdef Scratch scratch
    cdef uint8_t *slots[2]
    cdef list selected_modes = [], alternatives = []
    cdef Workspace ws = acquire(True, False)
    try:
        if not sample_lanes(&data[0], num_elements, itemsize, lane_stats):
            return [1 << KVMNN_MODE_RAW] * itemsize, [0] * itemsize
        slots[0] = ws.get_buffer(1, 2 * max_payload_size(max_elements))
        if slots[0] == NULL or not allocate_scratch(ws, max_elements, 1, &scratch):
            raise MemoryError("no memory to try predictors")
        slots[1] = slots[0] + max_payload_size(max_elements)
        for lane in range(itemsize):
            lane_modes = modes[lane]
            with nogil:
                encoding = select_encoding(ws, &segment, lane, lane_modes, lane_stats[lane], scratch, slots)
            if encoding.mode < 0:
                raise MemoryError("no memory to try predictors")
            selected_modes.append(1 << encoding.mode)
            alternatives.append(encoding.alternatives)
        return selected_modes, alternatives
    finally:
        release(ws)


def write_payloads(
    list writers not None, Py_ssize_t segment, tuple capacities not None, const uint8_t[::1] data not None,
    int itemsize, size_t begin, size_t end, modes
) -> None:
    """Write a zstd payload for each lane of the words from `begin` to `end` to a segment of the lane's writer.

    Each bit set has one predictor; lanes with an empty set are skipped. The segments have `capacities` bytes:
    `raw_payload_bytes` without a predictor, `max_payload_bytes` with one.
    """
    cdef LaneResult[4] lane_results
    cdef uint8_t *dst
    cdef size_t lane_capacity[4]
    cdef size_t num_elements = end - begin
    cdef int lane
    cdef bint bypass_cache = data.shape[0] >= MIN_BYPASS_BYTES
    cdef const uint8_t *src
    cdef OrderedWriter writer
    cdef Workspace ws
    if not begin < end <= <size_t>data.shape[0] // itemsize or len(writers) != itemsize or len(capacities) != itemsize:
        raise KvmnnError(
            f"words {begin} to {end} of {data.shape[0] // itemsize} on {len(writers)} of {itemsize} tracks: not there"
        )
    src = &data[begin * itemsize]
    for lane in range(itemsize):
        lane_capacity[lane] = capacities[lane]
        if modes[lane] and lane_capacity[lane] < (
            raw_frame_size(num_elements) if modes[lane] == 1 << KVMNN_MODE_RAW else max_payload_size(num_elements)
        ):
            raise KvmnnError(f"{lane_capacity[lane]} bytes for a payload of {num_elements} words: too few")
    ws = encode_lanes_in_workspace(src, num_elements, itemsize, begin > 0, modes, NULL, lane_results)
    try:
        for lane in range(itemsize):
            writer = writers[lane]
            dst = writer.buffer.pointer_at(writer.acquire_offset(segment), lane_capacity[lane])
            with nogil:
                if lane_results[lane].payload_size > lane_capacity[lane]:
                    lane_results[lane].payload_size, lane_results[lane].payload = raw_frame_size(num_elements), NULL
                if lane_results[lane].payload_size:
                    write_lane(&lane_results[lane], src, num_elements, itemsize, lane, bypass_cache, dst)
            writer.commit(segment, lane_results[lane].payload_size)
    finally:
        release(ws)


def max_payload_bytes(size_t num_elements) -> int:
    """Return the maximum size of a payload of a lane."""
    return max_payload_size(num_elements)


def raw_payload_bytes(size_t num_elements) -> int:
    """Return the size of a payload of raw blocks: the maximum without a predictor."""
    return raw_frame_size(num_elements)
