"""Frames of MNN's lossless codec, made: candidates for every lane, and the smallest of them chosen.

Word sizes are called `stride`: 2 for the FP16 container (lanes lo, hi), 4 for the FP32 container (lanes 0 to 3).
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from cpython.bytes cimport PyBytes_AsString
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF

from kvmnn.frames._fast_lane cimport raw_frame, raw_size
from kvmnn.frames._lane_streams cimport make_bounded, make_stream, make_streams, spacing
from kvmnn.frames._room cimport Track
from kvmnn.frames._stream_header cimport ALLOW_RLE, ALLOW_ZSTD, CODEC_RLE, CODEC_ZSTD, HEADER, MODES, store_le32
from kvmnn.frames._streams cimport KVMNN_MODE_DELTA, KVMNN_MODE_RAW, entropy, lanes, rle_bound, rle_encode, rle_least, rle_size
from kvmnn.frames._workspace cimport Workspace, acquire, release, shortened, unfinished_bytes
from kvmnn.frames._zstdlib cimport is_no_room, zstd

from ..errors import KvmnnError, LimitError


cdef enum:
    ALL_MODES = 7
    FUSE_UP_TO = 256 << 10  # bytes of a lane whose three streams are made in one pass, ...
    SPLIT_UP_TO = 48 << 20  # ... and of all lanes and a stream, which are parted in one pass; each stream is then made
                            # where it is compressed, while the cache has it
    SLACK = 1 << 10         # bytes that a payload may be too long before libzstd stops: it gives up a few bytes before the
                            # end, and what it tries first (tables, literals) may be longer than what it then writes
    SAMPLE_TILE = 1024      # effort "balanced": bytes of one look at a stream ...
    SAMPLE_TILES = 16       # ... and how many looks it takes

cdef double LESS = 0.996   # effort "balanced": samples of noise differ by less

cdef size_t NOT_SMALLER = 0
cdef size_t NO_MEMORY = <size_t>-1
cdef size_t U32_MAX = <size_t>0xffffffffULL
cdef size_t TOO_LONG = <size_t>-2


cdef struct Candidate:
    int mode
    int codec
    size_t size


cdef inline void store_header(uint8_t *p, Candidate chosen, size_t raw_len) noexcept nogil:
    p[0] = chosen.mode
    p[1] = chosen.codec
    store_le32(p + 2, <uint32_t>raw_len)
    store_le32(p + 6, <uint32_t>chosen.size)


# -- encoding one stream --------------------------------------------------------------------------------------------

cdef size_t payload_bound(size_t n) noexcept nogil:
    cdef size_t a = rle_bound(n), b = zstd.bound(n)
    return a if a > b else b


cdef size_t make_candidate(
    Workspace ws, const uint8_t *stream, size_t words, int mode, int allow, int level, bint sized, size_t limit,
    size_t rle_least_size, uint8_t *dst, Candidate *result
) noexcept nogil:
    """Payload of one stream: the smaller of RLE (known to take at least `rle_least_size`) and zstd, RLE at equality.

    Returns its size with the payload in dst (payload_bound(words) bytes), NOT_SMALLER when it does not come below
    `limit`, or NO_MEMORY.
    """
    cdef size_t size, best = limit, room = payload_bound(words)
    cdef bint found = False
    if allow & ALLOW_ZSTD:
        if zstd.stops and limit < room - min(room, <size_t>SLACK):
            room = limit + SLACK
        if sized:
            size = zstd.compress(ws.cctx, dst, room, stream, words, level)
        else:
            size = zstd.compress_unsized(ws.cctx, dst, room, stream, words, level)
        if is_no_room(size) and room < payload_bound(words):
            size = 0
        elif zstd.is_error(size):
            return NO_MEMORY  # the one failure left to a one-shot call with a full-sized destination
        if 0 < size < best:
            result.mode, result.codec, result.size = mode, CODEC_ZSTD, size
            best = size
            found = True
    if allow & ALLOW_RLE and rle_least_size <= best:
        # At equal size RLE wins over the zstd payload just made, but not over an earlier candidate.
        size = rle_size(stream, words, best)
        if size < best or (found and size == best):
            rle_encode(stream, words, dst)
            result.mode, result.codec, result.size = mode, CODEC_RLE, size
            found = True
    return result.size if found else NOT_SMALLER


cdef int likely_mode(const uint8_t *src, size_t words, int stride, int lane, int modes) noexcept nogil:
    """The allowed predictor whose sampled stream has the lowest order-0 entropy; one that is no less by chance is not."""
    cdef uint64_t counts[256]
    cdef uint8_t tile[SAMPLE_TILE]
    cdef size_t start, step, n
    cdef int mode, best_mode = KVMNN_MODE_RAW
    cdef double bits, best = 9.0
    step = words // SAMPLE_TILES
    if step < SAMPLE_TILE:
        step = SAMPLE_TILE
    for mode in range(MODES):
        if not modes >> mode & 1:
            continue
        if modes == 1 << mode:
            return mode
        memset(counts, 0, sizeof(counts))
        start = 0
        while start < words:
            n = words - start if words - start < SAMPLE_TILE else SAMPLE_TILE
            lanes().predict_lane(src + start * <size_t>stride, n, stride, lane, mode, tile)
            lanes().histogram(tile + 1, n - 1, counts)  # the first byte lacks its true neighbour
            start += step
        bits = entropy(counts)
        if bits < best * LESS:
            best = bits
            best_mode = mode
    return best_mode


cdef size_t one_lane(const uint8_t *src, size_t words, int stride, int lane, uint8_t *to) noexcept nogil:
    """A lower bound of the RLE length of a lane as it is, which is `to` afterwards where words have several."""
    cdef uint8_t *parts[4]
    cdef size_t[4] repeats
    if stride == 1:
        return rle_least(words, lanes().repeats(src, words))
    memset(parts, 0, sizeof(parts))
    parts[lane] = to
    lanes().split(src, words, stride, parts, repeats)
    return rle_least(words, repeats[lane])


cdef void all_lanes(
    const uint8_t *src, size_t words, int stride, uint8_t *to, size_t *rle_least_sizes
) noexcept nogil:
    """Lanes as they are, `spacing` apart, and a lower bound of the RLE length of each."""
    cdef uint8_t *parts[4]
    cdef size_t[4] repeats
    cdef int lane
    for lane in range(stride):
        parts[lane] = to + <size_t>lane * spacing(words)
    lanes().split(src, words, stride, parts, repeats)
    for lane in range(stride):
        rle_least_sizes[lane] = rle_least(words, repeats[lane])


cdef size_t encode_lane(
    Workspace ws, const uint8_t *src, size_t words, int stride, int lane, int modes, int allow, int level,
    const uint8_t *streams, const size_t *rle_least_sizes, const uint8_t *raw, uint8_t *room, uint8_t *dst,
    uint8_t *slot, Candidate *chosen
) noexcept nogil:
    """The smallest payload of one lane in dst; its size, or NO_MEMORY, or TOO_LONG.

    `streams`: of all predictors, and the bounds of their RLE lengths, from `make_streams`; NULL to make them here, one
    after the other, in `room`, from the lane as it is in `raw`, whose bound is known, or where these are NULL from `src`.
    dst and the slot have payload_bound(words) bytes each. The first candidate is made where it stays if no other is
    smaller, as mostly none is.
    """
    cdef const uint8_t *stream
    cdef size_t got, rle = 0, rle_raw, limit = <size_t>-3
    cdef int mode
    cdef bint several = modes & (modes - 1) != 0, first = True
    if streams == NULL and several and raw == NULL:
        room = ws.buffer(0, 2 * spacing(words))
        if room == NULL:
            return NO_MEMORY
        raw = src if stride == 1 else room + spacing(words)
        rle_raw = one_lane(src, words, stride, lane, room + spacing(words))
        rle_least_sizes = &rle_raw
    for mode in range(MODES):
        if not modes >> mode & 1:
            continue
        if streams != NULL:
            stream, rle = streams + <size_t>mode * spacing(words), rle_least_sizes[mode]
        elif raw == NULL:
            stream = make_stream(ws, src, words, stride, lane, mode)
            if stream == NULL:
                return NO_MEMORY
        elif mode == KVMNN_MODE_RAW:
            stream, rle = raw, rle_least_sizes[mode]
        else:
            stream, rle = room, rle_least(words, lanes().predict_counted(raw, words, mode, room))
        got = make_candidate(
            ws, stream, words, mode, allow, level, True, limit, rle, dst if first else slot, chosen
        )
        if got == NO_MEMORY:
            return NO_MEMORY
        if got != NOT_SMALLER:
            if not first:
                memcpy(dst, slot, got)
            limit = got
        first = False
    return chosen.size if chosen.size <= U32_MAX else TOO_LONG


cdef bint are_made_at_once(size_t words, int stride, int *modes) noexcept nogil:
    """Whether a lane's streams are all made in one pass."""
    cdef int lane
    if stride == 1 or words > FUSE_UP_TO:
        return False
    for lane in range(stride):
        if modes[lane] != ALL_MODES:
            return False
    return True


