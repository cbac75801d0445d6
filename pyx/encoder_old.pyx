"""One frame of MNN's lossless codec: building candidates, choosing the smallest, and taking a frame apart again.

Word sizes are called `stride`: 2 for the FP16 container (lanes lo, hi), 4 for the FP32 container (lanes 0 to 3).
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.ref cimport Py_DECREF, PyObject

from kvmnn._streams cimport (
    KVMNN_MODE_RAW, entropy, lanes, rle_bound, rle_decode, rle_encode, rle_least, rle_size,
)
from kvmnn._zstdlib cimport most_output, zstd

from .errors import FrameError, KvmnnError, LimitError


cdef extern from *:
    """
    #include <stdlib.h>
    #if defined(__linux__)
    #include <sys/mman.h>
    #endif

    /* malloc, with huge pages for large buffers where the system has them: streams are walked end to end, and small
       pages would cost more in faults and translation than everything kvmnn does to the bytes. */
    static void *kvmnn_alloc(size_t size) {
    #if defined(__linux__) && defined(MADV_HUGEPAGE)
        const size_t huge = (size_t)1 << 21;
        void *p;
        if (size >= 2 * huge) {
            if (posix_memalign(&p, huge, size) != 0) return NULL;
            madvise(p, size, MADV_HUGEPAGE);
            return p;
        }
    #endif
        return malloc(size);
    }
    """
    void *kvmnn_alloc(size_t size) nogil


cdef enum:
    HEADER = 10           # bytes before a stream's payload
    CODEC_RLE = 0
    CODEC_ZSTD = 1
    ALLOW_RLE = 1
    ALLOW_ZSTD = 2
    MODES = 3
    ALL_MODES = 7
    FUSE_UP_TO = 16 << 20  # bytes of a lane whose three streams are made in one pass; above, memory counts more
    KEEP_BYTES = 48 << 20  # kept between calls by all workspaces together
    TILE = 4096            # words that are split, predicted and scanned before the next are touched
    SAMPLE_TILE = 1024     # effort "fast": bytes of one look at a stream ...
    SAMPLE_TILES = 16      # ... and how many looks it takes

cdef size_t NOT_SMALLER = 0
cdef size_t NO_MEMORY = <size_t>-1
cdef size_t U32_MAX = <size_t>0xffffffffULL
cdef size_t TOO_LONG = <size_t>-2


cdef struct Candidate:
    int mode
    int codec
    size_t size


cdef inline uint32_t load_le32(const uint8_t *p) noexcept nogil:
    return <uint32_t>p[0] | <uint32_t>p[1] << 8 | <uint32_t>p[2] << 16 | <uint32_t>p[3] << 24


cdef inline void store_le32(uint8_t *p, uint32_t x) noexcept nogil:
    p[0] = x & 0xff
    p[1] = x >> 8 & 0xff
    p[2] = x >> 16 & 0xff
    p[3] = x >> 24


cdef inline void store_header(uint8_t *p, Candidate chosen, size_t raw_len) noexcept nogil:
    p[0] = chosen.mode
    p[1] = chosen.codec
    store_le32(p + 2, <uint32_t>raw_len)
    store_le32(p + 6, <uint32_t>chosen.size)


# -- workspaces -----------------------------------------------------------------------------------------------------

cdef class Workspace:
    """Contexts and buffers of one worker, kept between calls."""
    cdef void *cctx
    cdef void *dctx
    cdef uint8_t *buffers[2]
    cdef size_t sizes[2]

    def __dealloc__(self):
        if self.cctx != NULL:
            zstd.free_cctx(self.cctx)
        if self.dctx != NULL:
            zstd.free_dctx(self.dctx)
        for i in range(2):
            free(self.buffers[i])

    cdef uint8_t *buffer(self, int which, size_t size) noexcept nogil:
        """At least `size` bytes whose content is undefined, or NULL."""
        if size > self.sizes[which]:
            free(self.buffers[which])
            self.buffers[which] = <uint8_t *>kvmnn_alloc(size)
            self.sizes[which] = size if self.buffers[which] != NULL else 0
        return self.buffers[which]

    cdef size_t size(self) noexcept:
        return self.sizes[0] + self.sizes[1]

    cdef void empty(self) noexcept:
        for i in range(2):
            free(self.buffers[i])
            self.buffers[i] = NULL
            self.sizes[i] = 0


cdef list _idle = []


cdef Workspace acquire(bint compress, bint decompress):
    cdef Workspace ws
    try:
        ws = _idle.pop()
    except IndexError:
        ws = Workspace.__new__(Workspace)
    if compress and ws.cctx == NULL:
        ws.cctx = zstd.new_cctx()
        if ws.cctx == NULL:
            raise MemoryError("no memory for a zstd compression context")
    if decompress and ws.dctx == NULL:
        ws.dctx = zstd.new_dctx()
        if ws.dctx == NULL:
            raise MemoryError("no memory for a zstd decompression context")
    return ws


cdef void release(Workspace ws):
    cdef size_t kept = ws.size()
    cdef Workspace other
    for other in tuple(_idle):
        kept += other.size()
    if kept > KEEP_BYTES:
        ws.empty()
    if len(_idle) < 64:
        _idle.append(ws)


def forget_workspaces() -> None:
    """Free the memory kept between calls; also what a change of the libzstd in use needs."""
    _idle.clear()


# -- encoding one stream --------------------------------------------------------------------------------------------

cdef size_t payload_bound(size_t n) noexcept nogil:
    cdef size_t a = rle_bound(n), b = zstd.bound(n)
    return a if a > b else b


cdef const uint8_t *make_stream(
    Workspace ws, const uint8_t *src, size_t words, int stride, int lane, int mode
) noexcept nogil:
    """One lane under one predictor in the workspace's first buffer, or NULL."""
    cdef uint8_t *stream = ws.buffer(0, words)
    if stream != NULL:
        if stride == 1:
            lanes.predict(src, words, mode, stream)
        else:
            lanes.predict_lane(src, words, stride, lane, mode, stream)
    return stream


