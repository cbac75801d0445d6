"""Encode one lane of a frame of effort "fast": select its predictor and its zstd writer (docs/format.md)."""

# Effort "fast" has a zstd writer of its own (zstd_writer.c, huffman.c, fse.c, match_finder.c). libzstd looks for
# matches byte by byte, which is most of its time; what repeats in K and V are parts of rows, at the same places in
# them. So one place in eight is looked at, and from a hit on both rows are compared 64 bytes at a time: more short
# matches at the cost of one distance than libzstd finds at level 3. The writer knows raw blocks, four Huffman streams
# with new or old tables, and sequences under predefined, fitted or single-symbol tables.
#
# Frames consist of segments of 4 MiB (32 or 256 MiB of arrays full of repeats, which lose at each beginning), so that
# threads share an array and the bytes do not depend on their number. The last segments are halves and quarters: threads
# of unequal speed then end together, 2 to 6 % of the time that two take.
#
# Of many literals a quarter is counted, spread by a hash so that no row length fits it; counting all took as long as
# writing them. Codes that save less than one byte in 64 are not written, which is libzstd's rule too. An entry of the
# search table has eight bits of the hash next to the place, so that hardly any other row is compared in vain. Payloads
# are written in place from 1 MiB on; those of segments are moved with nontemporal stores from 8 MiB on, 2 to 9 % less
# time. A lane of one value, as words converted from shorter ones have, is libzstd's.

from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy

from kvmnn._simd cimport active_level
from kvmnn.frames._fast_lane cimport (
    MAX_TRIAL_BYTES, TRY_ALL, TRY_NONE, TRY_REPEATED, TRY_UNDECIDED, LaneEncoding, LaneResult, LaneStats, Scratch,
    SegmentInput,
)
from kvmnn.frames._stream_header cimport NUM_MODES
from kvmnn.frames._streams cimport KVMNN_MODE_DELTA, KVMNN_MODE_RAW, lane_kernels
from kvmnn.frames._workspace cimport Workspace
from kvmnn.frames._zstdlib cimport zstd


cdef extern from "kvmnn/frames/match_finder.h" nogil:
    size_t kvmnn_repeats_bound(size_t n)
    size_t kvmnn_repeats_table_size(size_t n)
    size_t kvmnn_repeats_find(
        int level, const uint8_t *lane, size_t n, int is_thorough, uint32_t *table, kvmnn_repeat *out)
    double kvmnn_repeats_estimate_missed(
        int level, const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count, uint32_t *table)

cdef extern from "kvmnn/frames/zstd_writer.h" nogil:
    enum:
        KVMNN_MAX_RAW_BLOCK_BYTES
    ctypedef struct kvmnn_sequence_tables:
        pass
    void kvmnn_sequence_tables_init(kvmnn_sequence_tables *tables)
    size_t kvmnn_zstd_bound(size_t n)
    size_t kvmnn_zstd_scratch_bytes()
    uint8_t *kvmnn_zstd_write_header(uint8_t *dst, size_t n)
    uint8_t *kvmnn_zstd_write_raw_block_header(uint8_t *dst, size_t size, int is_last)
    size_t kvmnn_zstd_write_frame(
        int level, const kvmnn_sequence_tables *tables, const uint8_t *src, size_t n, const kvmnn_repeat *repeats,
        size_t count, int literals_raw, uint8_t *scratch, uint8_t *dst)

cdef extern from "kvmnn/frames/sample_stats.h" nogil:
    enum:
        KVMNN_SAMPLE_WINDOW_BYTES
        KVMNN_NUM_SAMPLE_WINDOWS
        KVMNN_MAX_SAMPLE_BYTES
        KVMNN_PREDICTABLE
        KVMNN_SHORT_REPEATS
    void kvmnn_samples_init()
    size_t kvmnn_sample_drop_zeros(uint8_t *sample, size_t n)
    double kvmnn_sample_entropy(const uint8_t *sample, size_t n)
    size_t kvmnn_sample_max_count(const uint8_t *sample, size_t n)
    int kvmnn_sample_predictability(const uint8_t *sample, size_t n, size_t step, double bits)


