"""Encode frames of MNN's lossless codec: candidates for every lane, of which the smallest is chosen.

Word sizes are called `itemsize`: 2 for the FP16 container (lanes lo, hi), 4 for the FP32 container (lanes 0 to 3).
"""

# A candidate is one stream of a lane. Candidates are compressed one by one into a buffer of the worker, and their RLE
# size is counted without writing it; only winners are copied. Making them is all that "exact" adds to its zstd calls,
# and memory bounds it. Up to 256 KiB of a lane all its streams are made in one pass, which counts repeats while they
# are in the cache. Above, lanes are split and counted in one pass over the words (up to 48 MiB, which a worker would
# have to keep), and each stream is made from its lane right before it is compressed.
#
# A candidate that becomes too long is aborted: libzstd gets as much room as the best so far takes, and a KiB more. In
# all that was tried, from 1.3.8 to 1.5.7, it needs at most 16 bytes more than it fills, and never writes other bytes
# because room is short. With a block of 128 KiB to spare most losers were compressed to their end, 2 to 5 % of an exact
# frame of 16 MiB.

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from cpython.bytes cimport PyBytes_AsString
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF

from kvmnn.frames._fast_lane cimport raw_frame_size, write_raw_frame
from kvmnn.frames._lane_streams cimport make_all_streams, make_stream, make_stream_with_rle_bound, stream_spacing
from kvmnn.frames._output_buffer cimport OrderedWriter
from kvmnn.frames._stream_header cimport (
    ALLOW_RLE, ALLOW_ZSTD, CODEC_RLE, CODEC_ZSTD, NUM_MODES, STREAM_HEADER_BYTES, store_le32,
)
from kvmnn.frames._streams cimport (
    KVMNN_MODE_DELTA, KVMNN_MODE_RAW, compute_entropy, lane_kernels, rle_bound, rle_encode, rle_min_size, rle_size,
)
from kvmnn.frames._workspace cimport Workspace, acquire, allocate_bytes, release, shrink_bytes
from kvmnn.frames._zstdlib cimport is_dst_too_small, zstd

from ..errors import KvmnnError, LimitError


cdef enum:
    ALL_MODES = 7
    MAX_FUSED_LANE_BYTES = 256 << 10  # bytes of a lane whose three streams are made in one pass, ...
    MAX_SPLIT_BYTES = 48 << 20        # ... and of all lanes and a stream, which are parted in one pass; each stream is
                                      # then made where it is compressed, while the cache has it
    STOP_SLACK_BYTES = 1 << 10        # bytes that a payload may be too long before libzstd stops: it gives up a few
                                      # bytes before the end, and what it tries first (tables, literals) may be longer
                                      # than what it then writes
    SAMPLE_TILE_BYTES = 1024          # effort "balanced": bytes of one sample of a stream ...
    NUM_SAMPLE_TILES = 16             # ... and how many samples it takes

cdef double MAX_ENTROPY_RATIO = 0.996  # effort "balanced": samples of noise differ by less

cdef size_t NOT_SMALLER = 0
cdef size_t NO_MEMORY = <size_t>-1
cdef size_t U32_MAX = <size_t>0xffffffffULL
cdef size_t PAYLOAD_TOO_LONG = <size_t>-2


cdef struct Candidate:
    int mode
    int codec
    size_t size


cdef inline void store_header(uint8_t *p, Candidate best_candidate, size_t raw_len) noexcept nogil:
    p[0] = best_candidate.mode
    p[1] = best_candidate.codec
    store_le32(p + 2, <uint32_t>raw_len)
    store_le32(p + 6, <uint32_t>best_candidate.size)


# -- encoding one stream --------------------------------------------------------------------------------------------

cdef size_t payload_bound(size_t n) noexcept nogil:
    cdef size_t a = rle_bound(n), b = zstd.bound(n)
    return a if a > b else b