cdef bint are_split(size_t words, int stride, int *modes) noexcept nogil:
    """Whether all lanes are parted in one pass, so that words are read once: not for lanes that have one stream each."""
    cdef int lane
    if stride == 1 or <size_t>(stride + 1) * spacing(words) > SPLIT_UP_TO:
        return False
    for lane in range(stride):
        if modes[lane] & (modes[lane] - 1):
            return True
    return False


# -- encoding for Python ----------------------------------------------------------------------------------------------

cdef bytes encode_lanes(
    const uint8_t *src, size_t words, int stride, int *modes, int allow, int level, size_t begin
):
    """`begin` bytes for the caller to fill, and behind them header and smallest payload of every lane.

    Payloads are made where they stay, in bytes that are shortened when it is known how long all are.
    """
    cdef size_t room = payload_bound(words), got = NO_MEMORY, at = begin
    cdef Candidate chosen
    cdef uint8_t *out
    cdef uint8_t *slot
    cdef uint8_t *streams = NULL
    cdef uint8_t *raws = NULL
    cdef uint8_t *raw = NULL
    cdef uint8_t *spare = NULL
    cdef size_t[MODES] rle
    cdef size_t[4] rle_raws
    cdef int lane
    cdef bint at_once = are_made_at_once(words, stride, modes)
    cdef bint at_first = not at_once and are_split(words, stride, modes)
    cdef PyObject *frame = NULL
    cdef Workspace ws = acquire(allow & ALLOW_ZSTD != 0, False)
    try:
        frame = unfinished_bytes(begin + <size_t>stride * (HEADER + room))
        out = <uint8_t *>PyBytes_AsString(<object>frame)
        with nogil:
            slot = ws.buffer(1, room)
            if at_once:
                streams = ws.buffer(0, MODES * spacing(words))
            elif at_first:
                raws = ws.buffer(0, <size_t>(stride + 1) * spacing(words))
                if raws != NULL:
                    spare = raws + <size_t>stride * spacing(words)
                    all_lanes(src, words, stride, raws, rle_raws)
            if slot != NULL and (streams != NULL or not at_once) and (raws != NULL or not at_first):
                for lane in range(stride):
                    if at_once:
                        make_streams(src, words, stride, lane, streams, rle)
                    if at_first:
                        raw = raws + <size_t>lane * spacing(words)
                        rle[KVMNN_MODE_RAW] = rle_raws[lane]
                    chosen = Candidate(0, 0, 0)
                    got = encode_lane(
                        ws, src, words, stride, lane, modes[lane], allow, level, streams, rle, raw, spare,
                        out + at + HEADER, slot, &chosen,
                    )
                    if got >= TOO_LONG:
                        break
                    store_header(out + at, chosen, words)
                    at += HEADER + got
        if got >= TOO_LONG:
            raise no_frame(got)
        return shortened(&frame, at)
    finally:
        Py_XDECREF(frame)
        release(ws)