cdef void make_streams(
    const uint8_t *src, size_t words, int stride, int lane, uint8_t *streams, size_t *rle_least_sizes
) noexcept nogil:
    """One lane under all predictors, one after the other at `streams`, and a lower bound of each one's RLE length.

    Works in tiles, so that the source is read once and repeats are counted in bytes that are still in the cache.
    """
    cdef size_t repeats[MODES]
    cdef size_t start = 0, end, seen
    cdef int mode
    memset(repeats, 0, sizeof(repeats))
    while start < words:
        end = words if words - start <= TILE else start + TILE
        lanes.predict_lane_part(src, start, end, stride, lane, streams, streams + words, streams + 2 * words)
        seen = start - 1 if start else 0
        for mode in range(MODES):
            repeats[mode] += lanes.repeats(streams + <size_t>mode * words + seen, end - seen)
        start = end
    for mode in range(MODES):
        rle_least_sizes[mode] = rle_least(words, repeats[mode])


cdef size_t make_candidate(
    Workspace ws, const uint8_t *stream, size_t words, int mode, int allow, int level, bint sized, size_t limit,
    size_t rle_least_size, uint8_t *dst, Candidate *result
) noexcept nogil:
    """Payload of one stream: the smaller of RLE (known to take at least `rle_least_size`) and zstd, RLE at equality.

    Returns its size with the payload in dst (payload_bound(words) bytes), NOT_SMALLER when it does not come below
    `limit`, or NO_MEMORY.
    """
    cdef size_t size, best = limit
    cdef bint found = False
    if allow & ALLOW_ZSTD:
        if sized:
            size = zstd.compress(ws.cctx, dst, payload_bound(words), stream, words, level)
        else:
            size = zstd.compress_unsized(ws.cctx, dst, payload_bound(words), stream, words, level)
        if zstd.is_error(size):
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


cdef int likely_mode(Workspace ws, const uint8_t *src, size_t words, int stride, int lane, int modes) noexcept nogil:
    """The allowed predictor whose sampled stream has the lowest order-0 entropy; the first at equality."""
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
            lanes.predict_lane(src + start * <size_t>stride, n, stride, lane, mode, tile)
            lanes.histogram(tile + 1, n - 1, counts)  # the first byte lacks its true neighbour
            start += step
        bits = entropy(counts)
        if bits < best:
            best = bits
            best_mode = mode
    return best_mode


