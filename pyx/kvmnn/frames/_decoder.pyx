"""Frames of MNN's lossless codec, taken apart under the verdicts of MNN's own decoder.

Word sizes are called `stride`: 2 for the FP16 container (lanes lo, hi), 4 for the FP32 container (lanes 0 to 3).
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize

from kvmnn.frames._hashing cimport Sums, add_rest, add_to_sums, checksum_of, checksum_of_sums
from kvmnn.frames._lane_readers cimport Reader, count_next, is_raw, join_next, next_equals
from kvmnn.frames._stream_header cimport ALLOW_RLE, ALLOW_ZSTD, CODEC_RLE, CODEC_ZSTD, HEADER, MODES, load_le32
from kvmnn.frames._streams cimport KVMNN_MODE_RAW, entropy, lanes, rle_decode
from kvmnn.frames._workspace cimport Workspace, acquire, release
from kvmnn.frames._zstdlib cimport most_output, zstd

from ..errors import FrameError, KvmnnError


cdef enum:
    JOIN_TILE = 4096  # words that are joined and added up before the next: a multiple of what a checksum adds at once


cdef struct Stream:
    int mode
    int codec
    size_t raw_len
    size_t payload_len
    size_t offset           # of the payload
    bint in_place           # nothing to decode: raw blocks of zstd, without a predictor


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
    s.in_place = False
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
    if s.mode == KVMNN_MODE_RAW and s.codec == CODEC_ZSTD:
        s.in_place = is_raw(frame + s.offset, s.payload_len, s.raw_len)
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
    lanes().unpredict(dst, s.raw_len, s.mode)
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
                if not self.streams[lane].in_place and not decode_payload(
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
        if self.streams[lane].in_place:
            return
        cdef Workspace ws = acquire(False, True)
        with nogil:
            ok = decode_payload(ws, &self.data[0], self.streams[lane], self.scratch + <size_t>lane * self.words)
        release(ws)
        if not ok:
            raise bad_payload(self.streams[lane], lane_name(self.stride, lane))

    def join(self, uint8_t[:, :] out not None) -> None:
        """Write the decoded words to the rows of `out`, each contiguous, which together have exactly their bytes."""
        cdef Reader readers[4]
        cdef Py_ssize_t row
        cdef size_t words = out.shape[1] // self.stride
        if out.shape[1] > 1 and out.strides[1] != 1:
            raise KvmnnError(f"rows with a stride of {out.strides[1]}: expected contiguous ones")
        if words * <size_t>self.stride != <size_t>out.shape[1]:
            raise KvmnnError(f"rows of {out.shape[1]} bytes: expected words of {self.stride}")
        self.start(out.shape[0] * out.shape[1], readers)
        if self.is_among(&out[0, 0], &out[out.shape[0] - 1, 0], out.shape[1]):
            self.settle()
            self.start(out.shape[0] * out.shape[1], readers)
        with nogil:
            for row in range(out.shape[0]):
                join_next(readers, words, self.stride, &out[row, 0])

    def join_whole(self, out not None) -> bool:
        """`join` to an array whose bytes lie together; False, and nothing done, where they do not, are not to be written to,
        are another number, or the frame lies among them. A view of rows would take as long as a short frame."""
        cdef Py_buffer view
        cdef Reader readers[4]
        cdef uint8_t *to
        cdef bint fits
        try:
            PyObject_GetBuffer(out, &view, PyBUF_WRITABLE)
        except (BufferError, TypeError, ValueError):
            return False
        try:
            to = <uint8_t *>view.buf
            fits = <size_t>view.len == self.words * <size_t>self.stride and not self.is_among(to, to, view.len)
            if fits:
                self.start(view.len, readers)
                with nogil:
                    join_next(readers, self.words, self.stride, to)
            return fits
        finally:
            PyBuffer_Release(&view)

    def equals(self, const uint8_t[::1] raw not None) -> bool:
        """Whether the decoded words are exactly the bytes of `raw`."""
        cdef Reader readers[4]
        cdef bint same
        if <size_t>raw.shape[0] != self.words * <size_t>self.stride:
            return False
        self.start(raw.shape[0], readers)
        with nogil:
            same = next_equals(readers, self.words, self.stride, &raw[0])
        return same

    cdef bint is_among(self, const uint8_t *first, const uint8_t *last, size_t row_bytes) noexcept:
        """Whether the frame lies between the first and the last of some rows, whichever comes first in memory."""
        cdef const uint8_t *frame = &self.data[0]
        if last < first:
            first, last = last, first
        return first < frame + self.data.shape[0] and frame < last + row_bytes

    cdef void settle(self) noexcept:
        """Bring all lanes into memory of our own."""
        cdef int lane
        for lane in range(self.stride):
            if self.streams[lane].in_place:
                decode_payload(self.ws, &self.data[0], self.streams[lane], self.scratch + <size_t>lane * self.words)
                self.streams[lane].in_place = False

    cdef int start(self, size_t n, Reader *readers) except -1:
        """Readers at the beginning of the lanes, which together have `n` bytes."""
        cdef int lane
        if self.ws is None:
            raise KvmnnError("the frame is not decoded")
        if n != self.words * <size_t>self.stride:
            raise KvmnnError(f"a buffer of {n} bytes: expected {self.words * <size_t>self.stride}")
        for lane in range(self.stride):
            readers[lane].spare = self.scratch + <size_t>lane * self.words
            readers[lane].words = self.words
            readers[lane].at = readers[lane].spare
            readers[lane].left = 0 if self.streams[lane].in_place else self.words
            readers[lane].payload = &self.data[self.streams[lane].offset]
            readers[lane].size = self.streams[lane].payload_len
            readers[lane].next = 0
            readers[lane].last = True
        return 0

    def stream(self, int lane) -> tuple:
        """`(mode, codec, raw_len, payload_len, payload offset)` of one lane."""
        cdef Stream s = self.streams[lane]
        return s.mode, s.codec, s.raw_len, s.payload_len, s.offset

    def lane_entropy(self, int lane) -> float:
        """Order-0 entropy of a decoded lane in bits per byte."""
        cdef uint64_t counts[256]
        cdef Reader readers[4]
        self.start(self.words * <size_t>self.stride, readers)
        memset(counts, 0, sizeof(counts))
        with nogil:
            count_next(&readers[lane], self.words, counts)
        return entropy(counts)


def decode_into(tuple frames, int stride, int allow, frames_sum, uint8_t[:, :, :, :] out not None) -> None:
    """Decode frame i into ``out[i]``, ``[row, token, byte]``, whose last two axes are contiguous.

    Nothing is written unless all frames decode, to exactly their part of `out`. `frames_sum`, where it is not None, is
    compared with their checksum, which goes on from frame to frame, when all is written: they are in the cache then.
    """
    cdef Reader readers[4]
    cdef Py_ssize_t part, row, row_bytes = out.shape[2] * out.shape[3]
    cdef size_t words = row_bytes // stride, size = <size_t>out.shape[1] * row_bytes
    cdef uint64_t found = 0
    cdef Frame frame
    cdef list parsed = []
    if len(frames) != out.shape[0]:
        raise KvmnnError(f"{len(frames)} frames: expected {out.shape[0]}")
    if (out.shape[3] > 1 and out.strides[3] != 1) or (out.shape[2] > 1 and out.strides[2] != out.shape[3]):
        raise KvmnnError(f"out has strides {out.strides[2]}, {out.strides[3]}: expected contiguous tokens")
    if row_bytes % stride:
        raise KvmnnError(f"rows of {row_bytes} bytes: expected words of {stride}")
    for data in frames:
        frame = Frame(data, stride, allow)
        if frame.words * <size_t>stride != size:
            raise KvmnnError(f"out has {size} bytes: the frame holds {frame.words * stride}")
        frame.decode()
        parsed.append(frame)
    for part in range(out.shape[0]):
        frame = parsed[part]
        frame.start(size, readers)
        with nogil:
            for row in range(out.shape[1]):
                join_next(readers, words, stride, &out[part, row, 0, 0])
        frame.close()
        if frames_sum is not None:
            found = sum_after(frames[part], found)
    if frames_sum is not None and found != <uint64_t>frames_sum:
        raise FrameError("the frames do not match their checksum")


cdef uint64_t join_summed(
    Reader *readers, size_t words, int stride, uint8_t *out, uint64_t seed
) noexcept nogil:
    """Join the next `words` words of the lanes at `out`; their checksum. Tile by tile, while they are in the cache."""
    cdef Sums sums
    cdef size_t left = words, tile, size = 0, done = 0
    cdef int lane
    memset(&sums, 0, sizeof(sums))
    while left:
        tile = min(left, <size_t>JOIN_TILE)
        join_next(readers, tile, stride, out)
        size = tile * <size_t>stride
        done = add_to_sums(&sums, out, size)
        out += size
        left -= tile
    add_rest(&sums, out - (size - done), size - done)
    return checksum_of_sums(&sums, words * <size_t>stride, seed)


cdef uint64_t sum_after(const uint8_t[::1] data, uint64_t seed) noexcept:
    """The checksum of `data`, continued from `seed`."""
    with nogil:
        if data.shape[0]:
            seed = checksum_of(&data[0], data.shape[0], seed)
    return seed


cdef int compare_sum(const uint8_t[::1] data, uint64_t expected) except -1:
    if sum_after(data, 0) != expected:
        raise FrameError("the frame does not match its checksum")
    return 0


def decode_checked(
    const uint8_t[::1] data not None, int stride, int allow, uint64_t frame_sum, uint64_t raw_sum,
    uint8_t[:, :] out not None
) -> None:
    """Decode a frame to the rows of `out`, each contiguous, and compare both checksums while the bytes are at hand.

    `frame_sum` is over the frame, `raw_sum` goes on from row to row. `out` is written only where `frame_sum` is right,
    which is found after decoding: the frame is in the cache then.
    """
    cdef Reader readers[4]
    cdef Frame frame
    cdef Py_ssize_t row
    cdef size_t words = out.shape[1] // stride
    cdef uint64_t found
    if out.shape[1] > 1 and out.strides[1] != 1:
        raise KvmnnError(f"rows with a stride of {out.strides[1]}: expected contiguous ones")
    try:
        frame = Frame(data, stride, allow)
        if words * stride != <size_t>out.shape[1] or frame.words != words * <size_t>out.shape[0]:
            raise FrameError(f"the frame holds {frame.words * stride} bytes: expected {out.shape[0] * out.shape[1]}")
        frame.decode()
    except FrameError:
        compare_sum(data, frame_sum)
        raise
    compare_sum(data, frame_sum)
    frame.start(out.shape[0] * out.shape[1], readers)
    found = 0
    with nogil:
        for row in range(out.shape[0]):
            found = join_summed(readers, words, stride, &out[row, 0], found)
    frame.close()
    if found != raw_sum:
        raise FrameError("the frame decodes to other words than went into it")


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
        to = <uint8_t *>PyBytes_AsString(out)
        ws = acquire(False, True)
        with nogil:
            ok = decode_payload(ws, &data[0], s, to)
        release(ws)
        if not ok:
            raise bad_payload(s, "stream")
    return out, s.offset + s.payload_len
