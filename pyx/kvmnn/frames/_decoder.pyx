"""Decode frames of MNN's lossless codec with the verdicts of MNN's own decoder.

Word sizes are called `itemsize`: 2 for the FP16 container (lanes lo, hi), 4 for the FP32 container (lanes 0 to 3).
"""

# The caller's buffer is written last: every stream is decoded and checked in scratch memory, so that a refused frame
# leaves `out` untouched. From 8 MiB on it is written with nontemporal stores, tile by tile: a cache line that is
# written in part would be read from memory first.

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize

from kvmnn.frames._hashing cimport ChecksumSums, add_tail, add_to_sums, compute_checksum, finish_checksum
from kvmnn.frames._lane_readers cimport LaneReader, compare_next, count_next, is_raw_payload, join_next
from kvmnn.frames._stream_header cimport (
    ALLOW_RLE, ALLOW_ZSTD, CODEC_RLE, CODEC_ZSTD, NUM_MODES, STREAM_HEADER_BYTES, load_le32,
)
from kvmnn.frames._streams cimport KVMNN_MODE_RAW, compute_entropy, lane_kernels, rle_decode
from kvmnn.frames._workspace cimport Workspace, acquire, release
from kvmnn.frames._zstdlib cimport max_output_size, zstd

from ..errors import FrameError, KvmnnError


cdef enum:
    JOIN_TILE_ELEMENTS = 4096  # words that are joined and added up before the next: a multiple of what a checksum adds
                               # at once


cdef struct StreamHeader:
    int mode
    int codec
    size_t raw_len
    size_t payload_len
    size_t offset        # of the payload
    bint is_raw_payload  # nothing to decode: raw blocks of zstd, without a predictor


cdef StreamHeader parse_stream(const uint8_t *frame, size_t n, size_t pos, int allowed_codecs, str label) except *:
    """Parse the stream header at `pos`, with every check that needs no decoding."""
    cdef StreamHeader header
    if n - pos < STREAM_HEADER_BYTES:
        raise FrameError(
            f"{label} at offset {pos}: truncated header: {STREAM_HEADER_BYTES} bytes expected, {n - pos} found")
    header.mode = frame[pos]
    header.codec = frame[pos + 1]
    header.raw_len = load_le32(frame + pos + 2)
    header.payload_len = load_le32(frame + pos + 6)
    header.offset = pos + STREAM_HEADER_BYTES
    header.is_raw_payload = False
    if header.payload_len > n - header.offset:
        raise FrameError(
            f"{label} at offset {pos}: payload_len {header.payload_len} but only {n - header.offset} bytes "
            "follow the header"
        )
    if header.raw_len == 0:
        if header.payload_len != 0:
            raise FrameError(f"{label} at offset {pos}: raw_len 0 with a payload of {header.payload_len} bytes")
        return header
    if header.codec != CODEC_RLE and header.codec != CODEC_ZSTD:
        raise FrameError(f"{label} at offset {pos}: codec {header.codec}: expected 0 (RLE) or 1 (ZSTD)")
    if header.mode >= NUM_MODES:
        raise FrameError(f"{label} at offset {pos}: mode {header.mode}: expected 0 (raw), 1 (delta_seq) or 2 (xor_seq)")
    if not allowed_codecs & (ALLOW_RLE if header.codec == CODEC_RLE else ALLOW_ZSTD):
        raise FrameError(
            f"{label} at offset {pos}: codec {'RLE' if header.codec == CODEC_RLE else 'ZSTD'} is not available")
    # Decoders allocate raw_len bytes: refuse claims that no payload like this can fill (format.md, "Bounds").
    if (
        2 * header.raw_len > 131 * header.payload_len
        if header.codec == CODEC_RLE
        else header.raw_len > max_output_size(frame + header.offset, header.payload_len)
    ):
        raise FrameError(
            f"{label} at offset {pos}: raw_len {header.raw_len} cannot come from this payload of "
            f"{header.payload_len} bytes"
        )
    if header.mode == KVMNN_MODE_RAW and header.codec == CODEC_ZSTD:
        header.is_raw_payload = is_raw_payload(frame + header.offset, header.payload_len, header.raw_len)
    return header