cdef size_t encode_lane(
    Workspace ws, const uint8_t *src, size_t words, int stride, int lane, int modes, int allow, int level,
    uint8_t *dst
) noexcept nogil:
    """Header and smallest payload of one lane at dst; its length, or NO_MEMORY, or TOO_LONG."""
    cdef Candidate chosen = Candidate(0, 0, 0)
    cdef const uint8_t *stream
    cdef uint8_t *streams = NULL
    cdef uint8_t *target = dst + HEADER
    cdef size_t got, limit = <size_t>-3
    cdef size_t[MODES] rle
    cdef int mode
    if modes == ALL_MODES and stride > 1 and words <= FUSE_UP_TO:
        streams = ws.buffer(0, MODES * words)
        if streams == NULL:
            return NO_MEMORY
        make_streams(src, words, stride, lane, streams, rle)
    for mode in range(MODES):
        if not modes >> mode & 1:
            continue
        if streams != NULL:
            stream = streams + <size_t>mode * words
        else:
            stream = make_stream(ws, src, words, stride, lane, mode)
            if stream == NULL:
                return NO_MEMORY
            rle[mode] = 0
        if target == NULL:
            return NO_MEMORY
        got = make_candidate(ws, stream, words, mode, allow, level, True, limit, rle[mode], target, &chosen)
        if got == NO_MEMORY:
            return NO_MEMORY
        if got != NOT_SMALLER:
            if target != dst + HEADER:
                memcpy(dst + HEADER, target, got)
            limit = got
        target = ws.buffer(1, payload_bound(words))  # the first candidate stays where it is until a better one comes
    if chosen.size > U32_MAX:
        return TOO_LONG
    store_header(dst, chosen, words)
    return HEADER + chosen.size


# -- bytes that are written before their length is known ------------------------------------------------------------

cdef extern from "Python.h":
    PyObject *PyBytes_New "PyBytes_FromStringAndSize" (const char *, Py_ssize_t) except NULL
    int _PyBytes_Resize(PyObject **, Py_ssize_t) except -1


cdef PyObject *new_bytes(size_t size) except NULL:
    return PyBytes_New(NULL, size)


cdef bytes cut_bytes(PyObject *data, size_t size):
    """The first `size` bytes as an object of its own; takes the reference. NO_MEMORY and TOO_LONG raise."""
    if size >= TOO_LONG:
        Py_DECREF(<object>data)
        raise no_frame(size)
    _PyBytes_Resize(&data, size)  # shrinks in place
    cdef bytes result = <bytes>data
    Py_DECREF(result)
    return result


cdef object no_frame(size_t code):
    if code == NO_MEMORY:
        return MemoryError("no memory for the streams of a frame")
    return LimitError("a payload above 2^32 - 1 bytes, which is what a stream header can say: encode pieces")


# -- encoding for Python ----------------------------------------------------------------------------------------------

def encode(const uint8_t[::1] data not None, int stride, modes, int allow, int level, bint sample) -> bytes:
    """The frame of `data` on the calling thread.

    `modes`: for each lane a bit set of predictors (1 raw, 2 delta_seq, 4 xor_seq). `allow`: 1 RLE, 2 zstd, 3 both.
    `sample`: let a histogram of samples choose the predictor instead of trying each.
    """
    cdef size_t n = data.shape[0], words, at = 4, got = 0
    cdef int lane
    cdef int[4] lane_modes
    cdef uint8_t *out
    words = check_words(n, stride)
    for lane in range(stride):
        lane_modes[lane] = modes[lane]
    cdef PyObject *frame = new_bytes(4 + <size_t>stride * (HEADER + payload_bound(words)))
    out = <uint8_t *>PyBytes_AS_STRING(<object>frame)
    cdef Workspace ws = acquire(allow & ALLOW_ZSTD != 0, False)
    with nogil:
        store_le32(out, <uint32_t>words)
        for lane in range(stride):
            if sample:
                lane_modes[lane] = 1 << likely_mode(ws, &data[0], words, stride, lane, lane_modes[lane])
            got = encode_lane(ws, &data[0], words, stride, lane, lane_modes[lane], allow, level, out + at)
            if got >= TOO_LONG:
                at = got
                break
            at += got
    release(ws)
    return cut_bytes(frame, at)