cdef object no_frame(size_t code):
    if code == NO_MEMORY:
        return MemoryError("no memory for the streams of a frame")
    return LimitError("a payload above 2^32 - 1 bytes, which is what a stream header can say: encode pieces")


def encode(const uint8_t[::1] data not None, int stride, modes, int allow, int level) -> bytes:
    """The frame of `data` on the calling thread.

    `modes`: for each lane a bit set of predictors (1 raw, 2 delta_seq, 4 xor_seq). `allow`: 1 RLE, 2 zstd, 3 both.
    """
    cdef size_t words = check_words(data.shape[0], stride)
    cdef int lane
    cdef int[4] lane_modes
    for lane in range(stride):
        lane_modes[lane] = modes[lane]
    cdef bytes frame = encode_lanes(&data[0], words, stride, lane_modes, allow, level, 4)
    store_le32(<uint8_t *>PyBytes_AsString(frame), <uint32_t>words)
    return frame


def encode_stream(const uint8_t[::1] data not None, int modes, int allow, int level=3) -> bytes:
    """One stream with its header, from bytes that are no lanes of anything; an empty one is ten zero bytes."""
    if data.shape[0] == 0:
        return bytes(HEADER)
    return encode_lanes(&data[0], data.shape[0], 1, &modes, allow, level, 0)


