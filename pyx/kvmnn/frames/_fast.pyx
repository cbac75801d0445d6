"""Frames of effort "fast": zstd payloads by a writer of its own, which does only what pays in K and V (docs/format.md).

A lane without redundancy becomes raw blocks. Where rows were there before, all lanes copy them. Other lanes get Huffman
codes; for a lane of 16-bit floats without repeats libzstd finds the few matches left, at its fastest level.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize, PyBytes_Size

from kvmnn.frames._stream_header cimport CODEC_ZSTD, HEADER, store_le32
from kvmnn.frames._streams cimport KVMNN_MODE_RAW, entropy, lanes
from kvmnn.frames._workspace cimport Workspace, acquire, release, unwritten_bytes
from kvmnn.frames._zstdlib cimport zstd

from ..errors import KvmnnError


cdef extern from "kvmnn/frames/repeats.h" nogil:
    ctypedef struct kvmnn_repeat:
        uint32_t at
        uint32_t length
        uint32_t distance
    size_t kvmnn_repeats_bound(size_t words)
    size_t kvmnn_repeats_table(size_t words)
    enum:
        KVMNN_BYTE_TABLE
    size_t kvmnn_byte_repeats_bound(size_t n)
    size_t kvmnn_byte_repeats_find(
        const uint8_t *lane, size_t n, const kvmnn_repeat *known, size_t count, uint32_t *table, kvmnn_repeat *out)
    size_t kvmnn_repeats_find(const uint8_t *src, size_t words, int stride, uint32_t *table, kvmnn_repeat *out)

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
        const kvmnn_sequence_tables *tables, const uint8_t *src, size_t n, const kvmnn_repeat *repeats, size_t count,
        int flat, uint8_t *scratch, uint8_t *dst)


cdef enum:
    LOOK = 256               # bytes of one look at a lane ...
    LOOKS = 16               # ... and how many looks it takes
    STRETCH = 8 << 10        # bytes that are looked at for matches in a lane
    LEAST_STRETCH = 512
    SMALL_BYTES = 128 << 10  # up to here matches in a lane alone are looked for: later ones pay for themselves less
    ZSTD_HEADER = 14         # of a frame, at most
    RAW_HEADER = 3           # of a raw block
    LEVEL_FASTEST = -1
    LEVEL_EXACT = 3          # of lanes with next to nothing in them, where libzstd is fast as well

cdef double FLAT_BITS = 7.85  # a byte; random bytes come to 7.955 in a sample of that size
cdef double POOR_BITS = 2.0
cdef double OFTEN = 0.12      # of a stretch, where matches in a lane are worth looking for ...
cdef double MOSTLY = 0.5      # ... and where libzstd's own level finds so much more that it is as fast

cdef size_t NO_MEMORY = <size_t>-1

cdef kvmnn_sequence_tables _tables
kvmnn_sequence_tables_init(&_tables)


cdef struct Scratch:
    uint8_t *writer
    uint8_t *lane
    uint32_t *table
    kvmnn_repeat *repeats
    kvmnn_repeat *more_repeats


cdef double sampled_bits(const uint8_t *src, size_t words, int stride, int lane) noexcept nogil:
    """Order-0 entropy of a sample of a lane, in bits a byte."""
    cdef uint64_t counts[256]
    cdef uint8_t look[LOOK]
    cdef size_t begin = 0, size, step = words // LOOKS, end = LOOKS * step
    memset(counts, 0, sizeof(counts))
    if step <= LOOK:
        step, end = LOOK, words
    while begin < end:
        size = min(<size_t>LOOK, words - begin)
        lanes().predict_lane(src + begin * <size_t>stride, size, stride, lane, KVMNN_MODE_RAW, look)
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


cdef double repeated_share(const uint8_t *lane, size_t n, Scratch scratch) noexcept nogil:
    """Share of a stretch in the middle of a lane that was there before in it."""
    cdef size_t size = n // 16 if n // 16 < STRETCH else STRETCH, covered = 0, i, count
    if size < LEAST_STRETCH:
        return 0
    count = kvmnn_byte_repeats_find(lane + n // 2, size, NULL, 0, scratch.table, scratch.more_repeats)
    for i in range(count):
        covered += scratch.more_repeats[i].length
    return <double>covered / <double>size


cdef size_t lane_frame(
    Workspace ws, const uint8_t *lane, size_t n, double bits, kvmnn_repeat *repeats, size_t count, bint search,
    bint small, Scratch scratch, uint8_t *dst
) noexcept nogil:
    """The payload of one lane in dst (kvmnn_zstd_bound(n) bytes); its size, or NO_MEMORY."""
    cdef bint flat = bits > FLAT_BITS
    cdef double share = 0
    cdef size_t size
    if bits < POOR_BITS:
        size = zstd.compress(ws.cctx, dst, kvmnn_zstd_bound(n), lane, n, LEVEL_EXACT)
        return NO_MEMORY if zstd.is_error(size) else size
    if not flat and not (small and search):
        share = repeated_share(lane, n, scratch)
    if share > MOSTLY:
        size = zstd.compress(ws.cctx, dst, kvmnn_zstd_bound(n), lane, n, LEVEL_EXACT)
        return NO_MEMORY if zstd.is_error(size) else size
    if search and count == 0 and not flat and zstd.compress_literals != NULL:
        size = zstd.compress_literals(ws.cctx, dst, kvmnn_zstd_bound(n), lane, n, LEVEL_FASTEST)
        return NO_MEMORY if zstd.is_error(size) else size
    if not flat and ((small and not search) or share > OFTEN):
        count = kvmnn_byte_repeats_find(lane, n, repeats, count, scratch.table, scratch.more_repeats)
        repeats = scratch.more_repeats
    return kvmnn_zstd_write(&_tables, lane, n, repeats, count, flat, scratch.writer, dst)


cdef inline size_t aligned(size_t n) noexcept nogil:
    return (n + 63) & ~<size_t>63


cdef bint make_room(Workspace ws, size_t words, Scratch *scratch) noexcept nogil:
    cdef size_t writer = aligned(kvmnn_zstd_scratch()), lane = aligned(words)
    cdef size_t table = kvmnn_repeats_table(words), repeats = kvmnn_repeats_bound(words)
    cdef size_t more = repeats + kvmnn_byte_repeats_bound(words)
    cdef uint8_t *at
    if table < KVMNN_BYTE_TABLE:
        table = KVMNN_BYTE_TABLE
    table, repeats = aligned(table * sizeof(uint32_t)), aligned(repeats * sizeof(kvmnn_repeat))
    at = ws.buffer(0, writer + lane + table + repeats + more * sizeof(kvmnn_repeat))
    if at == NULL:
        return False
    scratch.writer, scratch.lane = at, at + writer
    scratch.table = <uint32_t *>(at + writer + lane)
    scratch.repeats = <kvmnn_repeat *>(at + writer + lane + table)
    scratch.more_repeats = <kvmnn_repeat *>(at + writer + lane + table + repeats)
    return True


cdef bint make_lanes(
    Workspace ws, const uint8_t *src, size_t words, int stride, bint search, uint8_t **made, size_t *sizes
) noexcept nogil:
    """The payload of each lane and its size; NULL for a lane that `raw_frame` is to write. False: no memory."""
    cdef size_t count, room = kvmnn_zstd_bound(words)
    cdef bint small = words * <size_t>stride <= SMALL_BYTES
    cdef uint8_t *out = ws.buffer(1, <size_t>stride * room)
    cdef Scratch scratch
    cdef double bits
    cdef int lane
    if out == NULL or not make_room(ws, words, &scratch):
        return False
    count = kvmnn_repeats_find(src, words, stride, scratch.table, scratch.repeats)
    for lane in range(stride):
        bits = sampled_bits(src, words, stride, lane)
        if bits > FLAT_BITS and count == 0:
            made[lane], sizes[lane] = NULL, raw_size(words)
            continue
        made[lane] = out + <size_t>lane * room
        lanes().predict_lane(src, words, stride, lane, KVMNN_MODE_RAW, scratch.lane)
        sizes[lane] = lane_frame(
            ws, scratch.lane, words, bits, scratch.repeats, count, search, small, scratch, made[lane]
        )
        if sizes[lane] == NO_MEMORY:
            return False
    return True


cdef Workspace lanes_made(
        const uint8_t *src, size_t words, int stride, bint search, uint8_t **made, size_t *sizes):
    """`make_lanes` in a workspace that the caller releases, once it has copied them."""
    cdef Workspace ws = acquire(True, False)
    cdef bint ok
    with nogil:
        ok = make_lanes(ws, src, words, stride, search, made, sizes)
    if not ok:
        release(ws)
        raise MemoryError("no memory for the streams of a frame")
    return ws


def encode(const uint8_t[::1] data not None, int stride, bint search) -> bytes:
    """The frame of one piece of whole words, at least one of them; `search` as in `payloads`."""
    cdef size_t words = data.shape[0] // stride, size = 4
    cdef size_t[4] sizes
    cdef uint8_t *made[4]
    cdef uint8_t *at
    cdef int lane
    cdef bytes frame
    cdef Workspace ws = lanes_made(&data[0], words, stride, search, made, sizes)
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


def payloads(const uint8_t[::1] data not None, int stride, bint search) -> list:
    """A zstd payload for each lane of whole words, at least one of them, as predictor "raw" has it.

    In place of one that has nothing but raw blocks, how long it is: `write_raw` writes it where it is to stay.
    `search`: let libzstd look for matches in lanes that have no repeats.
    """
    cdef size_t words = data.shape[0] // stride
    cdef size_t[4] sizes
    cdef uint8_t *made[4]
    cdef uint8_t *copies[4]
    cdef int lane
    cdef list found = []
    cdef Workspace ws = lanes_made(&data[0], words, stride, search, made, sizes)
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