def encode_stream(const uint8_t[::1] data not None, int modes, int allow, int level=3) -> bytes:
    """One stream with its header, from bytes that are no lanes of anything; an empty one is ten zero bytes."""
    cdef size_t n = data.shape[0], got
    if n == 0:
        return bytes(HEADER)
    cdef PyObject *out = new_bytes(HEADER + payload_bound(n))
    cdef uint8_t *dst = <uint8_t *>PyBytes_AS_STRING(<object>out)
    cdef Workspace ws = acquire(allow & ALLOW_ZSTD != 0, False)
    with nogil:
        got = encode_lane(ws, &data[0], n, 1, 0, modes, allow, level, dst)
    release(ws)
    return cut_bytes(out, got)


def candidate(
    const uint8_t[::1] data not None, int stride, int lane, int mode, int allow, int level, bint sized, size_t limit
):
    """One lane under one predictor: `(payload size, mode, codec, header + payload)`, or None if not below `limit`."""
    cdef size_t words = check_words(data.shape[0], stride), got
    cdef Candidate chosen = Candidate(0, 0, 0)
    cdef const uint8_t *stream
    cdef uint8_t *out
    cdef Workspace ws = acquire(allow & ALLOW_ZSTD != 0, False)
    try:
        with nogil:
            out = ws.buffer(1, HEADER + payload_bound(words))
            got = NO_MEMORY
            if out != NULL:
                stream = make_stream(ws, &data[0], words, stride, lane, mode)
                if stream != NULL:
                    got = make_candidate(
                        ws, stream, words, mode, allow, level, sized, limit, 0, out + HEADER, &chosen
                    )
                if got != NO_MEMORY and chosen.size > U32_MAX:
                    got = TOO_LONG
                if got < TOO_LONG:
                    store_header(out, chosen, words)
        if got >= TOO_LONG:
            raise no_frame(got)
        if got == NOT_SMALLER:
            return None
        return chosen.size, chosen.mode, chosen.codec, PyBytes_FromStringAndSize(<char *>out, HEADER + chosen.size)
    finally:
        release(ws)


def likely_modes(const uint8_t[::1] data not None, int stride, modes) -> list:
    """For each lane a bit set with the one predictor that effort "fast" takes."""
    cdef size_t words = check_words(data.shape[0], stride)
    cdef int lane, mode, lane_modes
    cdef list out = []
    cdef Workspace ws = acquire(False, False)
    for lane in range(stride):
        lane_modes = modes[lane]
        with nogil:
            mode = likely_mode(ws, &data[0], words, stride, lane, lane_modes)
        out.append(1 << mode)
    release(ws)
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


# -- taking a frame apart -----------------------------------------------------------------------------------------------

cdef struct Stream:
    int mode
    int codec
    size_t raw_len
    size_t payload_len
    size_t offset           # of the payload