def candidate(
    const uint8_t[::1] data not None, int stride, int lane, int mode, int allow, int level, bint sized, size_t limit
):
    """One lane under one predictor: `(payload size, mode, codec, header + payload)`, or None if not below `limit`."""
    cdef size_t words = check_words(data.shape[0], stride), got = NO_MEMORY, rle = 0
    cdef Candidate chosen = Candidate(0, 0, 0)
    cdef const uint8_t *stream
    cdef uint8_t *out
    cdef PyObject *made = NULL
    cdef Workspace ws = acquire(allow & ALLOW_ZSTD != 0, False)
    try:
        made = unfinished_bytes(HEADER + payload_bound(words))
        out = <uint8_t *>PyBytes_AsString(<object>made)
        with nogil:
            stream = make_bounded(ws, &data[0], words, stride, lane, mode, &rle)
            if stream != NULL:
                got = make_candidate(ws, stream, words, mode, allow, level, sized, limit, rle, out + HEADER, &chosen)
            if got != NO_MEMORY and chosen.size > U32_MAX:
                got = TOO_LONG
            if got < TOO_LONG:
                store_header(out, chosen, words)
        if got >= TOO_LONG:
            raise no_frame(got)
        if got == NOT_SMALLER:
            return None
        return chosen.size, chosen.mode, chosen.codec, shortened(&made, HEADER + chosen.size)
    finally:
        Py_XDECREF(made)
        release(ws)


def bound(size_t n) -> int:
    """Bytes that no zstd frame of n bytes passes."""
    return zstd.bound(n)


def write_payload(
    Track track not None, Py_ssize_t piece, size_t most, const uint8_t[::1] data not None, int stride, size_t begin,
    size_t end, int lane, int mode, int level
) -> int:
    """The zstd frame of the words from `begin` to `end` of one lane, under one predictor over the whole lane, as a piece of
    the track that has room for `most` bytes; how long it is. Without a predictor raw blocks, where libzstd needs more.
    """
    cdef size_t words = check_words(data.shape[0], stride), size = NO_MEMORY
    cdef uint8_t *stream
    cdef uint8_t *out
    cdef uint8_t before
    if not begin < end <= words or not 0 <= lane < stride or not 0 <= mode < MODES:
        raise KvmnnError(f"words {begin} to {end} of {words}, lane {lane} of {stride}, mode {mode}: not there")
    if most < (raw_size(end - begin) if mode == KVMNN_MODE_RAW else zstd.bound(end - begin)):
        raise KvmnnError(f"{most} bytes for a payload of {end - begin} words: too few")
    out = track.room.at(track.place(piece), most)
    cdef Workspace ws = acquire(True, False)
    try:
        with nogil:
            stream = <uint8_t *>make_stream(ws, &data[begin * stride], end - begin, stride, lane, mode)
            if stream != NULL:
                if begin and mode != KVMNN_MODE_RAW:
                    before = data[(begin - 1) * stride + lane]
                    stream[0] = stream[0] - before if mode == KVMNN_MODE_DELTA else stream[0] ^ before
                size = zstd.compress(ws.cctx, out, most, stream, end - begin, level)
                if is_no_room(size) and mode == KVMNN_MODE_RAW:
                    raw_frame(stream, end - begin, 1, 0, False, out)
                    size = raw_size(end - begin)
    finally:
        release(ws)
    if zstd.is_error(size):
        raise no_frame(NO_MEMORY)
    track.done(piece, size)
    return size


def likely_modes(const uint8_t[::1] data not None, int stride, modes) -> list:
    """For each lane a bit set with the one predictor that effort "balanced" takes."""
    cdef size_t words = check_words(data.shape[0], stride)
    cdef int lane, mode, lane_modes
    cdef list out = []
    for lane in range(stride):
        lane_modes = modes[lane]
        with nogil:
            mode = likely_mode(&data[0], words, stride, lane, lane_modes)
        out.append(1 << mode)
    return out


cdef size_t check_words(size_t n, int stride) except? 0:
    if stride != 2 and stride != 4:
        raise KvmnnError(f"word size {stride}: expected 2 or 4")
    if n == 0:
        raise KvmnnError(f"nothing to encode: expected at least one {stride}-byte word, found 0 bytes")
    if n % <size_t>stride:
        raise KvmnnError(f"{n} bytes are not a whole number of {stride}-byte words")
    if n // <size_t>stride > U32_MAX:
        raise LimitError(f"{n // <size_t>stride} words: a frame counts words in 32 bits; encode pieces")
    return n // <size_t>stride