cdef enum:
    MAX_ZSTD_HEADER_BYTES = 14  # of a frame, at most
    BLOCK_HEADER_BYTES = 3      # of a raw block
    DEFAULT_LEVEL = 3           # of libzstd, where bytes follow from those before them ...
    TRIAL_LEVEL = 1             # ... and to find the predictor
    SPARSE_WINDOW_STEP = 4      # windows, by which it is found out whether they do
    NUM_TRIAL_SLICES = 4        # places of a lane, from which what is tried is taken: ...
    TRIAL_DIVISOR = 8           # ... one byte in so many, within limits, to find the predictor, ...
    MIN_TRIAL_BYTES = 8 << 10
    MAX_FAST_TRIAL_BYTES = 128 << 10
    MIN_EXACT_TRIAL_BYTES = 64 << 10  # ... or more, up to MAX_TRIAL_BYTES, where it becomes ...
    EXACT_TRIAL_MIN_RATIO = 8         # ... so many times smaller and much depends on little, ...
    SPEED_TRIAL_DIVISOR = 4           # ... and more to find out whether libzstd pays, ...
    MIN_SPEED_TRIAL_BYTES = 16 << 10
    MAX_SPEED_TRIAL_BYTES = 256 << 10
    SCATTERED_MIN_REPEAT_DIVISOR = 8  # of a lane, one byte in so many is repeated ...
    SCATTERED_MAX_MEAN_LENGTH = 24    # ... by repeats shorter than that
    SHORT_REPEAT_BYTES = 48           # repeats that are shorter, are not worth a row
    LIBZSTD_TRIAL_MIN_RATIO = 16      # what becomes so many times smaller by repeats is left to libzstd, where it makes
                                      # fewer, ...
    SHORT_LANE_BYTES = 64 << 10       # ... in lanes of so many bytes ...
    SHORT_LANE_TRIAL_MIN_RATIO = 6    # ... what becomes so many times smaller ...
    VERY_SHORT_LANE_BYTES = 16 << 10  # ... and so on: samples of short lanes say little
    VERY_SHORT_LANE_TRIAL_MIN_RATIO = 3
    HIGH_RATIO = 4                      # bytes are few that were so many times more
    MIN_IMPROVABLE_BYTES = 64           # bytes of a payload that need not become fewer
    FLAT_LANE_MIN_REPEAT_DIVISOR = 128  # of a flat lane one byte in so many must be repeated, or it is not worth the
                                        # time

cdef double FLAT_MIN_BITS = 7.85  # a byte; random bytes come to 7.955 in a sample of that size
cdef double LOW_ENTROPY_MAX_BITS = 2.0
cdef double COSTLY_MIN_BITS = 4.0                 # where a byte takes more, shorter repeats pay
cdef double NOISE_MIN_BITS = 7.0                  # what stands between repeats can hardly be coded
cdef double LIBZSTD_MIN_GAIN = 1.02               # of its bytes, libzstd has to save more
cdef double TRIAL_MISS_RATIO = 1.05               # of the bytes that a trial has promised, what is more has a better
                                                  # predictor
cdef double RAW_ALTERNATIVE_MAX_RATIO = 1.4       # of its bytes, raw's alternative may need more in a trial and fewer in
                                                  # the end, ...
cdef double RAW_ALTERNATIVE_MAX_RATIO_HIGH = 2.5  # ... or so many, where they are few, ...
cdef double ALTERNATIVE_MAX_RATIO = 1.05          # ... and those of another predictor so many
cdef double MAX_MISSED_REPEAT_FRACTION = 0.015    # libzstd is tried if the search missed more than this fraction of the
                                                  # repeats
cdef double DOMINANT_BYTE_FRACTION = 0.7  # of bytes, if one byte is so many: no code is short enough for it

cdef size_t NO_MEMORY = <size_t>-1

cdef kvmnn_sequence_tables _tables
kvmnn_sequence_tables_init(&_tables)
kvmnn_samples_init()