cdef size_t encode_payload(
    Workspace ws, const uint8_t *stream, size_t num_elements, int mode, int allowed_codecs, int level,
    bint has_content_size, size_t limit, size_t min_rle_size, uint8_t *dst, Candidate *result
) noexcept nogil:
    """Encode the payload of one stream: the smaller of RLE (at least `min_rle_size` bytes) and zstd, RLE on a tie.

    Return its size with the payload in dst (payload_bound(num_elements) bytes), NOT_SMALLER unless it is below `limit`,
    or NO_MEMORY.
    """
    cdef size_t size, best = limit, capacity = payload_bound(num_elements)
    cdef bint is_found = False
    if allowed_codecs & ALLOW_ZSTD:
        if zstd.stops_at_capacity and limit < capacity - min(capacity, <size_t>STOP_SLACK_BYTES):
            capacity = limit + STOP_SLACK_BYTES
        if has_content_size:
            size = zstd.compress(ws.cctx, dst, capacity, stream, num_elements, level)
        else:
            size = zstd.compress_without_size(ws.cctx, dst, capacity, stream, num_elements, level)
        if is_dst_too_small(size) and capacity < payload_bound(num_elements):
            size = 0
        elif zstd.is_error(size):
            return NO_MEMORY  # the one failure left to a one-shot call with a full-sized destination
        if 0 < size < best:
            result.mode, result.codec, result.size = mode, CODEC_ZSTD, size
            best = size
            is_found = True
    if allowed_codecs & ALLOW_RLE and min_rle_size <= best:
        # At equal size RLE wins over the zstd payload just made, but not over an earlier candidate.
        size = rle_size(stream, num_elements, best)
        if size < best or (is_found and size == best):
            rle_encode(stream, num_elements, dst)
            result.mode, result.codec, result.size = mode, CODEC_RLE, size
            is_found = True
    return result.size if is_found else NOT_SMALLER


cdef int select_mode(const uint8_t *src, size_t num_elements, int itemsize, int lane, int modes) noexcept nogil:
    """Return the allowed predictor with the lowest order-0 entropy of a sample, ignoring gains that may be chance."""
    cdef uint64_t counts[256]
    cdef uint8_t tile[SAMPLE_TILE_BYTES]
    cdef size_t start, step, n
    cdef int mode, best_mode = KVMNN_MODE_RAW
    cdef double bits, best = 9.0
    step = num_elements // NUM_SAMPLE_TILES
    if step < SAMPLE_TILE_BYTES:
        step = SAMPLE_TILE_BYTES
    for mode in range(NUM_MODES):
        if not modes >> mode & 1:
            continue
        if modes == 1 << mode:
            return mode
        memset(counts, 0, sizeof(counts))
        start = 0
        while start < num_elements:
            n = num_elements - start if num_elements - start < SAMPLE_TILE_BYTES else SAMPLE_TILE_BYTES
            lane_kernels().predict_lane(src + start * <size_t>itemsize, n, itemsize, lane, mode, tile)
            lane_kernels().histogram(tile + 1, n - 1, counts)  # the first byte lacks its true neighbour
            start += step
        bits = compute_entropy(counts)
        if bits < best * MAX_ENTROPY_RATIO:
            best = bits
            best_mode = mode
    return best_mode


cdef size_t extract_lane(const uint8_t *src, size_t num_elements, int itemsize, int lane, uint8_t *dst) noexcept nogil:
    """Extract an unpredicted lane to `dst`, if words have several, and return a lower bound of its RLE length."""
    cdef uint8_t *lane_ptrs[4]
    cdef size_t[4] repeats
    if itemsize == 1:
        return rle_min_size(num_elements, lane_kernels().repeats(src, num_elements))
    memset(lane_ptrs, 0, sizeof(lane_ptrs))
    lane_ptrs[lane] = dst
    lane_kernels().split(src, num_elements, itemsize, lane_ptrs, repeats)
    return rle_min_size(num_elements, repeats[lane])


cdef void extract_all_lanes(
    const uint8_t *src, size_t num_elements, int itemsize, uint8_t *dst, size_t *min_rle_sizes
) noexcept nogil:
    """Extract all lanes without a predictor, `stream_spacing` apart, and a lower bound of the RLE length of each."""
    cdef uint8_t *lane_ptrs[4]
    cdef size_t[4] repeats
    cdef int lane
    for lane in range(itemsize):
        lane_ptrs[lane] = dst + <size_t>lane * stream_spacing(num_elements)
    lane_kernels().split(src, num_elements, itemsize, lane_ptrs, repeats)
    for lane in range(itemsize):
        min_rle_sizes[lane] = rle_min_size(num_elements, repeats[lane])


