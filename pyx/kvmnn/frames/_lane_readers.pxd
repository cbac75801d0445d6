"""Where the bytes of decoded lanes are: in memory of ours, or still in a payload that is nothing but raw blocks.

Lanes of noise are such payloads: their bytes go from the frame to the words without a copy between.
"""

from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memset

from kvmnn.frames._streams cimport PAST_FROM, lanes

cdef enum:
    LEAST_FRAME = 9      # bytes of a frame with a block: magic number, descriptor, size, header of the block
    MOST_BLOCK = 128 << 10
    ONE_SEGMENT = 0x20   # of a descriptor: no window follows it ...
    SIZE_BITS = 0xC0     # ... and these say how wide the size is; others, of checksum and dictionary, are not set
    LEAST_WINDOW = 7     # of a window: 2^(10 + that), the largest block, ...
    MOST_WINDOW = 17     # ... and what every release takes


cdef struct Reader:
    const uint8_t *at    # the next byte ...
    size_t left          # ... and how many lie there
    const uint8_t *payload
    size_t size
    size_t next          # offset of what follows in the payload ...
    bint last            # ... which is a frame, not a block
    uint8_t *spare       # memory for what is missing, `words` bytes
    size_t words


cdef inline size_t load_size(const uint8_t *p, size_t bytes) noexcept nogil:
    cdef size_t value = 0, i
    for i in range(bytes):
        value |= <size_t>p[i] << 8 * i
    return value


cdef inline size_t content_at(const uint8_t *p, size_t n, size_t *at) noexcept nogil:
    """What the frame at `at` says it holds, or 0 where it does not, or has anything but blocks; `at` moves to the first."""
    cdef size_t width, value, sized
    cdef int descriptor, window
    if at[0] > n or n - at[0] < LEAST_FRAME or load_size(p + at[0], 4) != <size_t>0xFD2FB528:
        return 0
    descriptor, window = p[at[0] + 4], p[at[0] + 5] >> 3
    if descriptor & ~(SIZE_BITS | ONE_SEGMENT):
        return 0
    sized = at[0] + 5
    if not descriptor & ONE_SEGMENT:
        if not descriptor & SIZE_BITS or not LEAST_WINDOW <= window <= MOST_WINDOW:
            return 0
        sized += 1
    width = <size_t>1 << (descriptor >> 6)
    if n - sized < width:
        return 0
    value = load_size(p + sized, width)
    at[0] = sized + width
    return value + 256 if width == 2 else value


cdef inline size_t block_at(const uint8_t *p, size_t n, size_t *at, bint *last) noexcept nogil:
    """Bytes of the raw block at `at`, which moves to them, or 0 where there is none."""
    cdef size_t header, size
    if n - at[0] < 3:
        return 0
    header = load_size(p + at[0], 3)
    size = header >> 3
    if header & 6 or size > MOST_BLOCK or size > n - at[0] - 3:
        return 0
    at[0] += 3
    last[0] = header & 1
    return size


cdef inline bint is_raw(const uint8_t *p, size_t n, size_t expected) noexcept nogil:
    """Whether a payload is `expected` bytes in raw blocks: frames that ZSTD_decompress accepts in every release."""
    cdef size_t at = 0, total = 0, content, size
    cdef bint last = False
    while at < n:
        content = content_at(p, n, &at)
        if content == 0:
            return False
        total += content
        if total > expected:
            return False
        last = False
        while not last:
            size = block_at(p, n, &at, &last)
            if size == 0 or size > content:
                return False
            at += size
            content -= size
        if content:
            return False
    return total == expected


cdef inline void refill(Reader *r) noexcept nogil:
    """Go on to the next block. What is no block any more (someone else writes to the frame) is read as zeros."""
    if r.last:
        content_at(r.payload, r.size, &r.next)
    r.left = block_at(r.payload, r.size, &r.next, &r.last) if r.next <= r.size else 0
    r.at = r.payload + r.next
    r.next += r.left
    if r.left == 0:
        memset(r.spare, 0, r.words)
        r.at, r.left = r.spare, r.words


cdef inline size_t together(Reader *readers, int stride, size_t words, const uint8_t **parts) noexcept nogil:
    """How many of the next `words` words lie in one part of every lane, and where; they are passed over."""
    cdef int lane
    for lane in range(stride):
        if readers[lane].left == 0:
            refill(&readers[lane])
        if readers[lane].left < words:
            words = readers[lane].left
    for lane in range(stride):
        parts[lane] = readers[lane].at
        readers[lane].at += words
        readers[lane].left -= words
    return words


cdef inline void join_next(Reader *readers, size_t words, int stride, uint8_t *out) noexcept nogil:
    """Write the next words of the lanes to `out`."""
    cdef const uint8_t *parts[4]
    cdef size_t n
    cdef bint past = words >= PAST_FROM // <size_t>stride
    while words:
        n = together(readers, stride, words, parts)
        if past:
            lanes().join_past(parts, n, stride, out)
        else:
            lanes().join(parts, n, stride, out)
        out += n * <size_t>stride
        words -= n


cdef inline bint next_equals(Reader *readers, size_t words, int stride, const uint8_t *expected) noexcept nogil:
    """Whether the next words of the lanes are those at `expected`."""
    cdef const uint8_t *parts[4]
    cdef size_t n
    while words:
        n = together(readers, stride, words, parts)
        if not lanes().join_equals(parts, n, stride, expected):
            return False
        expected += n * <size_t>stride
        words -= n
    return True


cdef inline void count_next(Reader *reader, size_t n, uint64_t *counts) noexcept nogil:
    """Add the next bytes of one lane to a histogram."""
    cdef const uint8_t *part
    cdef size_t some
    while n:
        some = together(reader, 1, n, &part)
        lanes().histogram(part, some, counts)
        n -= some