cdef struct RepeatStats:
    size_t count           # of repeats
    size_t repeated_bytes  # bytes in them
    bint is_scattered      # many short ones between bytes that cost as much as they are long


cdef size_t max_payload_size(size_t num_elements) noexcept nogil:
    """Return the maximum size of a payload of a lane."""
    return kvmnn_zstd_bound(num_elements)


cdef size_t align64(size_t n) noexcept nogil:
    return (n + 63) & ~<size_t>63


cdef bint allocate_scratch(Workspace ws, size_t num_elements, int count, Scratch *scratch) noexcept nogil:
    """Allocate scratch memory for `count` lanes."""
    cdef size_t writer_bytes = align64(kvmnn_zstd_scratch_bytes()), lane_bytes = <size_t>count * align64(num_elements)
    cdef size_t table_bytes = align64(kvmnn_repeats_table_size(num_elements) * sizeof(uint32_t))
    cdef uint8_t *memory = ws.get_buffer(
        0, writer_bytes + lane_bytes + table_bytes + kvmnn_repeats_bound(num_elements) * sizeof(kvmnn_repeat))
    if memory == NULL:
        return False
    scratch.writer, scratch.lane = memory, memory + writer_bytes
    scratch.table = <uint32_t *>(memory + writer_bytes + lane_bytes)
    scratch.repeats = <kvmnn_repeat *>(memory + writer_bytes + lane_bytes + table_bytes)
    return True


# -- bytes of lanes as they are ---------------------------------------------------------------------------------------

cdef inline void copy_raw_lane(
    const uint8_t *src, size_t num_elements, int itemsize, int lane, uint8_t *dst
) noexcept nogil:
    if itemsize == 1:
        memcpy(dst, src, num_elements)
    else:
        lane_kernels().predict_lane(src, num_elements, itemsize, lane, KVMNN_MODE_RAW, dst)


cdef void gather_lanes(const SegmentInput *segment, uint8_t *dst) noexcept nogil:
    """Extract all lanes of a segment at a spacing of `align64` bytes."""
    cdef uint8_t *lane_ptrs[4]
    cdef int lane
    for lane in range(segment.itemsize):
        lane_ptrs[lane] = dst + <size_t>lane * align64(segment.num_elements)
    lane_kernels().split(segment.src, segment.num_elements, segment.itemsize, lane_ptrs, NULL)


# -- what samples say -------------------------------------------------------------------------------------------------

cdef size_t sample_lane(
    const uint8_t *src, size_t num_elements, int itemsize, int lane, uint8_t *sample
) noexcept nogil:
    """Sample at most KVMNN_MAX_SAMPLE_BYTES bytes of a lane, zeros left out; return their number."""
    cdef size_t begin = 0, num_bytes = 0, size, step = num_elements // KVMNN_NUM_SAMPLE_WINDOWS
    cdef size_t end = KVMNN_NUM_SAMPLE_WINDOWS * step
    if step <= KVMNN_SAMPLE_WINDOW_BYTES:
        step, end = KVMNN_SAMPLE_WINDOW_BYTES, num_elements
    while begin < end:
        size = min(<size_t>KVMNN_SAMPLE_WINDOW_BYTES, num_elements - begin)
        copy_raw_lane(src + begin * <size_t>itemsize, size, itemsize, lane, sample + num_bytes)
        num_bytes += size
        begin += step
    size = kvmnn_sample_drop_zeros(sample, num_bytes)
    if size < num_bytes:  # a branch: what follows need not wait for all bytes
        return size
    return num_bytes