cdef size_t encode_lane(
    Workspace ws, const uint8_t *src, size_t num_elements, int itemsize, int lane, int modes, int allowed_codecs,
    int level, const uint8_t *streams, const size_t *min_rle_sizes, const uint8_t *raw, uint8_t *scratch, uint8_t *dst,
    uint8_t *slot, Candidate *best_candidate
) noexcept nogil:
    """Encode the smallest payload of one lane to dst; return its size, NO_MEMORY or PAYLOAD_TOO_LONG.

    `streams`: of all predictors, with bounds of their RLE lengths, from `make_all_streams`. If NULL, they are computed
    one by one in `scratch`, from the lane in `raw` with its known bound, or if that is NULL from `src`. dst and the
    slot have payload_bound(num_elements) bytes each. The first candidate is written to its final place, as it mostly is
    the smallest.
    """
    cdef const uint8_t *stream
    cdef size_t size, min_rle = 0, min_raw_rle, limit = <size_t>-3
    cdef int mode
    cdef bint has_several = modes & (modes - 1) != 0, is_first = True
    if streams == NULL and has_several and raw == NULL:
        scratch = ws.get_buffer(0, 2 * stream_spacing(num_elements))
        if scratch == NULL:
            return NO_MEMORY
        raw = src if itemsize == 1 else scratch + stream_spacing(num_elements)
        min_raw_rle = extract_lane(src, num_elements, itemsize, lane, scratch + stream_spacing(num_elements))
        min_rle_sizes = &min_raw_rle
    for mode in range(NUM_MODES):
        if not modes >> mode & 1:
            continue
        if streams != NULL:
            stream, min_rle = streams + <size_t>mode * stream_spacing(num_elements), min_rle_sizes[mode]
        elif raw == NULL:
            stream = make_stream(ws, src, num_elements, itemsize, lane, mode)
            if stream == NULL:
                return NO_MEMORY
        elif mode == KVMNN_MODE_RAW:
            stream, min_rle = raw, min_rle_sizes[mode]
        else:
            stream = scratch
            min_rle = rle_min_size(
                num_elements, lane_kernels().predict_counting_repeats(raw, num_elements, mode, scratch))
        size = encode_payload(
            ws, stream, num_elements, mode, allowed_codecs, level, True, limit, min_rle, dst if is_first else slot,
            best_candidate
        )
        if size == NO_MEMORY:
            return NO_MEMORY
        if size != NOT_SMALLER:
            if not is_first:
                memcpy(dst, slot, size)
            limit = size
        is_first = False
    return best_candidate.size if best_candidate.size <= U32_MAX else PAYLOAD_TOO_LONG


cdef bint can_fuse_streams(size_t num_elements, int itemsize, int *modes) noexcept nogil:
    """Return whether all streams of a lane are computed in one pass."""
    cdef int lane
    if itemsize == 1 or num_elements > MAX_FUSED_LANE_BYTES:
        return False
    for lane in range(itemsize):
        if modes[lane] != ALL_MODES:
            return False
    return True


cdef bint should_split_lanes(size_t num_elements, int itemsize, int *modes) noexcept nogil:
    """Return whether all lanes are split in one pass over the words: not if each lane has only one stream."""
    cdef int lane
    if itemsize == 1 or <size_t>(itemsize + 1) * stream_spacing(num_elements) > MAX_SPLIT_BYTES:
        return False
    for lane in range(itemsize):
        if modes[lane] & (modes[lane] - 1):
            return True
    return False


# -- encoding for Python ----------------------------------------------------------------------------------------------

