from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy, memset

cdef enum:
    NUM_COLUMNS = 8  # sums side by side: enough for vector registers and to hide the latency of additions
    CHECKSUM_STEP_BYTES = 8 * NUM_COLUMNS  # bytes of a word in each column


cdef struct ChecksumSums:
    uint64_t plain[NUM_COLUMNS]
    uint64_t weighted[NUM_COLUMNS]


cdef inline size_t add_to_sums(ChecksumSums *sums, const uint8_t *p, size_t n) noexcept nogil:
    """Add whole steps; how many bytes they are. For the fewer after them there is `add_tail`."""
    cdef uint64_t plain[NUM_COLUMNS]
    cdef uint64_t weighted[NUM_COLUMNS]
    cdef uint64_t word
    cdef size_t pos = 0
    cdef int column
    memcpy(plain, sums.plain, sizeof(plain))
    memcpy(weighted, sums.weighted, sizeof(weighted))
    while pos + CHECKSUM_STEP_BYTES <= n:
        for column in range(NUM_COLUMNS):  # word by word: through an array of eight, compilers take four times as long
            memcpy(&word, p + pos + 8 * column, 8)
            plain[column] += word
            weighted[column] += plain[column]
        pos += CHECKSUM_STEP_BYTES
    memcpy(sums.plain, plain, sizeof(plain))
    memcpy(sums.weighted, weighted, sizeof(weighted))
    return pos


cdef inline uint64_t finish_checksum(const ChecksumSums *sums, size_t n, uint64_t seed) noexcept nogil:
    """The checksum of `n` bytes that were added."""
    cdef uint64_t h = seed ^ n
    cdef int column
    for column in range(NUM_COLUMNS):
        h = (h ^ sums.plain[column]) * <uint64_t>0x9E3779B97F4A7C15ULL
        h = ((h ^ (h >> 29)) ^ sums.weighted[column]) * <uint64_t>0xBF58476D1CE4E5B9ULL
    return h


cdef inline void add_tail(ChecksumSums *sums, const uint8_t *p, size_t n) noexcept nogil:
    """Add the last bytes, fewer than a step, as if zeros followed them."""
    cdef uint8_t tail[CHECKSUM_STEP_BYTES]
    if n:
        memset(tail, 0, sizeof(tail))
        memcpy(tail, p, n)
        add_to_sums(sums, tail, sizeof(tail))


cdef inline uint64_t compute_checksum(const uint8_t *p, size_t n, uint64_t seed) noexcept nogil:
    """64 bits over `n` bytes and their number, continued from `seed`; the words are the machine's."""
    cdef ChecksumSums sums
    cdef size_t num_bytes
    memset(&sums, 0, sizeof(sums))
    num_bytes = add_to_sums(&sums, p, n)
    add_tail(&sums, p + num_bytes, n - num_bytes)
    return finish_checksum(&sums, n, seed)