cdef bint sample_lanes(const uint8_t *src, size_t num_elements, int itemsize, LaneStats *lane_stats) noexcept nogil:
    """Sample each lane; return True if bytes of any depend on their predecessors, or are few values but not one.

    If the high bytes of words do, the low ones may as well, in a way that no sample shows.
    """
    cdef uint8_t sample[KVMNN_MAX_SAMPLE_BYTES]
    cdef bint is_predictable = False
    cdef size_t n
    cdef int lane, follows
    for lane in range(itemsize):
        n = sample_lane(src, num_elements, itemsize, lane, sample)
        lane_stats[lane].entropy_bits = kvmnn_sample_entropy(sample, n)
        follows = kvmnn_sample_predictability(
            sample, n, SPARSE_WINDOW_STEP if SPARSE_WINDOW_STEP * KVMNN_SAMPLE_WINDOW_BYTES < n < num_elements else 1,
            lane_stats[lane].entropy_bits)
        lane_stats[lane].has_short_repeats = follows & KVMNN_SHORT_REPEATS != 0
        lane_stats[lane].is_constant = kvmnn_sample_max_count(sample, n) == n
        if not lane_stats[lane].is_constant and (follows or lane_stats[lane].entropy_bits < LOW_ENTROPY_MAX_BITS):
            is_predictable = True
    return is_predictable


# -- one lane ---------------------------------------------------------------------------------------------------------

cdef size_t raw_frame_size(size_t n) noexcept nogil:
    """Return the size of a zstd frame with `n` bytes in raw blocks."""
    cdef uint8_t header[MAX_ZSTD_HEADER_BYTES]
    return (
        (kvmnn_zstd_write_header(header, n) - header)
        + (n + KVMNN_MAX_RAW_BLOCK_BYTES - 1) // KVMNN_MAX_RAW_BLOCK_BYTES * BLOCK_HEADER_BYTES + n
    )


cdef void write_raw_frame(
    const uint8_t *src, size_t num_elements, int itemsize, int lane, bint bypass_cache, uint8_t *dst
) noexcept nogil:
    """Write a lane as raw blocks directly from the words to its final place, past the caches if `bypass_cache`."""
    cdef uint8_t *out = kvmnn_zstd_write_header(dst, num_elements)
    cdef size_t begin = 0, size
    while begin < num_elements:
        size = min(<size_t>KVMNN_MAX_RAW_BLOCK_BYTES, num_elements - begin)
        out = kvmnn_zstd_write_raw_block_header(out, size, begin + size == num_elements)
        if bypass_cache and itemsize == 1:
            lane_kernels().copy_nontemporal(out, src + begin, size)
        else:
            copy_raw_lane(src + begin * <size_t>itemsize, size, itemsize, lane, out)
        out += size
        begin += size


cdef size_t encode_lane_frame(
    const uint8_t *lane, size_t n, double bits, Scratch scratch, uint8_t *dst, RepeatStats *repeat_stats
) noexcept nogil:
    """Encode the payload of one lane to dst (kvmnn_zstd_bound(n) bytes); return its size, 0 for raw blocks."""
    cdef bint is_flat = bits > FLAT_MIN_BITS
    cdef size_t count = kvmnn_repeats_find(
        active_level, lane, n, bits > COSTLY_MIN_BITS, scratch.table, scratch.repeats)
    cdef size_t i, repeated_bytes = 0
    for i in range(count):
        repeated_bytes += scratch.repeats[i].length
    repeat_stats.count, repeat_stats.repeated_bytes = count, repeated_bytes
    repeat_stats.is_scattered = (
        bits > NOISE_MIN_BITS and repeated_bytes > n // SCATTERED_MIN_REPEAT_DIVISOR
        and repeated_bytes < SCATTERED_MAX_MEAN_LENGTH * count
    )
    if is_flat and repeated_bytes * FLAT_LANE_MIN_REPEAT_DIVISOR < n:
        return 0
    return kvmnn_zstd_write_frame(active_level, &_tables, lane, n, scratch.repeats, count, is_flat, scratch.writer, dst)


cdef int decide_libzstd_trials(
    const uint8_t *lane, size_t n, const RepeatStats *repeat_stats, Scratch scratch
) noexcept nogil:
    """Decide by a lane of high entropy which kinds of data libzstd may compress in all lanes."""
    cdef double missed_fraction = kvmnn_repeats_estimate_missed(
        active_level, lane, n, scratch.repeats, repeat_stats.count, scratch.table)
    if (
        missed_fraction > MAX_MISSED_REPEAT_FRACTION
        or repeat_stats.repeated_bytes > n // 2
        and repeat_stats.repeated_bytes < SHORT_REPEAT_BYTES * repeat_stats.count
    ):
        return TRY_ALL
    return TRY_REPEATED if repeat_stats.repeated_bytes > n // 2 else TRY_NONE