cdef bytes encode_lanes(
    const uint8_t *src, size_t num_elements, int itemsize, int *modes, int allowed_codecs, int level, size_t begin
):
    """Return bytes with `begin` bytes for the caller to fill, then header and smallest payload of every lane.

    Payloads are written to their final place, in an object that is shrunk once all lengths are known.
    """
    cdef size_t max_payload = payload_bound(num_elements), size = NO_MEMORY, pos = begin
    cdef Candidate best_candidate
    cdef uint8_t *out
    cdef uint8_t *slot
    cdef uint8_t *streams = NULL
    cdef uint8_t *raw_lanes = NULL
    cdef uint8_t *raw = NULL
    cdef uint8_t *stream_scratch = NULL
    cdef size_t[NUM_MODES] min_rle
    cdef size_t[4] min_raw_rles
    cdef int lane
    cdef bint is_fused = can_fuse_streams(num_elements, itemsize, modes)
    cdef bint is_split = not is_fused and should_split_lanes(num_elements, itemsize, modes)
    cdef PyObject *frame = NULL
    cdef Workspace ws = acquire(allowed_codecs & ALLOW_ZSTD != 0, False)
    try:
        frame = allocate_bytes(begin + <size_t>itemsize * (STREAM_HEADER_BYTES + max_payload))
        out = <uint8_t *>PyBytes_AsString(<object>frame)
        with nogil:
            slot = ws.get_buffer(1, max_payload)
            if is_fused:
                streams = ws.get_buffer(0, NUM_MODES * stream_spacing(num_elements))
            elif is_split:
                raw_lanes = ws.get_buffer(0, <size_t>(itemsize + 1) * stream_spacing(num_elements))
                if raw_lanes != NULL:
                    stream_scratch = raw_lanes + <size_t>itemsize * stream_spacing(num_elements)
                    extract_all_lanes(src, num_elements, itemsize, raw_lanes, min_raw_rles)
            if slot != NULL and (streams != NULL or not is_fused) and (raw_lanes != NULL or not is_split):
                for lane in range(itemsize):
                    if is_fused:
                        make_all_streams(src, num_elements, itemsize, lane, streams, min_rle)
                    if is_split:
                        raw = raw_lanes + <size_t>lane * stream_spacing(num_elements)
                        min_rle[KVMNN_MODE_RAW] = min_raw_rles[lane]
                    best_candidate = Candidate(0, 0, 0)
                    size = encode_lane(
                        ws, src, num_elements, itemsize, lane, modes[lane], allowed_codecs, level, streams, min_rle,
                        raw, stream_scratch, out + pos + STREAM_HEADER_BYTES, slot, &best_candidate,
                    )
                    if size >= PAYLOAD_TOO_LONG:
                        break
                    store_header(out + pos, best_candidate, num_elements)
                    pos += STREAM_HEADER_BYTES + size
        if size >= PAYLOAD_TOO_LONG:
            raise make_encode_error(size)
        return shrink_bytes(&frame, pos)
    finally:
        Py_XDECREF(frame)
        release(ws)


cdef object make_encode_error(size_t code):
    if code == NO_MEMORY:
        return MemoryError("no memory for the streams of a frame")
    return LimitError("a payload above 2^32 - 1 bytes, which is what a stream header can say: encode pieces")


def encode(const uint8_t[::1] data not None, int itemsize, modes, int allowed_codecs, int level) -> bytes:
    """Encode `data` as a frame on the calling thread.

    `modes`: for each lane a bit set of predictors (1 raw, 2 delta_seq, 4 xor_seq). `allowed_codecs`: 1 RLE, 2 zstd, 3
    both.
    """
    cdef size_t num_elements = check_element_count(data.shape[0], itemsize)
    cdef int lane
    cdef int[4] lane_modes
    for lane in range(itemsize):
        lane_modes[lane] = modes[lane]
    cdef bytes frame = encode_lanes(&data[0], num_elements, itemsize, lane_modes, allowed_codecs, level, 4)
    store_le32(<uint8_t *>PyBytes_AsString(frame), <uint32_t>num_elements)
    return frame


def encode_stream(const uint8_t[::1] data not None, int modes, int allowed_codecs, int level=3) -> bytes:
    """Encode bytes as one stream with its header, outside any frame; an empty one is ten zero bytes."""
    if data.shape[0] == 0:
        return bytes(STREAM_HEADER_BYTES)
    return encode_lanes(&data[0], data.shape[0], 1, &modes, allowed_codecs, level, 0)


def encode_candidate(
    const uint8_t[::1] data not None, int itemsize, int lane, int mode, int allowed_codecs, int level,
    bint has_content_size, size_t limit
):
    """Encode one lane with one predictor: `(payload size, mode, codec, header + payload)`, or None."""
    cdef size_t num_elements = check_element_count(data.shape[0], itemsize), size = NO_MEMORY, min_rle = 0
    cdef Candidate best_candidate = Candidate(0, 0, 0)
    cdef const uint8_t *stream
    cdef uint8_t *out
    cdef PyObject *buffer = NULL
    cdef Workspace ws = acquire(allowed_codecs & ALLOW_ZSTD != 0, False)
    try:
        buffer = allocate_bytes(STREAM_HEADER_BYTES + payload_bound(num_elements))
        out = <uint8_t *>PyBytes_AsString(<object>buffer)
        with nogil:
            stream = make_stream_with_rle_bound(ws, &data[0], num_elements, itemsize, lane, mode, &min_rle)
            if stream != NULL:
                size = encode_payload(
                    ws, stream, num_elements, mode, allowed_codecs, level, has_content_size, limit, min_rle, out
                    + STREAM_HEADER_BYTES, &best_candidate)
            if size != NO_MEMORY and best_candidate.size > U32_MAX:
                size = PAYLOAD_TOO_LONG
            if size < PAYLOAD_TOO_LONG:
                store_header(out, best_candidate, num_elements)
        if size >= PAYLOAD_TOO_LONG:
            raise make_encode_error(size)
        if size == NOT_SMALLER:
            return None
        return (
            best_candidate.size, best_candidate.mode, best_candidate.codec,
            shrink_bytes(&buffer, STREAM_HEADER_BYTES + best_candidate.size),
        )
    finally:
        Py_XDECREF(buffer)
        release(ws)


