"""Frames of effort "fast": zstd payloads by a writer of its own, which does only what pays in K and V (docs/format.md).

A lane without redundancy becomes raw blocks. Where rows were there before, all lanes copy them. Other lanes get Huffman
codes; for a lane of 16-bit floats without repeats libzstd finds the few matches left, at its fastest level.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize

from kvmnn.frames._streams cimport KVMNN_MODE_RAW, entropy, lanes
from kvmnn.frames._workspace cimport Workspace, acquire, release
from kvmnn.frames._zstdlib cimport zstd


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


cdef double sampled_bits(const uint8_t *lane, size_t n) noexcept nogil:
    """Order-0 entropy of a sample, in bits a byte."""
    cdef uint64_t counts[256]
    cdef size_t i, step = n // LOOKS
    memset(counts, 0, sizeof(counts))
    if step <= LOOK:
        lanes().histogram(lane, n, counts)
    else:
        for i in range(<size_t>LOOKS):
            lanes().histogram(lane + i * step, LOOK, counts)
    return entropy(counts)


cdef size_t raw_frame(const uint8_t *lane, size_t n, uint8_t *dst) noexcept nogil:
    cdef uint8_t *at = kvmnn_zstd_header(dst, n)
    cdef size_t begin = 0, size
    while begin < n:
        size = n - begin if n - begin < KVMNN_ZSTD_RAW_BLOCK else KVMNN_ZSTD_RAW_BLOCK
        at = kvmnn_zstd_raw_block(at, size, begin + size == n)
        memcpy(at, lane + begin, size)
        at += size
        begin += size
    return at - dst


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
    Workspace ws, const uint8_t *lane, size_t n, kvmnn_repeat *repeats, size_t count, bint search, bint small,
    Scratch scratch, uint8_t *dst
) noexcept nogil:
    """The payload of one lane in dst (kvmnn_zstd_bound(n) bytes); its size, or NO_MEMORY."""
    cdef double bits = sampled_bits(lane, n)
    cdef bint flat = bits > FLAT_BITS
    cdef double share = 0
    cdef size_t size
    if flat and count == 0:
        return raw_frame(lane, n, dst)
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


def payloads(const uint8_t[::1] data not None, int stride, bint search) -> list:
    """A zstd payload for each lane of whole words, at least one of them, as predictor "raw" has it.

    `search`: let libzstd look for matches in lanes that have no repeats.
    """
    cdef size_t words = data.shape[0] // stride, count, got = NO_MEMORY, room = kvmnn_zstd_bound(words)
    cdef bint small = data.shape[0] <= SMALL_BYTES
    cdef Scratch scratch
    cdef uint8_t *out
    cdef size_t[4] sizes
    cdef int lane
    cdef list made
    cdef uint8_t *copies[4]
    cdef Workspace ws = acquire(True, False)
    try:
        with nogil:
            out = ws.buffer(1, <size_t>stride * room)
            if out != NULL and make_room(ws, words, &scratch):
                count = kvmnn_repeats_find(&data[0], words, stride, scratch.table, scratch.repeats)
                for lane in range(stride):
                    lanes().predict_lane(&data[0], words, stride, lane, KVMNN_MODE_RAW, scratch.lane)
                    got = lane_frame(
                        ws, scratch.lane, words, scratch.repeats, count, search, small, scratch,
                        out + <size_t>lane * room,
                    )
                    if got == NO_MEMORY:
                        break
                    sizes[lane] = got
        if got == NO_MEMORY:
            raise MemoryError("no memory for the streams of a frame")
        made = [PyBytes_FromStringAndSize(NULL, sizes[lane]) for lane in range(stride)]
        for lane in range(stride):
            copies[lane] = <uint8_t *>PyBytes_AsString(made[lane])
        with nogil:  # new pages cost as much as the copy
            for lane in range(stride):
                memcpy(copies[lane], out + <size_t>lane * room, sizes[lane])
        return made
    finally:
        release(ws)
