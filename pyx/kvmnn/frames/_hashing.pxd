from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy, memset

cdef enum:
    COLUMNS = 8  # sums side by side: enough for vector registers and to hide the latency of additions
    CHECKSUM_STEP = 8 * COLUMNS  # bytes of a word in each column


cdef struct Sums:
    uint64_t plain[COLUMNS]
    uint64_t weighted[COLUMNS]


cdef inline size_t add_to_sums(Sums *sums, const uint8_t *p, size_t n) noexcept nogil:
    """Add whole steps; how many bytes they are. For the fewer behind them there is `add_rest`."""
    cdef uint64_t plain[COLUMNS]
    cdef uint64_t weighted[COLUMNS]
    cdef uint64_t word
    cdef size_t at = 0
    cdef int column
    memcpy(plain, sums.plain, sizeof(plain))
    memcpy(weighted, sums.weighted, sizeof(weighted))
    while at + CHECKSUM_STEP <= n:
        for column in range(COLUMNS):  # word by word: through an array of eight, compilers take four times as long
            memcpy(&word, p + at + 8 * column, 8)
            plain[column] += word
            weighted[column] += plain[column]
        at += CHECKSUM_STEP
    memcpy(sums.plain, plain, sizeof(plain))
    memcpy(sums.weighted, weighted, sizeof(weighted))
    return at


cdef inline uint64_t checksum_of_sums(const Sums *sums, size_t n, uint64_t seed) noexcept nogil:
    """The checksum of `n` bytes that were added."""
    cdef uint64_t h = seed ^ n
    cdef int column
    for column in range(COLUMNS):
        h = (h ^ sums.plain[column]) * <uint64_t>0x9E3779B97F4A7C15ULL
        h = ((h ^ (h >> 29)) ^ sums.weighted[column]) * <uint64_t>0xBF58476D1CE4E5B9ULL
    return h


cdef inline void add_rest(Sums *sums, const uint8_t *p, size_t n) noexcept nogil:
    """Add the last bytes, fewer than a step, as if zeros followed them."""
    cdef uint8_t words[CHECKSUM_STEP]
    if n:
        memset(words, 0, sizeof(words))
        memcpy(words, p, n)
        add_to_sums(sums, words, sizeof(words))


cdef inline uint64_t checksum_of(const uint8_t *p, size_t n, uint64_t seed) noexcept nogil:
    """64 bits over `n` bytes and their number, continued from `seed`; the words are the machine's."""
    cdef Sums sums
    cdef size_t done
    memset(&sums, 0, sizeof(sums))
    done = add_to_sums(&sums, p, n)
    add_rest(&sums, p + done, n - done)
    return checksum_of_sums(&sums, n, seed)
