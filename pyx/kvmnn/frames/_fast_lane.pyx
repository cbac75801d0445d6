"""One lane of a frame of effort "fast": by which predictor, and who writes its payload (docs/format.md)."""

from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy

from kvmnn._simd cimport active_level
from kvmnn.frames._fast_lane cimport ALL, NONE, REPEATED, TRIAL_MOST, UNKNOWN, Form, Lane, Look, Piece, Scratch
from kvmnn.frames._stream_header cimport MODES
from kvmnn.frames._streams cimport KVMNN_MODE_DELTA, KVMNN_MODE_RAW, lanes
from kvmnn.frames._workspace cimport Workspace
from kvmnn.frames._zstdlib cimport zstd


cdef extern from "kvmnn/frames/repeats.h" nogil:
    size_t kvmnn_repeats_bound(size_t n)
    size_t kvmnn_repeats_table(size_t n)
    size_t kvmnn_repeats_find(
        int level, const uint8_t *lane, size_t n, int dear, uint32_t *table, kvmnn_repeat *out)
    double kvmnn_repeats_missed(
        int level, const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count, uint32_t *table)

cdef extern from "kvmnn/frames/zstd_writer.h" nogil:
    enum:
        KVMNN_ZSTD_RAW_BLOCK
    ctypedef struct kvmnn_sequence_tables:
        pass
    void kvmnn_sequence_tables_init(kvmnn_sequence_tables *tables)
    size_t kvmnn_zstd_bound(size_t n)
    size_t kvmnn_zstd_scratch()
    uint8_t *kvmnn_zstd_header(uint8_t *dst, size_t n)
    uint8_t *kvmnn_zstd_raw_block(uint8_t *dst, size_t size, int last)
    size_t kvmnn_zstd_write(
        int level, const kvmnn_sequence_tables *tables, const uint8_t *src, size_t n, const kvmnn_repeat *repeats,
        size_t count, int flat, uint8_t *scratch, uint8_t *dst)

cdef extern from "kvmnn/frames/samples.h" nogil:
    enum:
        KVMNN_LOOK
        KVMNN_LOOKS
        KVMNN_SAMPLE
        KVMNN_FOLLOWS
        KVMNN_SHORT
    void kvmnn_samples_init()
    size_t kvmnn_sample_used(uint8_t *sample, size_t n)
    double kvmnn_sample_bits(const uint8_t *sample, size_t n)
    size_t kvmnn_sample_most(const uint8_t *sample, size_t n)
    int kvmnn_sample_follows(const uint8_t *sample, size_t n, size_t every, double bits)


cdef enum:
    ZSTD_HEADER = 14         # of a frame, at most
    RAW_HEADER = 3           # of a raw block
    LEVEL_EXACT = 3          # of libzstd, where bytes follow from those before them ...
    LEVEL_TRIAL = 1          # ... and to find the predictor
    FEWER = 4                # looks, by which it is found out whether they do
    TEXTS = 4                # places of a lane, from which what is tried is taken: ...
    TEXT_SHARE = 8           # ... one byte in so many, within limits, to find the predictor, ...
    TEXT_LEAST = 8 << 10
    TEXT_MOST = 128 << 10
    TINY_LEAST = 64 << 10    # ... or more, up to TRIAL_MOST, where it becomes ...
    TINY = 8                 # ... so many times smaller and much depends on little, ...
    MORE_SHARE = 4           # ... and more to find out whether libzstd pays, ...
    MORE_LEAST = 16 << 10
    MORE_MOST = 256 << 10
    MANY = 8                 # of a lane, one byte in so many is repeated ...
    SCATTERED = 24           # ... by repeats shorter than that
    SHORT = 48               # repeats that are shorter, are not worth a row
    TINY_SHARE = 16          # what becomes so many times smaller by repeats is left to libzstd, where it makes fewer, ...
    FEW = 64 << 10           # ... in lanes of so many bytes ...
    FEW_SHARE = 6            # ... what becomes so many times smaller ...
    FEWEST = 16 << 10        # ... and so on: samples of short lanes say little
    FEWEST_SHARE = 3
    FEW_LEFT = 4             # bytes are few that were so many times more
    LEAST = 64               # bytes of a payload that need not become fewer
    FEW_REPEATED = 128       # of a flat lane one byte in so many must be repeated, or it is not worth the time