cdef bint decode_payload(Workspace ws, const uint8_t *frame, StreamHeader header, uint8_t *dst) noexcept nogil:
    cdef size_t size
    if header.codec == CODEC_RLE:
        if not rle_decode(frame + header.offset, header.payload_len, dst, header.raw_len):
            return False
    else:
        if header.payload_len == 0:
            return False
        size = zstd.decompress(ws.dctx, dst, header.raw_len, frame + header.offset, header.payload_len)
        if zstd.is_error(size) or size != header.raw_len:
            return False
    lane_kernels().unpredict(dst, header.raw_len, header.mode)
    return True


cdef object make_payload_error(StreamHeader header, str label):
    return FrameError(
        f"{label}: the {'RLE' if header.codec == CODEC_RLE else 'ZSTD'} payload of {header.payload_len} bytes "
        f"at offset {header.offset} does not decode to exactly {header.raw_len} bytes"
    )


def get_lane_name(int itemsize, int lane) -> str:
    return ("lo", "hi")[lane] if itemsize == 2 else f"lane{lane}"


cdef class ParsedFrame:
    """A frame with validated headers, and its lanes once they are decoded.

    `itemsize` 0 detects the container: the number of streams that fill the bytes exactly and agree with the word count.
    """
    cdef const uint8_t[::1] data
    cdef readonly int itemsize
    cdef readonly size_t num_elements
    cdef StreamHeader streams[4]
    cdef int allowed_codecs
    cdef Workspace ws
    cdef uint8_t *scratch

    def __init__(self, const uint8_t[::1] data not None, int itemsize, int allowed_codecs):
        cdef size_t n = data.shape[0], pos = 4
        cdef int lane, max_lanes = 4 if itemsize == 0 else itemsize
        self.data = data
        self.allowed_codecs = allowed_codecs
        if n < 4:
            raise FrameError(f"frame: {n} bytes: expected at least 4 (the word count)")
        self.num_elements = load_le32(&data[0])
        if self.num_elements == 0:
            raise FrameError("frame at offset 0: word count 0: expected at least 1")
        lane = 0
        while lane < max_lanes and not (itemsize == 0 and lane == 2 and pos == n):
            label = f"stream {lane}"
            try:
                self.streams[lane] = parse_stream(&data[0], n, pos, allowed_codecs, label)
            except FrameError as error:
                if itemsize or lane < 2:
                    raise
                raise FrameError(
                    f"frame: after the two streams of an FP16 frame, at offset {pos}, there are {n - pos} more bytes, "
                    f"but not the two more streams of an FP32 frame ({error})"
                ) from None
            if self.streams[lane].raw_len != self.num_elements:
                raise FrameError(
                    f"{label} at offset {pos}: raw_len {self.streams[lane].raw_len}: "
                    f"expected the word count {self.num_elements}"
                )
            pos = self.streams[lane].offset + self.streams[lane].payload_len
            lane += 1
        if pos != n:
            raise FrameError(f"frame: {n - pos} bytes after its last stream, which ends at offset {pos}")
        self.itemsize = lane

    def __dealloc__(self):
        self.close()

    cpdef close(self):
        """Release the decoded lanes."""
        if self.ws is not None:
            release(self.ws)
            self.ws = None
            self.scratch = NULL

    def decode(self) -> None:
        """Decode every lane on this thread; `FrameError` at the first bad one."""
        cdef int lane, bad_lane = -1
        self.reserve()
        with nogil:
            for lane in range(self.itemsize):
                if not self.streams[lane].is_raw_payload and not decode_payload(
                    self.ws, &self.data[0], self.streams[lane], self.scratch + <size_t>lane * self.num_elements
                ):
                    bad_lane = lane
                    break
        if bad_lane >= 0:
            raise make_payload_error(self.streams[bad_lane], get_lane_name(self.itemsize, bad_lane))

    def reserve(self) -> None:
        """Allocate the memory of the lanes, so that `decode_lane` may run on several threads."""
        if self.ws is None:
            self.ws = acquire(False, True)
            self.scratch = self.ws.get_buffer(0, self.num_elements * <size_t>self.itemsize)
            if self.scratch == NULL:
                raise MemoryError(f"no memory to decode {self.num_elements * <size_t>self.itemsize} bytes")

    def decode_lane(self, int lane) -> None:
        """Decode one lane after `reserve`."""
        cdef bint is_ok
        if self.ws is None or not 0 <= lane < self.itemsize:
            raise KvmnnError(f"lane {lane}: reserve() first, expected 0 to {self.itemsize - 1}")
        if self.streams[lane].is_raw_payload:
            return
        cdef Workspace ws = acquire(False, True)
        with nogil:
            is_ok = decode_payload(
                ws, &self.data[0], self.streams[lane], self.scratch + <size_t>lane * self.num_elements)
        release(ws)
        if not is_ok:
            raise make_payload_error(self.streams[lane], get_lane_name(self.itemsize, lane))

    def join(self, uint8_t[:, :] out not None) -> None:
        """Write the decoded words to the rows of `out`, each contiguous, of exactly their total size."""
        cdef LaneReader readers[4]
        cdef Py_ssize_t row
        cdef size_t num_elements = out.shape[1] // self.itemsize
        if out.shape[1] > 1 and out.strides[1] != 1:
            raise KvmnnError(f"rows with a stride of {out.strides[1]}: expected contiguous ones")
        if num_elements * <size_t>self.itemsize != <size_t>out.shape[1]:
            raise KvmnnError(f"rows of {out.shape[1]} bytes: expected words of {self.itemsize}")
        self.start_readers(out.shape[0] * out.shape[1], readers)
        if self.overlaps(&out[0, 0], &out[out.shape[0] - 1, 0], out.shape[1]):
            self.copy_raw_lanes()
            self.start_readers(out.shape[0] * out.shape[1], readers)
        with nogil:
            for row in range(out.shape[0]):
                join_next(readers, num_elements, self.itemsize, &out[row, 0])

    def join_contiguous(self, out not None) -> bool:
        """Join the lanes into a contiguous array; return False, with nothing done, for any other `out`.

        That is one that is not contiguous or writable, has another size, or overlaps the frame. A view of rows would
        take as long as decoding a short frame.
        """
        cdef Py_buffer view
        cdef LaneReader readers[4]
        cdef uint8_t *target
        cdef bint is_fitting
        try:
            PyObject_GetBuffer(out, &view, PyBUF_WRITABLE)
        except (BufferError, TypeError, ValueError):
            return False
        try:
            target = <uint8_t *>view.buf
            is_fitting = (
                <size_t>view.len == self.num_elements * <size_t>self.itemsize
                and not self.overlaps(target, target, view.len)
            )
            if is_fitting:
                self.start_readers(view.len, readers)
                with nogil:
                    join_next(readers, self.num_elements, self.itemsize, target)
            return is_fitting
        finally:
            PyBuffer_Release(&view)

    def equals(self, const uint8_t[::1] raw not None) -> bool:
        """Return whether the decoded words are exactly the bytes of `raw`."""
        cdef LaneReader readers[4]
        cdef bint is_equal
        if <size_t>raw.shape[0] != self.num_elements * <size_t>self.itemsize:
            return False
        self.start_readers(raw.shape[0], readers)
        with nogil:
            is_equal = compare_next(readers, self.num_elements, self.itemsize, &raw[0])
        return is_equal

    cdef bint overlaps(self, const uint8_t *first, const uint8_t *last, size_t row_bytes) noexcept:
        """Return whether the frame overlaps rows given by their first and last addresses, in any order."""
        cdef const uint8_t *frame = &self.data[0]
        if last < first:
            first, last = last, first
        return first < frame + self.data.shape[0] and frame < last + row_bytes

    cdef void copy_raw_lanes(self) noexcept:
        """Copy all undecoded lanes to own memory."""
        cdef int lane
        for lane in range(self.itemsize):
            if self.streams[lane].is_raw_payload:
                decode_payload(
                    self.ws, &self.data[0], self.streams[lane], self.scratch + <size_t>lane * self.num_elements)
                self.streams[lane].is_raw_payload = False

    cdef int start_readers(self, size_t n, LaneReader *readers) except -1:
        """Initialise readers at the start of the lanes, which together have `n` bytes."""
        cdef int lane
        if self.ws is None:
            raise KvmnnError("the frame is not decoded")
        if n != self.num_elements * <size_t>self.itemsize:
            raise KvmnnError(f"a buffer of {n} bytes: expected {self.num_elements * <size_t>self.itemsize}")
        for lane in range(self.itemsize):
            readers[lane].zero_buffer = self.scratch + <size_t>lane * self.num_elements
            readers[lane].num_elements = self.num_elements
            readers[lane].cursor = readers[lane].zero_buffer
            readers[lane].remaining = 0 if self.streams[lane].is_raw_payload else self.num_elements
            readers[lane].payload = &self.data[self.streams[lane].offset]
            readers[lane].size = self.streams[lane].payload_len
            readers[lane].next_offset = 0
            readers[lane].is_last_block = True
        return 0

    def get_stream(self, int lane) -> tuple:
        """Return `(mode, codec, raw_len, payload_len, payload offset)` of one lane."""
        cdef StreamHeader header = self.streams[lane]
        return header.mode, header.codec, header.raw_len, header.payload_len, header.offset

    def compute_lane_entropy(self, int lane) -> float:
        """Return the order-0 entropy of a decoded lane in bits per byte."""
        cdef uint64_t counts[256]
        cdef LaneReader readers[4]
        self.start_readers(self.num_elements * <size_t>self.itemsize, readers)
        memset(counts, 0, sizeof(counts))
        with nogil:
            count_next(&readers[lane], self.num_elements, counts)
        return compute_entropy(counts)


