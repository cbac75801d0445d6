"""Where the bytes of decoded lanes are: in memory of ours, or still in a payload that is nothing but raw blocks.

Lanes of noise are such payloads: their bytes go from the frame to the words without a copy between.
"""

# A payload of raw zstd blocks only is not decoded: its bytes go from the frame to the words. That is half of an fp16
# frame and three quarters of an fp32 one. Everything else goes to ZSTD_decompress. Blocks are checked again while they
# are read, as a mapped file may be written to meanwhile.

from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memset

from kvmnn.frames._streams cimport MIN_BYPASS_BYTES, lane_kernels

cdef enum:
    MIN_FRAME_BYTES = 9  # bytes of a frame with a block: magic number, descriptor, size, header of the block
    MAX_BLOCK_BYTES = 128 << 10
    SINGLE_SEGMENT_FLAG = 0x20     # of a descriptor: no window follows it ...
    CONTENT_SIZE_FLAG_MASK = 0xC0  # ... and these say how wide the size is; others, of checksum and dictionary, are not
                                   # set
    MIN_WINDOW_EXPONENT = 7        # of a window: 2^(10 + that), the largest block, ...
    MAX_WINDOW_EXPONENT = 17       # ... and what every release takes


cdef struct LaneReader:
    const uint8_t *cursor  # the next byte ...
    size_t remaining       # ... and how many lie there
    const uint8_t *payload
    size_t size
    size_t next_offset    # offset of what follows in the payload ...
    bint is_last_block    # ... which is a frame, not a block
    uint8_t *zero_buffer  # memory for what is missing, `num_elements` bytes
    size_t num_elements


cdef inline size_t load_le(const uint8_t *p, size_t bytes) noexcept nogil:
    cdef size_t value = 0, i
    for i in range(bytes):
        value |= <size_t>p[i] << 8 * i
    return value


cdef inline size_t read_content_size(const uint8_t *p, size_t n, size_t *pos) noexcept nogil:
    """What the frame at `pos` says it holds, or 0 where it does not, or has anything but blocks; `pos` moves to the
    first."""
    cdef size_t width, value, size_pos
    cdef int descriptor, window
    if pos[0] > n or n - pos[0] < MIN_FRAME_BYTES or load_le(p + pos[0], 4) != <size_t>0xFD2FB528:
        return 0
    descriptor, window = p[pos[0] + 4], p[pos[0] + 5] >> 3
    if descriptor & ~(CONTENT_SIZE_FLAG_MASK | SINGLE_SEGMENT_FLAG):
        return 0
    size_pos = pos[0] + 5
    if not descriptor & SINGLE_SEGMENT_FLAG:
        if not descriptor & CONTENT_SIZE_FLAG_MASK or not MIN_WINDOW_EXPONENT <= window <= MAX_WINDOW_EXPONENT:
            return 0
        size_pos += 1
    width = <size_t>1 << (descriptor >> 6)
    if n - size_pos < width:
        return 0
    value = load_le(p + size_pos, width)
    pos[0] = size_pos + width
    return value + 256 if width == 2 else value


cdef inline size_t read_raw_block(const uint8_t *p, size_t n, size_t *pos, bint *is_last) noexcept nogil:
    """Bytes of the raw block at `pos`, which moves to them, or 0 where there is none."""
    cdef size_t header, size
    if n - pos[0] < 3:
        return 0
    header = load_le(p + pos[0], 3)
    size = header >> 3
    if header & 6 or size > MAX_BLOCK_BYTES or size > n - pos[0] - 3:
        return 0
    pos[0] += 3
    is_last[0] = header & 1
    return size


cdef inline bint is_raw_payload(const uint8_t *p, size_t n, size_t expected) noexcept nogil:
    """Whether a payload is `expected` bytes in raw blocks: frames that ZSTD_decompress accepts in every release."""
    cdef size_t pos = 0, total = 0, content, size
    cdef bint is_last = False
    while pos < n:
        content = read_content_size(p, n, &pos)
        if content == 0:
            return False
        total += content
        if total > expected:
            return False
        is_last = False
        while not is_last:
            size = read_raw_block(p, n, &pos, &is_last)
            if size == 0 or size > content:
                return False
            pos += size
            content -= size
        if content:
            return False
    return total == expected


cdef inline void refill(LaneReader *reader) noexcept nogil:
    """Go on to the next block. What is no block any more (someone else writes to the frame) is read as zeros."""
    if reader.is_last_block:
        read_content_size(reader.payload, reader.size, &reader.next_offset)
    reader.remaining = (
        read_raw_block(reader.payload, reader.size, &reader.next_offset, &reader.is_last_block)
        if reader.next_offset <= reader.size else 0
    )
    reader.cursor = reader.payload + reader.next_offset
    reader.next_offset += reader.remaining
    if reader.remaining == 0:
        memset(reader.zero_buffer, 0, reader.num_elements)
        reader.cursor, reader.remaining = reader.zero_buffer, reader.num_elements


cdef inline size_t take_contiguous(
    LaneReader *readers, int itemsize, size_t num_elements, const uint8_t **fragments
) noexcept nogil:
    """How many of the next `num_elements` words lie in one part of every lane, and where; they are passed over."""
    cdef int lane
    for lane in range(itemsize):
        if readers[lane].remaining == 0:
            refill(&readers[lane])
        if readers[lane].remaining < num_elements:
            num_elements = readers[lane].remaining
    for lane in range(itemsize):
        fragments[lane] = readers[lane].cursor
        readers[lane].cursor += num_elements
        readers[lane].remaining -= num_elements
    return num_elements


cdef inline void join_next(LaneReader *readers, size_t num_elements, int itemsize, uint8_t *out) noexcept nogil:
    """Write the next words of the lanes to `out`."""
    cdef const uint8_t *fragments[4]
    cdef size_t n
    cdef bint bypass_cache = num_elements >= MIN_BYPASS_BYTES // <size_t>itemsize
    while num_elements:
        n = take_contiguous(readers, itemsize, num_elements, fragments)
        if bypass_cache:
            lane_kernels().join_nontemporal(fragments, n, itemsize, out)
        else:
            lane_kernels().join(fragments, n, itemsize, out)
        out += n * <size_t>itemsize
        num_elements -= n


cdef inline bint compare_next(
    LaneReader *readers, size_t num_elements, int itemsize, const uint8_t *expected
) noexcept nogil:
    """Whether the next words of the lanes are those at `expected`."""
    cdef const uint8_t *fragments[4]
    cdef size_t n
    while num_elements:
        n = take_contiguous(readers, itemsize, num_elements, fragments)
        if not lane_kernels().join_equals(fragments, n, itemsize, expected):
            return False
        expected += n * <size_t>itemsize
        num_elements -= n
    return True


cdef inline void count_next(LaneReader *reader, size_t n, uint64_t *counts) noexcept nogil:
    """Add the next bytes of one lane to a histogram."""
    cdef const uint8_t *fragment
    cdef size_t num_bytes
    while n:
        num_bytes = take_contiguous(reader, 1, n, &fragment)
        lane_kernels().histogram(fragment, num_bytes, counts)
        n -= num_bytes