cdef double FLAT_BITS = 7.85  # a byte; random bytes come to 7.955 in a sample of that size
cdef double POOR_BITS = 2.0
cdef double DEAR_BITS = 4.0   # where a byte takes more, shorter repeats pay
cdef double NOISE_BITS = 7.0  # what stands between repeats can hardly be coded
cdef double SLOWER = 1.02     # of its bytes, libzstd has to save more
cdef double SURPRISE = 1.05   # of the bytes that a trial has promised, what is more has a better predictor
cdef double NEAR = 1.4        # of its bytes, raw's rival may need more in a trial and fewer in the end, ...
cdef double NEAR_FEW = 2.5    # ... or so many, where they are few, ...
cdef double ALIKE = 1.05      # ... and those of another predictor so many
cdef double MISSED = 0.015   # of places that were there before, the search has missed so many: libzstd is tried
cdef double COMMON = 0.7      # of bytes, if one byte is so many: no code is short enough for it

cdef size_t NO_MEMORY = <size_t>-1

cdef kvmnn_sequence_tables _tables
kvmnn_sequence_tables_init(&_tables)
kvmnn_samples_init()


cdef struct Search:
    size_t count             # of repeats
    size_t repeated          # bytes in them
    bint scattered           # many short ones between bytes that cost as much as they are long


cdef size_t lane_room(size_t words) noexcept nogil:
    """Bytes that no payload of a lane passes."""
    return kvmnn_zstd_bound(words)


cdef size_t aligned(size_t n) noexcept nogil:
    return (n + 63) & ~<size_t>63


cdef bint make_room(Workspace ws, size_t words, int count, Scratch *scratch) noexcept nogil:
    """Memory to work in, with room for so many lanes."""
    cdef size_t writer = aligned(kvmnn_zstd_scratch()), lane = <size_t>count * aligned(words)
    cdef size_t table = aligned(kvmnn_repeats_table(words) * sizeof(uint32_t))
    cdef uint8_t *at = ws.buffer(0, writer + lane + table + kvmnn_repeats_bound(words) * sizeof(kvmnn_repeat))
    if at == NULL:
        return False
    scratch.writer, scratch.lane = at, at + writer
    scratch.table = <uint32_t *>(at + writer + lane)
    scratch.repeats = <kvmnn_repeat *>(at + writer + lane + table)
    return True


# -- bytes of lanes as they are ---------------------------------------------------------------------------------------

cdef inline void raw_bytes(const uint8_t *src, size_t words, int stride, int lane, uint8_t *dst) noexcept nogil:
    if stride == 1:
        memcpy(dst, src, words)
    else:
        lanes().predict_lane(src, words, stride, lane, KVMNN_MODE_RAW, dst)


cdef void gather(const Piece *of, uint8_t *to) noexcept nogil:
    """All lanes of a piece, so many bytes apart as `aligned` says."""
    cdef uint8_t *parts[4]
    cdef int lane
    for lane in range(of.stride):
        parts[lane] = to + <size_t>lane * aligned(of.words)
    lanes().split(of.src, of.words, of.stride, parts, NULL)


# -- what samples say -------------------------------------------------------------------------------------------------

cdef size_t sampled(const uint8_t *src, size_t words, int stride, int lane, uint8_t *sample) noexcept nogil:
    """Looks at a lane, at most KVMNN_SAMPLE bytes, those of zeros left out; how many."""
    cdef size_t begin = 0, got = 0, size, step = words // KVMNN_LOOKS, end = KVMNN_LOOKS * step
    if step <= KVMNN_LOOK:
        step, end = KVMNN_LOOK, words
    while begin < end:
        size = min(<size_t>KVMNN_LOOK, words - begin)
        raw_bytes(src + begin * <size_t>stride, size, stride, lane, sample + got)
        got += size
        begin += step
    size = kvmnn_sample_used(sample, got)
    if size < got:  # a branch: what follows need not wait for all bytes
        return size
    return got