def decode_into(
    tuple frames, int itemsize, int allowed_codecs, frames_checksum, uint8_t[:, :, :, :] out not None
) -> None:
    """Decode frame i into ``out[i]``, ``[row, token, byte]``, whose last two axes are contiguous.

    Nothing is written unless all frames decode to exactly their part of `out`. `frames_checksum`, if not None, is the
    running checksum of all frames; it is compared at the end, when they are in the cache.
    """
    cdef LaneReader readers[4]
    cdef Py_ssize_t index, row, row_bytes = out.shape[2] * out.shape[3]
    cdef size_t num_elements = row_bytes // itemsize, size = <size_t>out.shape[1] * row_bytes
    cdef uint64_t checksum = 0
    cdef ParsedFrame frame
    cdef list parsed_frames = []
    if len(frames) != out.shape[0]:
        raise KvmnnError(f"{len(frames)} frames: expected {out.shape[0]}")
    if (out.shape[3] > 1 and out.strides[3] != 1) or (out.shape[2] > 1 and out.strides[2] != out.shape[3]):
        raise KvmnnError(f"out has strides {out.strides[2]}, {out.strides[3]}: expected contiguous tokens")
    if row_bytes % itemsize:
        raise KvmnnError(f"rows of {row_bytes} bytes: expected words of {itemsize}")
    for data in frames:
        frame = ParsedFrame(data, itemsize, allowed_codecs)
        if frame.num_elements * <size_t>itemsize != size:
            raise KvmnnError(f"out has {size} bytes: the frame holds {frame.num_elements * itemsize}")
        frame.decode()
        parsed_frames.append(frame)
    for index in range(out.shape[0]):
        frame = parsed_frames[index]
        frame.start_readers(size, readers)
        with nogil:
            for row in range(out.shape[1]):
                join_next(readers, num_elements, itemsize, &out[index, row, 0, 0])
        frame.close()
        if frames_checksum is not None:
            checksum = continue_checksum(frames[index], checksum)
    if frames_checksum is not None and checksum != <uint64_t>frames_checksum:
        raise FrameError("the frames do not match their checksum")