cdef Stream parse_stream(const uint8_t *frame, size_t n, size_t at, int allow, str where) except *:
    """The stream header at `at`, under every check that needs no decoding."""
    cdef Stream s
    if n - at < HEADER:
        raise FrameError(f"{where} at offset {at}: truncated header: {HEADER} bytes expected, {n - at} found")
    s.mode = frame[at]
    s.codec = frame[at + 1]
    s.raw_len = load_le32(frame + at + 2)
    s.payload_len = load_le32(frame + at + 6)
    s.offset = at + HEADER
    if s.payload_len > n - s.offset:
        raise FrameError(
            f"{where} at offset {at}: payload_len {s.payload_len} but only {n - s.offset} bytes follow the header"
        )
    if s.raw_len == 0:
        if s.payload_len != 0:
            raise FrameError(f"{where} at offset {at}: raw_len 0 with a payload of {s.payload_len} bytes")
        return s
    if s.codec != CODEC_RLE and s.codec != CODEC_ZSTD:
        raise FrameError(f"{where} at offset {at}: codec {s.codec}: expected 0 (RLE) or 1 (ZSTD)")
    if s.mode >= MODES:
        raise FrameError(f"{where} at offset {at}: mode {s.mode}: expected 0 (raw), 1 (delta_seq) or 2 (xor_seq)")
    if not allow & (ALLOW_RLE if s.codec == CODEC_RLE else ALLOW_ZSTD):
        raise FrameError(f"{where} at offset {at}: codec {'RLE' if s.codec == CODEC_RLE else 'ZSTD'} is not available")
    # Decoders allocate raw_len bytes: refuse claims that no payload like this can fill (format.md, "Bounds").
    if (
        2 * s.raw_len > 131 * s.payload_len
        if s.codec == CODEC_RLE
        else s.raw_len > most_output(frame + s.offset, s.payload_len)
    ):
        raise FrameError(
            f"{where} at offset {at}: raw_len {s.raw_len} cannot come from this payload of {s.payload_len} bytes"
        )
    return s


cdef bint decode_payload(Workspace ws, const uint8_t *frame, Stream s, uint8_t *dst) noexcept nogil:
    cdef size_t got
    if s.codec == CODEC_RLE:
        if not rle_decode(frame + s.offset, s.payload_len, dst, s.raw_len):
            return False
    else:
        if s.payload_len == 0:
            return False
        got = zstd.decompress(ws.dctx, dst, s.raw_len, frame + s.offset, s.payload_len)
        if zstd.is_error(got) or got != s.raw_len:
            return False
    lanes.unpredict(dst, s.raw_len, s.mode)
    return True


cdef object bad_payload(Stream s, str where):
    return FrameError(
        f"{where}: the {'RLE' if s.codec == CODEC_RLE else 'ZSTD'} payload of {s.payload_len} bytes at offset "
        f"{s.offset} does not decode to exactly {s.raw_len} bytes"
    )


def lane_name(int stride, int lane) -> str:
    return ("lo", "hi")[lane] if stride == 2 else f"lane{lane}"