cdef bint look_at(const uint8_t *src, size_t words, int stride, Look *looks) noexcept nogil:
    """A look at each lane. True if the bytes of any follow from those before them, or are few, but of more than one kind.

    Where the high bytes of words do, the low ones may as well, in a way that no sample shows.
    """
    cdef uint8_t sample[KVMNN_SAMPLE]
    cdef bint found = False
    cdef size_t n
    cdef int lane, follows
    for lane in range(stride):
        n = sampled(src, words, stride, lane, sample)
        looks[lane].bits = kvmnn_sample_bits(sample, n)
        follows = kvmnn_sample_follows(sample, n, FEWER if FEWER * KVMNN_LOOK < n < words else 1, looks[lane].bits)
        looks[lane].short = follows & KVMNN_SHORT != 0
        looks[lane].constant = kvmnn_sample_most(sample, n) == n
        if not looks[lane].constant and (follows or looks[lane].bits < POOR_BITS):
            found = True
    return found


# -- one lane ---------------------------------------------------------------------------------------------------------

cdef size_t raw_size(size_t n) noexcept nogil:
    """Bytes of a frame of raw blocks."""
    cdef uint8_t header[ZSTD_HEADER]
    return (kvmnn_zstd_header(header, n) - header) + (n + KVMNN_ZSTD_RAW_BLOCK - 1) // KVMNN_ZSTD_RAW_BLOCK * RAW_HEADER + n


cdef void raw_frame(const uint8_t *src, size_t words, int stride, int lane, bint past, uint8_t *dst) noexcept nogil:
    """A lane as raw blocks, straight from the words to where it stays; if `past`, bytes of a lane past the caches."""
    cdef uint8_t *at = kvmnn_zstd_header(dst, words)
    cdef size_t begin = 0, size
    while begin < words:
        size = min(<size_t>KVMNN_ZSTD_RAW_BLOCK, words - begin)
        at = kvmnn_zstd_raw_block(at, size, begin + size == words)
        if past and stride == 1:
            lanes().copy_past(at, src + begin, size)
        else:
            raw_bytes(src + begin * <size_t>stride, size, stride, lane, at)
        at += size
        begin += size


cdef size_t lane_frame(
    const uint8_t *lane, size_t n, double bits, Scratch scratch, uint8_t *dst, Search *search
) noexcept nogil:
    """The payload of one lane in dst (kvmnn_zstd_bound(n) bytes); its size, 0 for one of raw blocks."""
    cdef bint flat = bits > FLAT_BITS
    cdef size_t count = kvmnn_repeats_find(active_level, lane, n, bits > DEAR_BITS, scratch.table, scratch.repeats)
    cdef size_t i, repeated = 0
    for i in range(count):
        repeated += scratch.repeats[i].length
    search.count, search.repeated = count, repeated
    search.scattered = bits > NOISE_BITS and repeated > n // MANY and repeated < SCATTERED * count
    if flat and repeated * FEW_REPEATED < n:
        return 0
    return kvmnn_zstd_write(active_level, &_tables, lane, n, scratch.repeats, count, flat, scratch.writer, dst)


cdef int doubts_of(const uint8_t *lane, size_t n, const Search *search, Scratch scratch) noexcept nogil:
    """By a lane whose bytes take many bits, what libzstd may make fewer bytes of in all lanes."""
    cdef double missed = kvmnn_repeats_missed(active_level, lane, n, scratch.repeats, search.count, scratch.table)
    if missed > MISSED or search.repeated > n // 2 and search.repeated < SHORT * search.count:
        return ALL
    return REPEATED if search.repeated > n // 2 else NONE


cdef size_t doubtful_share(size_t n, int doubts, double bits) noexcept nogil:
    """How many times smaller a lane must have become for libzstd to be tried on it; by `bits` of a byte, what a repeat that
    was not found costs.
    """
    if doubts != REPEATED or n > FEW or bits <= DEAR_BITS:
        return TINY_SHARE
    return FEW_SHARE if n > FEWEST else FEWEST_SHARE


cdef double bits_of(const uint8_t *lane, size_t n) noexcept nogil:
    cdef uint8_t sample[KVMNN_SAMPLE]
    return kvmnn_sample_bits(sample, sampled(lane, n, 1, 0, sample))


