"""Frames of effort "fast": zstd payloads by a writer of its own, which does only what pays in K and V (docs/format.md).

A lane without redundancy becomes raw blocks. Of the others, what earlier rows of the lane have at the same places is
copied from there, and the rest gets Huffman codes.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize, PyBytes_Size

from kvmnn._simd cimport active_level
from kvmnn.frames._stream_header cimport CODEC_ZSTD, HEADER, store_le32
from kvmnn.frames._streams cimport KVMNN_MODE_DELTA, KVMNN_MODE_RAW, entropy, lanes
from kvmnn.frames._workspace cimport Workspace, acquire, release, unwritten_bytes
from kvmnn.frames._zstdlib cimport zstd

from ..errors import KvmnnError


cdef extern from "kvmnn/frames/repeats.h" nogil:
    ctypedef struct kvmnn_repeat:
        uint32_t at
        uint32_t length
        uint32_t distance
    size_t kvmnn_repeats_bound(size_t n)
    size_t kvmnn_repeats_table(size_t n)
    size_t kvmnn_repeats_find(
        int level, const uint8_t *lane, size_t n, int dear, uint32_t *table, kvmnn_repeat *out)

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


cdef enum:
    LOOK = 256               # bytes of one look at a lane ...
    LOOKS = 16               # ... and how many looks it takes
    DELTA_LOOKS = 4          # ... at what one byte adds to that before it
    ZSTD_HEADER = 14         # of a frame, at most
    RAW_HEADER = 3           # of a raw block
    LEVEL_EXACT = 3          # of lanes with next to nothing in them, where libzstd is fast as well, and of smooth ones

cdef double FLAT_BITS = 7.85  # a byte; random bytes come to 7.955 in a sample of that size
cdef double POOR_BITS = 2.0
cdef double DEAR_BITS = 4.0   # where a byte takes more, shorter repeats pay
cdef double SMOOTH_SHARE = 0.6  # of a byte's bits: where steps take less, short repeats are all over, which libzstd finds

cdef size_t NO_MEMORY = <size_t>-1

cdef kvmnn_sequence_tables _tables
kvmnn_sequence_tables_init(&_tables)


cdef struct Scratch:
    uint8_t *writer
    uint8_t *lane
    uint32_t *table
    kvmnn_repeat *repeats


cdef double sampled_bits(
    const uint8_t *src, size_t words, int stride, int lane, int mode, size_t looks
) noexcept nogil:
    """Order-0 entropy of a sample of a lane, or of its steps, in bits a byte."""
    cdef uint64_t counts[256]
    cdef uint8_t look[LOOK]
    cdef size_t begin = 0, size, step = words // looks, end = looks * step
    memset(counts, 0, sizeof(counts))
    if step <= LOOK:
        step, end = LOOK, words
    while begin < end:
        size = min(<size_t>LOOK, words - begin)
        lanes().predict_lane(src + begin * <size_t>stride, size, stride, lane, mode, look)
        lanes().histogram(look, size, counts)
        begin += step
    return entropy(counts)


cdef size_t raw_size(size_t n) noexcept nogil:
    """Bytes of a frame of raw blocks."""
    cdef uint8_t header[ZSTD_HEADER]
    return (kvmnn_zstd_header(header, n) - header) + (n + KVMNN_ZSTD_RAW_BLOCK - 1) // KVMNN_ZSTD_RAW_BLOCK * RAW_HEADER + n


cdef void raw_frame(const uint8_t *src, size_t words, int stride, int lane, uint8_t *dst) noexcept nogil:
    """A lane as raw blocks, straight from the words to where it stays."""
    cdef uint8_t *at = kvmnn_zstd_header(dst, words)
    cdef size_t begin = 0, size
    while begin < words:
        size = min(<size_t>KVMNN_ZSTD_RAW_BLOCK, words - begin)
        at = kvmnn_zstd_raw_block(at, size, begin + size == words)
        lanes().predict_lane(src + begin * <size_t>stride, size, stride, lane, KVMNN_MODE_RAW, at)
        at += size
        begin += size


cdef size_t lane_frame(
    Workspace ws, const uint8_t *lane, size_t n, double bits, bint smooth, Scratch scratch, uint8_t *dst
) noexcept nogil:
    """The payload of one lane in dst (kvmnn_zstd_bound(n) bytes); its size, 0 for one of raw blocks, or NO_MEMORY."""
    cdef bint flat = bits > FLAT_BITS
    cdef size_t size, count
    if bits < POOR_BITS or smooth:
        size = zstd.compress(ws.cctx, dst, kvmnn_zstd_bound(n), lane, n, LEVEL_EXACT)
        return NO_MEMORY if zstd.is_error(size) else size
    count = kvmnn_repeats_find(active_level, lane, n, bits > DEAR_BITS, scratch.table, scratch.repeats)
    if flat and not count:
        return 0
    return kvmnn_zstd_write(active_level, &_tables, lane, n, scratch.repeats, count, flat, scratch.writer, dst)


cdef inline size_t aligned(size_t n) noexcept nogil:
    return (n + 63) & ~<size_t>63


cdef bint make_room(Workspace ws, size_t words, Scratch *scratch) noexcept nogil:
    cdef size_t writer = aligned(kvmnn_zstd_scratch()), lane = aligned(words)
    cdef size_t table = aligned(kvmnn_repeats_table(words) * sizeof(uint32_t))
    cdef uint8_t *at = ws.buffer(0, writer + lane + table + kvmnn_repeats_bound(words) * sizeof(kvmnn_repeat))
    if at == NULL:
        return False
    scratch.writer, scratch.lane = at, at + writer
    scratch.table = <uint32_t *>(at + writer + lane)
    scratch.repeats = <kvmnn_repeat *>(at + writer + lane + table)
    return True


cdef bint make_lanes(
    Workspace ws, const uint8_t *src, size_t words, int stride, uint8_t **made, size_t *sizes
) noexcept nogil:
    """The payload of each lane and its size; NULL for a lane that `raw_frame` is to write. False: no memory."""
    cdef size_t room = kvmnn_zstd_bound(words)
    cdef uint8_t *out = ws.buffer(1, <size_t>stride * room)
    cdef Scratch scratch
    cdef double bits
    cdef bint smooth
    cdef int lane
    if out == NULL or not make_room(ws, words, &scratch):
        return False
    for lane in range(stride):
        bits = sampled_bits(src, words, stride, lane, KVMNN_MODE_RAW, LOOKS)
        smooth = sampled_bits(src, words, stride, lane, KVMNN_MODE_DELTA, DELTA_LOOKS) < SMOOTH_SHARE * bits
        made[lane] = out + <size_t>lane * room
        lanes().predict_lane(src, words, stride, lane, KVMNN_MODE_RAW, scratch.lane)
        sizes[lane] = lane_frame(ws, scratch.lane, words, bits, smooth, scratch, made[lane])
        if sizes[lane] == NO_MEMORY:
            return False
        if sizes[lane] == 0:
            made[lane], sizes[lane] = NULL, raw_size(words)
    return True


cdef Workspace lanes_made(
        const uint8_t *src, size_t words, int stride, uint8_t **made, size_t *sizes):
    """`make_lanes` in a workspace that the caller releases, once it has copied them."""
    cdef Workspace ws = acquire(True, False)
    cdef bint ok
    with nogil:
        ok = make_lanes(ws, src, words, stride, made, sizes)
    if not ok:
        release(ws)
        raise MemoryError("no memory for the streams of a frame")
    return ws


def encode(const uint8_t[::1] data not None, int stride) -> bytes:
    """The frame of one piece of whole words, at least one of them."""
    cdef size_t words = data.shape[0] // stride, size = 4
    cdef size_t[4] sizes
    cdef uint8_t *made[4]
    cdef uint8_t *at
    cdef int lane
    cdef bytes frame
    cdef Workspace ws = lanes_made(&data[0], words, stride, made, sizes)
    try:
        for lane in range(stride):
            size += HEADER + sizes[lane]
        frame = unwritten_bytes(size)
        at = <uint8_t *>PyBytes_AsString(frame)
        with nogil:  # new pages cost as much as the copy
            store_le32(at, <uint32_t>words)
            at += 4
            for lane in range(stride):
                at[0], at[1] = KVMNN_MODE_RAW, CODEC_ZSTD
                store_le32(at + 2, <uint32_t>words)
                store_le32(at + 6, <uint32_t>sizes[lane])
                if made[lane] == NULL:
                    raw_frame(&data[0], words, stride, lane, at + HEADER)
                else:
                    memcpy(at + HEADER, made[lane], sizes[lane])
                at += HEADER + sizes[lane]
        return frame
    finally:
        release(ws)


def payloads(const uint8_t[::1] data not None, int stride) -> list:
    """A zstd payload for each lane of whole words, at least one of them, as predictor "raw" has it.

    In place of one that has nothing but raw blocks, how long it is: `write_raw` writes it where it is to stay.
    """
    cdef size_t words = data.shape[0] // stride
    cdef size_t[4] sizes
    cdef uint8_t *made[4]
    cdef uint8_t *copies[4]
    cdef int lane
    cdef list found = []
    cdef Workspace ws = lanes_made(&data[0], words, stride, made, sizes)
    try:
        for lane in range(stride):
            if made[lane] == NULL:
                found.append(sizes[lane])
            else:
                found.append(PyBytes_FromStringAndSize(NULL, sizes[lane]))
                copies[lane] = <uint8_t *>PyBytes_AsString(found[lane])
        with nogil:
            for lane in range(stride):
                if made[lane] != NULL:
                    memcpy(copies[lane], made[lane], sizes[lane])
        return found
    finally:
        release(ws)


def write_raw(bytes frame not None, size_t at, const uint8_t[::1] data not None, int stride, int lane) -> None:
    """A lane of whole words as a zstd payload of raw blocks, to where it stays in `frame`, which is `unwritten`."""
    cdef size_t words = data.shape[0] // stride, size = PyBytes_Size(frame)
    cdef uint8_t *to = <uint8_t *>PyBytes_AsString(frame)
    if not words or at > size or raw_size(words) > size - at:
        raise KvmnnError(f"raw blocks of {words} bytes at {at} of {size}: not there")
    with nogil:
        raw_frame(&data[0], words, stride, lane, to + at)