def max_zstd_bytes(size_t n) -> int:
    """Return the maximum size of a zstd frame of n bytes."""
    return zstd.bound(n)


def write_payload(
    OrderedWriter writer not None, Py_ssize_t segment, size_t capacity, const uint8_t[::1] data not None, int itemsize,
    size_t begin, size_t end, int lane, int mode, int level
) -> int:
    """Write the words from `begin` to `end` of one lane as a zstd frame to a segment of the writer; return its length.

    One predictor applies to the whole lane. The segment has `capacity` bytes. Without a predictor, raw blocks replace
    what libzstd would make longer.
    """
    cdef size_t num_elements = check_element_count(data.shape[0], itemsize), size = NO_MEMORY
    cdef uint8_t *stream
    cdef uint8_t *out
    cdef uint8_t previous_byte
    if not begin < end <= num_elements or not 0 <= lane < itemsize or not 0 <= mode < NUM_MODES:
        raise KvmnnError(f"words {begin} to {end} of {num_elements}, lane {lane} of {itemsize}, mode {mode}: not there")
    if capacity < (raw_frame_size(end - begin) if mode == KVMNN_MODE_RAW else zstd.bound(end - begin)):
        raise KvmnnError(f"{capacity} bytes for a payload of {end - begin} words: too few")
    out = writer.buffer.pointer_at(writer.acquire_offset(segment), capacity)
    cdef Workspace ws = acquire(True, False)
    try:
        with nogil:
            stream = <uint8_t *>make_stream(ws, &data[begin * itemsize], end - begin, itemsize, lane, mode)
            if stream != NULL:
                if begin and mode != KVMNN_MODE_RAW:
                    previous_byte = data[(begin - 1) * itemsize + lane]
                    stream[0] = stream[0] - previous_byte if mode == KVMNN_MODE_DELTA else stream[0] ^ previous_byte
                size = zstd.compress(ws.cctx, out, capacity, stream, end - begin, level)
                if is_dst_too_small(size) and mode == KVMNN_MODE_RAW:
                    write_raw_frame(stream, end - begin, 1, 0, False, out)
                    size = raw_frame_size(end - begin)
    finally:
        release(ws)
    if zstd.is_error(size):
        raise make_encode_error(NO_MEMORY)
    writer.commit(segment, size)
    return size


def select_modes(const uint8_t[::1] data not None, int itemsize, modes) -> list:
    """Return for each lane a bit set with the one predictor of effort "balanced"."""
    cdef size_t num_elements = check_element_count(data.shape[0], itemsize)
    cdef int lane, mode, lane_modes
    cdef list selected = []
    for lane in range(itemsize):
        lane_modes = modes[lane]
        with nogil:
            mode = select_mode(&data[0], num_elements, itemsize, lane, lane_modes)
        selected.append(1 << mode)
    return selected


cdef size_t check_element_count(size_t n, int itemsize) except? 0:
    if itemsize != 2 and itemsize != 4:
        raise KvmnnError(f"word size {itemsize}: expected 2 or 4")
    if n == 0:
        raise KvmnnError(f"nothing to encode: expected at least one {itemsize}-byte word, found 0 bytes")
    if n % <size_t>itemsize:
        raise KvmnnError(f"{n} bytes are not a whole number of {itemsize}-byte words")
    if n // <size_t>itemsize > U32_MAX:
        raise LimitError(f"{n // <size_t>itemsize} words: a frame counts words in 32 bits; encode pieces")
    return n // <size_t>itemsize
