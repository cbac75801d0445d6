"""Words of an array that are chosen by what they are, so that the same ones are chosen wherever they are there again."""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy, memset

from kvmnn.frames._workspace cimport Workspace, acquire, release

from ..errors import KvmnnError


cdef extern from *:
    """
    #if defined(__GNUC__)
    #define KVMNN_COMING(p) __builtin_prefetch(p)
    #else
    #define KVMNN_COMING(p) ((void)(p))
    #endif
    """
    void coming "KVMNN_COMING"(const void *p) nogil


cdef enum:
    AHEAD = 24   # windows: memory is asked for so many before it is read
    LENGTH = 8   # words that are compared: those of a cache that was quantised coarsely are alike by chance where they are
                 # fewer
    BITS = 3     # of a number, which are 0 if it is chosen: one in 8 is
    PROBES = 64  # slots of a table that are looked at, far more than numbers need that nobody has chosen

cdef uint64_t SPREAD = <uint64_t>0x9E3779B97F4A7C15


def anchors(
    const uint8_t[::1] data not None, int stride, const int64_t[::1] begins not None, size_t window,
    uint64_t[::1] numbers not None, int64_t[::1] places not None
) -> int:
    """Write a number for each of the chosen places, the same for the same 8 words, and the place; how many they are. None
    that begins with eight bytes of zeros is chosen.

    `begins`: of windows of `window` words. No more are chosen than both outputs have room for.
    """
    cdef size_t found = 0, end, at, words = data.shape[0] // stride, parts = stride, part
    cdef size_t most = min(numbers.shape[0], places.shape[0])
    cdef Py_ssize_t i, n = begins.shape[0]
    cdef const uint8_t *p
    cdef uint64_t number, more
    if stride != 2 and stride != 4 or window < LENGTH:
        raise KvmnnError(f"windows of {window} words of {stride} bytes: expected {LENGTH} words of 2 or 4 at least")
    for i in range(n):
        if not 0 <= begins[i] <= <int64_t>words - <int64_t>window:
            raise KvmnnError(f"a window at {begins[i]} of {words} words: not there")
    with nogil:
        for i in range(n):
            if i + AHEAD < n:
                p = &data[0] + begins[i + AHEAD] * stride
                coming(p)
                coming(p + (window - 1) * stride)
            at, end = begins[i], begins[i] + window - LENGTH + 1
            while at < end:
                p = &data[0] + at * stride
                memcpy(&number, p, sizeof(number))
                number *= SPREAD
                if number and number >> (64 - BITS) == 0 and found < most:  # zeros would take all the room
                    for part in range(1, parts):
                        memcpy(&more, p + part * sizeof(more), sizeof(more))
                        number = (number ^ more) * SPREAD
                    numbers[found] = number
                    places[found] = at
                    found += 1
                at += 1
    return found


def again(const uint64_t[::1] numbers not None) -> int:
    """How many numbers are there before as well, or more than that where very many fall together in a table."""
    cdef size_t n = numbers.shape[0], slots = 2, i, slot, last, found = 0
    cdef int bits = 1
    cdef uint64_t number
    cdef uint64_t *table
    while slots < 2 * n:
        slots, bits = 2 * slots, bits + 1
    cdef Workspace ws = acquire(False, False)
    try:
        table = <uint64_t *>ws.buffer(0, slots * sizeof(uint64_t))
        if table == NULL:
            raise MemoryError("no memory to compare words of an array")
        with nogil:
            memset(table, 0, slots * sizeof(uint64_t))  # a 0 is an empty slot; the number 0 is counted as 1
            for i in range(n):
                number = max(numbers[i], <uint64_t>1)
                slot = (number ^ number >> 29) * SPREAD >> (64 - bits)
                last = slot + PROBES
                while slot < last and table[slot & (slots - 1)] != 0 and table[slot & (slots - 1)] != number:
                    slot += 1
                slot &= slots - 1
                found += table[slot] != 0
                table[slot] = number
    finally:
        release(ws)
    return found