cdef uint64_t join_with_checksum(
    LaneReader *readers, size_t num_elements, int itemsize, uint8_t *out, uint64_t seed
) noexcept nogil:
    """Join the next `num_elements` words of the lanes at `out`, tile by tile; return their checksum."""
    cdef ChecksumSums sums
    cdef size_t remaining = num_elements, tile, size = 0, num_bytes = 0
    cdef int lane
    memset(&sums, 0, sizeof(sums))
    while remaining:
        tile = min(remaining, <size_t>JOIN_TILE_ELEMENTS)
        join_next(readers, tile, itemsize, out)
        size = tile * <size_t>itemsize
        num_bytes = add_to_sums(&sums, out, size)
        out += size
        remaining -= tile
    add_tail(&sums, out - (size - num_bytes), size - num_bytes)
    return finish_checksum(&sums, num_elements * <size_t>itemsize, seed)


cdef uint64_t continue_checksum(const uint8_t[::1] data, uint64_t seed) noexcept:
    """Return the checksum of `data`, continued from `seed`."""
    with nogil:
        if data.shape[0]:
            seed = compute_checksum(&data[0], data.shape[0], seed)
    return seed


cdef int check_checksum(const uint8_t[::1] data, uint64_t expected) except -1:
    if continue_checksum(data, 0) != expected:
        raise FrameError("the frame does not match its checksum")
    return 0