cdef size_t predicted_text(const Piece *of, int lane, int mode, size_t most, uint8_t *text) noexcept nogil:
    """At most `most` bytes of a lane, from several places of a longer one, predicted; how many."""
    cdef size_t size = most // TEXTS, step = of.words // TEXTS
    cdef int k
    if of.words <= most:
        lanes().predict_lane(of.src, of.words, of.stride, lane, mode, text)
        return of.words
    for k in range(TEXTS):
        lanes().predict_lane(of.src + k * step * <size_t>of.stride, size, of.stride, lane, mode, text + k * size)
    return TEXTS * size


cdef Form best_form(
    Workspace ws, const Piece *of, int lane, int modes, Look look, Scratch scratch, uint8_t **slots
) noexcept nogil:
    """What makes a text of the lane smallest, of the predictors of the bit set `modes`; the first at equality.

    The two slots have lane_room(words) bytes each, or those of TRIAL_MOST, and may change places.
    """
    cdef size_t words = of.words, most = min(max(words // TEXT_SHARE, <size_t>TEXT_LEAST), <size_t>TEXT_MOST)
    cdef size_t room = kvmnn_zstd_bound(min(words, <size_t>TRIAL_MOST)), n = 0, size, least
    cdef size_t[MODES] sizes
    cdef int mode, level = LEVEL_TRIAL
    cdef Form best
    if look.bits < POOR_BITS or words <= TEXT_LEAST:
        most, level = min(max(words // TEXT_SHARE, <size_t>TINY_LEAST), <size_t>TRIAL_MOST), LEVEL_EXACT
    while True:
        least, best = NO_MEMORY, Form(-1, True, 0, 1, 0)
        for mode in range(MODES):
            sizes[mode] = NO_MEMORY
            if modes >> mode & 1 and least > LEAST:
                n = predicted_text(of, lane, mode, most, scratch.lane)
                size = zstd.compress(ws.cctx, slots[1], room, scratch.lane, n, level)
                if zstd.is_error(size):
                    return Form(-1, True, 0, 1, 0)
                sizes[mode] = size
                if size < least:
                    least, best.mode = size, mode
                    slots[0], slots[1] = slots[1], slots[0]
        best.rivals = rivals_of(best.mode, sizes, n)
        best.share = <double>least / n
        if level == LEVEL_EXACT:
            best.size = least if n == words else 0
            return best
        if least * TINY > n:
            break
        most, level = min(max(words // TEXT_SHARE, <size_t>TINY_LEAST), <size_t>TRIAL_MOST), LEVEL_EXACT
    if not look.short and words > MORE_LEAST:
        best.libzstd = pays(ws, of, lane, best.mode, room, scratch, slots[0])
    return best


cdef int rivals_of(int mode, const size_t *sizes, size_t n) noexcept nogil:
    """The predictors that came near `mode` in a trial of `n` bytes, a bit set; a size is NO_MEMORY if not tried."""
    cdef int other, found = 0
    cdef bint are_few = FEW_LEFT * sizes[mode] < n
    cdef double near
    for other in range(MODES):
        near = ALIKE if are_few else 0
        if mode == KVMNN_MODE_RAW or other == KVMNN_MODE_RAW:
            near = NEAR_FEW if are_few else NEAR
        if other != mode and sizes[other] != NO_MEMORY and sizes[other] < near * sizes[mode]:
            found |= 1 << other
    return found


cdef void smaller(
    Workspace ws, const Piece *of, int lane, int modes, const Form *form, Scratch scratch, Lane *found, uint8_t **spare
) noexcept nogil:
    """Make a lane by a better predictor than the form's, if there is one; `spare` has room as `found` has.

    libzstd takes many short repeats for repeats from afar, or does not, which no sample shows. So rivals are tried,
    and what else there is where the trial had promised less.
    """
    cdef size_t other
    cdef int mode
    for mode in range(MODES):
        if mode == form.mode or not modes >> mode & 1:
            continue
        if not form.rivals >> mode & 1 and found.size <= SURPRISE * form.share * of.words:
            continue
        lanes().predict_lane(of.src, of.words, of.stride, lane, mode, scratch.lane)
        other = zstd.compress(ws.cctx, spare[0], found.size - 1, scratch.lane, of.words, LEVEL_EXACT)
        if not zstd.is_error(other):  # as it is where there is no room
            found.mode, found.size = mode, other
            found.made, spare[0] = spare[0], found.made


cdef bint pays(
    Workspace ws, const Piece *of, int lane, int mode, size_t room, Scratch scratch, uint8_t *dst
) noexcept nogil:
    """Whether libzstd makes enough of a lane under a predictor for the time that it takes."""
    cdef uint8_t sample[KVMNN_SAMPLE]
    cdef Search search
    cdef size_t most = min(max(of.words // MORE_SHARE, <size_t>MORE_LEAST), <size_t>MORE_MOST)
    cdef size_t n = predicted_text(of, lane, mode, most, scratch.lane), size, other
    cdef size_t got = sampled(scratch.lane, n, 1, 0, sample)
    if kvmnn_sample_most(sample, got) > COMMON * got:
        return True
    other = zstd.compress(ws.cctx, dst, room, scratch.lane, n, LEVEL_EXACT)
    if zstd.is_error(other):
        return False
    size = lane_frame(scratch.lane, n, kvmnn_sample_bits(sample, got), scratch, dst, &search)
    return SLOWER * other < (size if size else n)


cdef bint make_lane(
    Workspace ws, Piece *of, int lane, Form *form, double bits, Scratch scratch, uint8_t **slots, Lane *found
) noexcept nogil:
    """A lane in a form, by whom it pays best; `form.libzstd` says then whether libzstd wrote it because of the form.
    False: no memory.

    The two slots have lane_room(words) bytes each and may change places; the payload is in the first.
    """
    cdef size_t size, other
    cdef Search search
    if form.size and not (of.continued and form.mode != KVMNN_MODE_RAW):  # the trial had it all
        form.libzstd = False
        found[0] = Lane(form.mode, slots[0], form.size, NULL)
        return True
    if of.gathered:
        scratch.lane += <size_t>lane * aligned(of.words)
    else:
        lanes().predict_lane(of.src, of.words, of.stride, lane, form.mode, scratch.lane)
    if form.mode != KVMNN_MODE_RAW:
        bits = bits_of(scratch.lane, of.words)
        if of.continued:
            scratch.lane[0] = after(of.src[lane], of.src[lane - of.stride], form.mode)
    size = 0
    if not form.libzstd:
        size = lane_frame(scratch.lane, of.words, bits, scratch, slots[0], &search)
        if of.doubts == UNKNOWN and not of.follows and bits > DEAR_BITS:
            of.doubts = doubts_of(scratch.lane, of.words, &search, scratch)
        if search.scattered and not of.follows:  # libzstd looks for each of them in every row
            form.libzstd = pays(ws, of, lane, form.mode, kvmnn_zstd_bound(of.words), scratch, slots[1])
            lanes().predict_lane(of.src, of.words, of.stride, lane, form.mode, scratch.lane)
        elif of.doubts == ALL or 0 < size * doubtful_share(of.words, of.doubts, bits) < of.words:
            other = zstd.compress(ws.cctx, slots[1], size if size else of.words, scratch.lane, of.words, LEVEL_EXACT)
            if not zstd.is_error(other) and SLOWER * other < (size if size else of.words):
                size = other
                slots[0], slots[1] = slots[1], slots[0]
    if form.libzstd or size == 0 and form.mode != KVMNN_MODE_RAW:
        size = zstd.compress(ws.cctx, slots[0], kvmnn_zstd_bound(of.words), scratch.lane, of.words, LEVEL_EXACT)
        if zstd.is_error(size):
            return False
    found[0] = Lane(form.mode, slots[0], size, NULL)
    if size == 0:
        found.made, found.size = NULL, raw_size(of.words)
        if of.gathered:
            found.bytes = scratch.lane
    return True


cdef inline uint8_t after(uint8_t byte, uint8_t before, int mode) noexcept nogil:
    return byte - before if mode == KVMNN_MODE_DELTA else byte ^ before