cdef size_t get_trial_ratio(size_t n, int libzstd_trials, double bits) noexcept nogil:
    """Return the ratio from which libzstd is tried on a lane; by `bits` per byte, the cost of a missed repeat."""
    if libzstd_trials != TRY_REPEATED or n > SHORT_LANE_BYTES or bits <= COSTLY_MIN_BITS:
        return LIBZSTD_TRIAL_MIN_RATIO
    return SHORT_LANE_TRIAL_MIN_RATIO if n > VERY_SHORT_LANE_BYTES else VERY_SHORT_LANE_TRIAL_MIN_RATIO


cdef double estimate_bits(const uint8_t *lane, size_t n) noexcept nogil:
    cdef uint8_t sample[KVMNN_MAX_SAMPLE_BYTES]
    return kvmnn_sample_entropy(sample, sample_lane(lane, n, 1, 0, sample))


cdef size_t predict_trial(
    const SegmentInput *segment, int lane, int mode, size_t max_bytes, uint8_t *dst
) noexcept nogil:
    """Predict at most `max_bytes` bytes of a lane, sampled at several positions if longer; return the number."""
    cdef size_t size = max_bytes // NUM_TRIAL_SLICES, step = segment.num_elements // NUM_TRIAL_SLICES
    cdef int k
    if segment.num_elements <= max_bytes:
        lane_kernels().predict_lane(segment.src, segment.num_elements, segment.itemsize, lane, mode, dst)
        return segment.num_elements
    for k in range(NUM_TRIAL_SLICES):
        lane_kernels().predict_lane(
            segment.src + k * step * <size_t>segment.itemsize, size, segment.itemsize, lane, mode, dst + k * size)
    return NUM_TRIAL_SLICES * size