def decode_verified(
    const uint8_t[::1] data not None, int itemsize, int allowed_codecs, uint64_t frame_checksum, uint64_t rows_checksum,
    uint8_t[:, :] out not None
) -> None:
    """Decode a frame to the rows of `out`, each contiguous, and compare both checksums on the way.

    `frame_checksum` is over the frame, `rows_checksum` over all rows. `out` is written only if `frame_checksum` is
    right, which is checked after decoding, when the frame is in the cache.
    """
    cdef LaneReader readers[4]
    cdef ParsedFrame frame
    cdef Py_ssize_t row
    cdef size_t num_elements = out.shape[1] // itemsize
    cdef uint64_t checksum
    if out.shape[1] > 1 and out.strides[1] != 1:
        raise KvmnnError(f"rows with a stride of {out.strides[1]}: expected contiguous ones")
    try:
        frame = ParsedFrame(data, itemsize, allowed_codecs)
        if num_elements * itemsize != <size_t>out.shape[1] or frame.num_elements != num_elements * <size_t>out.shape[0]:
            raise FrameError(
                f"the frame holds {frame.num_elements * itemsize} bytes: expected {out.shape[0] * out.shape[1]}")
        frame.decode()
    except FrameError:
        check_checksum(data, frame_checksum)
        raise
    check_checksum(data, frame_checksum)
    frame.start_readers(out.shape[0] * out.shape[1], readers)
    checksum = 0
    with nogil:
        for row in range(out.shape[0]):
            checksum = join_with_checksum(readers, num_elements, itemsize, &out[row, 0], checksum)
    frame.close()
    if checksum != rows_checksum:
        raise FrameError("the frame decodes to other words than went into it")


def decode_stream(const uint8_t[::1] data not None, int allowed_codecs) -> tuple:
    """Decode the first stream of `data`; return it and its length. Later bytes are ignored."""
    cdef size_t n = data.shape[0]
    cdef StreamHeader header
    cdef bint is_ok
    cdef bytes out
    cdef uint8_t *target
    if n < STREAM_HEADER_BYTES:
        raise FrameError(f"stream: truncated header: {STREAM_HEADER_BYTES} bytes expected, {n} found")
    header = parse_stream(&data[0], n, 0, allowed_codecs, "stream")
    out = PyBytes_FromStringAndSize(NULL, header.raw_len)
    if header.raw_len:
        target = <uint8_t *>PyBytes_AsString(out)
        ws = acquire(False, True)
        with nogil:
            is_ok = decode_payload(ws, &data[0], header, target)
        release(ws)
        if not is_ok:
            raise make_payload_error(header, "stream")
    return out, header.offset + header.payload_len