cdef class Frame:
    """A frame whose headers have been checked, and its lanes once they are decoded.

    `stride` 0 finds the container: the number of streams that fill the bytes exactly and agree with the word count.
    """
    cdef const uint8_t[::1] data
    cdef readonly int stride
    cdef readonly size_t words
    cdef Stream streams[4]
    cdef int allow
    cdef Workspace ws
    cdef uint8_t *scratch

    def __init__(self, const uint8_t[::1] data not None, int stride, int allow):
        cdef size_t n = data.shape[0], at = 4
        cdef int lane, last = 4 if stride == 0 else stride
        self.data = data
        self.allow = allow
        if n < 4:
            raise FrameError(f"frame: {n} bytes: expected at least 4 (the word count)")
        self.words = load_le32(&data[0])
        if self.words == 0:
            raise FrameError("frame at offset 0: word count 0: expected at least 1")
        lane = 0
        while lane < last and not (stride == 0 and lane == 2 and at == n):
            where = f"stream {lane}"
            try:
                self.streams[lane] = parse_stream(&data[0], n, at, allow, where)
            except FrameError as error:
                if stride or lane < 2:
                    raise
                raise FrameError(
                    f"frame: after the two streams of an FP16 frame, at offset {at}, there are {n - at} more bytes, "
                    f"but not the two more streams of an FP32 frame ({error})"
                ) from None
            if self.streams[lane].raw_len != self.words:
                raise FrameError(
                    f"{where} at offset {at}: raw_len {self.streams[lane].raw_len}: expected the word count {self.words}"
                )
            at = self.streams[lane].offset + self.streams[lane].payload_len
            lane += 1
        if at != n:
            raise FrameError(f"frame: {n - at} bytes after its last stream, which ends at offset {at}")
        self.stride = lane

    def __dealloc__(self):
        self.close()

    cpdef close(self):
        """Give the decoded lanes back."""
        if self.ws is not None:
            release(self.ws)
            self.ws = None
            self.scratch = NULL

    def decode(self) -> None:
        """Decode every lane on this thread; `FrameError` at the first bad one."""
        cdef int lane, bad = -1
        self.reserve()
        with nogil:
            for lane in range(self.stride):
                if not decode_payload(
                    self.ws, &self.data[0], self.streams[lane], self.scratch + <size_t>lane * self.words
                ):
                    bad = lane
                    break
        if bad >= 0:
            raise bad_payload(self.streams[bad], lane_name(self.stride, bad))

    def reserve(self) -> None:
        """Take the memory of the lanes, so that `decode_lane` may run on several threads."""
        if self.ws is None:
            self.ws = acquire(False, True)
            self.scratch = self.ws.buffer(0, self.words * <size_t>self.stride)
            if self.scratch == NULL:
                raise MemoryError(f"no memory to decode {self.words * <size_t>self.stride} bytes")

    def decode_lane(self, int lane) -> None:
        """Decode one lane after `reserve`."""
        cdef bint ok
        if self.ws is None or not 0 <= lane < self.stride:
            raise KvmnnError(f"lane {lane}: reserve() first, expected 0 to {self.stride - 1}")
        cdef Workspace ws = acquire(False, True)
        with nogil:
            ok = decode_payload(ws, &self.data[0], self.streams[lane], self.scratch + <size_t>lane * self.words)
        release(ws)
        if not ok:
            raise bad_payload(self.streams[lane], lane_name(self.stride, lane))

    def join(self, uint8_t[::1] out not None) -> None:
        """Write the decoded words to `out`, which has exactly their bytes."""
        cdef const uint8_t *parts[4]
        self.check_lanes(out.shape[0], parts)
        with nogil:
            lanes.join(parts, self.words, self.stride, &out[0])

    def equals(self, const uint8_t[::1] raw not None) -> bool:
        """Whether the decoded words are exactly the bytes of `raw`."""
        cdef const uint8_t *parts[4]
        cdef bint same
        if <size_t>raw.shape[0] != self.words * <size_t>self.stride:
            return False
        self.check_lanes(raw.shape[0], parts)
        with nogil:
            same = lanes.join_equals(parts, self.words, self.stride, &raw[0])
        return same

    cdef int check_lanes(self, size_t n, const uint8_t **parts) except -1:
        cdef int lane
        if self.ws is None:
            raise KvmnnError("the frame is not decoded")
        if n != self.words * <size_t>self.stride:
            raise KvmnnError(f"a buffer of {n} bytes: expected {self.words * <size_t>self.stride}")
        for lane in range(self.stride):
            parts[lane] = self.scratch + <size_t>lane * self.words
        return 0

    def stream(self, int lane) -> tuple:
        """`(mode, codec, raw_len, payload_len, payload offset)` of one lane."""
        cdef Stream s = self.streams[lane]
        return s.mode, s.codec, s.raw_len, s.payload_len, s.offset

    def lane_entropy(self, int lane) -> float:
        """Order-0 entropy of a decoded lane in bits per byte."""
        cdef uint64_t counts[256]
        if self.ws is None:
            raise KvmnnError("the frame is not decoded")
        memset(counts, 0, sizeof(counts))
        with nogil:
            lanes.histogram(self.scratch + <size_t>lane * self.words, self.words, counts)
        return entropy(counts)


def decode_stream(const uint8_t[::1] data not None, int allow) -> tuple:
    """The first stream of `data` and how many bytes it took; what follows it is not looked at."""
    cdef size_t n = data.shape[0]
    cdef Stream s
    cdef bint ok
    cdef bytes out
    cdef uint8_t *to
    if n < HEADER:
        raise FrameError(f"stream: truncated header: {HEADER} bytes expected, {n} found")
    s = parse_stream(&data[0], n, 0, allow, "stream")
    out = PyBytes_FromStringAndSize(NULL, s.raw_len)
    if s.raw_len:
        to = <uint8_t *>PyBytes_AS_STRING(out)
        ws = acquire(False, True)
        with nogil:
            ok = decode_payload(ws, &data[0], s, to)
        release(ws)
        if not ok:
            raise bad_payload(s, "stream")
    return out, s.offset + s.payload_len