cdef LaneEncoding select_encoding(
    Workspace ws, const SegmentInput *segment, int lane, int modes, LaneStats stats, Scratch scratch, uint8_t **slots
) noexcept nogil:
    """Select the predictor of the bit set `modes` that makes a trial of the lane smallest; the first on a tie.

    The two slots have max_payload_size(num_elements) bytes each, or those of MAX_TRIAL_BYTES, and may be swapped.
    """
    cdef size_t num_elements = segment.num_elements
    cdef size_t max_bytes = min(
        max(num_elements // TRIAL_DIVISOR, <size_t>MIN_TRIAL_BYTES), <size_t>MAX_FAST_TRIAL_BYTES)
    cdef size_t capacity = kvmnn_zstd_bound(min(num_elements, <size_t>MAX_TRIAL_BYTES)), n = 0, size, min_size
    cdef size_t[NUM_MODES] sizes
    cdef int mode, level = TRIAL_LEVEL
    cdef LaneEncoding best
    if stats.entropy_bits < LOW_ENTROPY_MAX_BITS or num_elements <= MIN_TRIAL_BYTES:
        max_bytes = min(max(num_elements // TRIAL_DIVISOR, <size_t>MIN_EXACT_TRIAL_BYTES), <size_t>MAX_TRIAL_BYTES)
        level = DEFAULT_LEVEL
    while True:
        min_size, best = NO_MEMORY, LaneEncoding(-1, True, 0, 1, 0)
        for mode in range(NUM_MODES):
            sizes[mode] = NO_MEMORY
            if modes >> mode & 1 and min_size > MIN_IMPROVABLE_BYTES:
                n = predict_trial(segment, lane, mode, max_bytes, scratch.lane)
                size = zstd.compress(ws.cctx, slots[1], capacity, scratch.lane, n, level)
                if zstd.is_error(size):
                    return LaneEncoding(-1, True, 0, 1, 0)
                sizes[mode] = size
                if size < min_size:
                    min_size, best.mode = size, mode
                    slots[0], slots[1] = slots[1], slots[0]
        best.alternatives = select_alternatives(best.mode, sizes, n)
        best.trial_fraction = <double>min_size / n
        if level == DEFAULT_LEVEL:
            best.trial_size = min_size if n == num_elements else 0
            return best
        if min_size * EXACT_TRIAL_MIN_RATIO > n:
            break
        max_bytes = min(max(num_elements // TRIAL_DIVISOR, <size_t>MIN_EXACT_TRIAL_BYTES), <size_t>MAX_TRIAL_BYTES)
        level = DEFAULT_LEVEL
    if not stats.has_short_repeats and num_elements > MIN_SPEED_TRIAL_BYTES:
        best.use_libzstd = is_libzstd_worth_it(ws, segment, lane, best.mode, capacity, scratch, slots[0])
    return best


cdef int select_alternatives(int mode, const size_t *sizes, size_t n) noexcept nogil:
    """Return a bit set of the predictors close to `mode` in a trial of `n` bytes; sizes of NO_MEMORY were not tried."""
    cdef int other_mode, alternatives = 0
    cdef bint is_high_ratio = HIGH_RATIO * sizes[mode] < n
    cdef double max_ratio
    for other_mode in range(NUM_MODES):
        max_ratio = ALTERNATIVE_MAX_RATIO if is_high_ratio else 0
        if mode == KVMNN_MODE_RAW or other_mode == KVMNN_MODE_RAW:
            max_ratio = RAW_ALTERNATIVE_MAX_RATIO_HIGH if is_high_ratio else RAW_ALTERNATIVE_MAX_RATIO
        if other_mode != mode and sizes[other_mode] != NO_MEMORY and sizes[other_mode] < max_ratio * sizes[mode]:
            alternatives |= 1 << other_mode
    return alternatives


cdef void try_alternatives(
    Workspace ws, const SegmentInput *segment, int lane, int modes, const LaneEncoding *encoding, Scratch scratch,
    LaneResult *lane_result, uint8_t **spare_slots
) noexcept nogil:
    """Encode a lane with a better predictor, if there is one; `spare_slots` are as large as `lane_result`.

    libzstd may or may not take many short repeats for distant ones, which no sample shows. So alternatives are tried,
    and all other predictors if the trial promised a smaller result.
    """
    cdef size_t size
    cdef int mode
    for mode in range(NUM_MODES):
        if mode == encoding.mode or not modes >> mode & 1:
            continue
        if (
            not encoding.alternatives >> mode & 1
            and lane_result.payload_size <= TRIAL_MISS_RATIO * encoding.trial_fraction * segment.num_elements
        ):
            continue
        lane_kernels().predict_lane(segment.src, segment.num_elements, segment.itemsize, lane, mode, scratch.lane)
        size = zstd.compress(
            ws.cctx, spare_slots[0], lane_result.payload_size - 1, scratch.lane, segment.num_elements, DEFAULT_LEVEL)
        if not zstd.is_error(size):  # as it is where there is no room
            lane_result.mode, lane_result.payload_size = mode, size
            lane_result.payload, spare_slots[0] = spare_slots[0], lane_result.payload


cdef bint is_libzstd_worth_it(
    Workspace ws, const SegmentInput *segment, int lane, int mode, size_t capacity, Scratch scratch, uint8_t *dst
) noexcept nogil:
    """Return whether libzstd's gain on a lane with a predictor is worth its time."""
    cdef uint8_t sample[KVMNN_MAX_SAMPLE_BYTES]
    cdef RepeatStats repeat_stats
    cdef size_t max_bytes = min(
        max(segment.num_elements // SPEED_TRIAL_DIVISOR, <size_t>MIN_SPEED_TRIAL_BYTES), <size_t>MAX_SPEED_TRIAL_BYTES)
    cdef size_t n = predict_trial(segment, lane, mode, max_bytes, scratch.lane), size, libzstd_size
    cdef size_t num_bytes = sample_lane(scratch.lane, n, 1, 0, sample)
    if kvmnn_sample_max_count(sample, num_bytes) > DOMINANT_BYTE_FRACTION * num_bytes:
        return True
    libzstd_size = zstd.compress(ws.cctx, dst, capacity, scratch.lane, n, DEFAULT_LEVEL)
    if zstd.is_error(libzstd_size):
        return False
    size = encode_lane_frame(scratch.lane, n, kvmnn_sample_entropy(sample, num_bytes), scratch, dst, &repeat_stats)
    return LIBZSTD_MIN_GAIN * libzstd_size < (size if size else n)


cdef bint encode_lane(
    Workspace ws, SegmentInput *segment, int lane, LaneEncoding *encoding, double bits, Scratch scratch,
    uint8_t **slots, LaneResult *lane_result
) noexcept nogil:
    """Encode a lane with the most worthwhile writer; `encoding.use_libzstd` then tells whether that was libzstd.

    Return False if memory is exhausted. The two slots have max_payload_size(num_elements) bytes each and may be
    swapped; the payload is in the first.
    """
    cdef size_t size, libzstd_size
    cdef RepeatStats repeat_stats
    if encoding.trial_size and not (segment.has_previous and encoding.mode != KVMNN_MODE_RAW):  # the trial had it all
        encoding.use_libzstd = False
        lane_result[0] = LaneResult(encoding.mode, slots[0], encoding.trial_size, NULL)
        return True
    if segment.is_gathered:
        scratch.lane += <size_t>lane * align64(segment.num_elements)
    else:
        lane_kernels().predict_lane(
            segment.src, segment.num_elements, segment.itemsize, lane, encoding.mode, scratch.lane)
    if encoding.mode != KVMNN_MODE_RAW:
        bits = estimate_bits(scratch.lane, segment.num_elements)
        if segment.has_previous:
            scratch.lane[0] = predict_byte(segment.src[lane], segment.src[lane - segment.itemsize], encoding.mode)
    size = 0
    if not encoding.use_libzstd:
        size = encode_lane_frame(scratch.lane, segment.num_elements, bits, scratch, slots[0], &repeat_stats)
        if segment.libzstd_trials == TRY_UNDECIDED and not segment.is_predictable and bits > COSTLY_MIN_BITS:
            segment.libzstd_trials = decide_libzstd_trials(scratch.lane, segment.num_elements, &repeat_stats, scratch)
        if repeat_stats.is_scattered and not segment.is_predictable:  # libzstd looks for each of them in every row
            encoding.use_libzstd = is_libzstd_worth_it(
                ws, segment, lane, encoding.mode, kvmnn_zstd_bound(segment.num_elements), scratch, slots[1])
            lane_kernels().predict_lane(
                segment.src, segment.num_elements, segment.itemsize, lane, encoding.mode, scratch.lane)
        elif (
            segment.libzstd_trials == TRY_ALL
            or 0 < size * get_trial_ratio(segment.num_elements, segment.libzstd_trials, bits) < segment.num_elements
        ):
            libzstd_size = zstd.compress(
                ws.cctx, slots[1], size if size else segment.num_elements, scratch.lane, segment.num_elements,
                DEFAULT_LEVEL)
            if not zstd.is_error(libzstd_size) and LIBZSTD_MIN_GAIN * libzstd_size < (
                size if size else segment.num_elements
            ):
                size = libzstd_size
                slots[0], slots[1] = slots[1], slots[0]
    if encoding.use_libzstd or size == 0 and encoding.mode != KVMNN_MODE_RAW:
        size = zstd.compress(
            ws.cctx, slots[0], kvmnn_zstd_bound(segment.num_elements), scratch.lane, segment.num_elements,
            DEFAULT_LEVEL)
        if zstd.is_error(size):
            return False
    lane_result[0] = LaneResult(encoding.mode, slots[0], size, NULL)
    if size == 0:
        lane_result.payload, lane_result.payload_size = NULL, raw_frame_size(segment.num_elements)
        if segment.is_gathered:
            lane_result.raw_lane = scratch.lane
    return True


cdef inline uint8_t predict_byte(uint8_t byte, uint8_t previous, int mode) noexcept nogil:
    return byte - previous if mode == KVMNN_MODE_DELTA else byte ^ previous
