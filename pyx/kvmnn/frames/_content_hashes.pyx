"""Hash words of an array at positions chosen by content, so that repeated data is sampled at the same words."""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy, memset

from kvmnn.frames._workspace cimport Workspace, acquire, release

from ..errors import KvmnnError


cdef extern from *:
    """
    #if defined(__GNUC__)
    #define KVMNN_PREFETCH(p) __builtin_prefetch(p)
    #else
    #define KVMNN_PREFETCH(p) ((void)(p))
    #endif
    """
    void prefetch "KVMNN_PREFETCH"(const void *p) nogil


cdef enum:
    PREFETCH_WINDOWS = 24  # windows: memory is asked for so many before it is read
    HASHED_ELEMENTS = 8    # words that are compared: those of a cache that was quantised coarsely are alike by chance
                           # where they are fewer
    SELECTION_BITS = 3     # of a number, which are 0 if it is chosen: one in 8 is
    MAX_PROBES = 64        # slots of a table that are looked at, far more than numbers need that nobody has chosen

cdef uint64_t HASH_MULTIPLIER = <uint64_t>0x9E3779B97F4A7C15


def sample_hashes(
    const uint8_t[::1] data not None, int itemsize, const int64_t[::1] window_starts not None, size_t window_elements,
    uint64_t[::1] hashes not None, int64_t[::1] positions not None
) -> int:
    """Write the hash of 8 words at each chosen position, and the position; return their number.

    Positions before eight zero bytes are never chosen. `window_starts`: starts of windows of `window_elements` words.
    The outputs limit the number of positions.
    """
    cdef size_t count = 0, end, pos, num_elements = data.shape[0] // itemsize, num_chunks = itemsize, chunk
    cdef size_t capacity = min(hashes.shape[0], positions.shape[0])
    cdef Py_ssize_t i, n = window_starts.shape[0]
    cdef const uint8_t *p
    cdef uint64_t hash_value, next_bits
    if itemsize != 2 and itemsize != 4 or window_elements < HASHED_ELEMENTS:
        raise KvmnnError(
            f"windows of {window_elements} words of {itemsize} bytes: expected {HASHED_ELEMENTS} words of 2 or 4 "
            "at least")
    for i in range(n):
        if not 0 <= window_starts[i] <= <int64_t>num_elements - <int64_t>window_elements:
            raise KvmnnError(f"a window at {window_starts[i]} of {num_elements} words: not there")
    with nogil:
        for i in range(n):
            if i + PREFETCH_WINDOWS < n:
                p = &data[0] + window_starts[i + PREFETCH_WINDOWS] * itemsize
                prefetch(p)
                prefetch(p + (window_elements - 1) * itemsize)
            pos, end = window_starts[i], window_starts[i] + window_elements - HASHED_ELEMENTS + 1
            while pos < end:
                p = &data[0] + pos * itemsize
                memcpy(&hash_value, p, sizeof(hash_value))
                hash_value *= HASH_MULTIPLIER
                if hash_value and hash_value >> (64 - SELECTION_BITS) == 0 and count < capacity:  # zeros would take all
                                                                                                  # the room
                    for chunk in range(1, num_chunks):
                        memcpy(&next_bits, p + chunk * sizeof(next_bits), sizeof(next_bits))
                        hash_value = (hash_value ^ next_bits) * HASH_MULTIPLIER
                    hashes[count] = hash_value
                    positions[count] = pos
                    count += 1
                pos += 1
    return count


def count_duplicates(const uint64_t[::1] hashes not None) -> int:
    """Count hashes that occurred before; an overestimate if very many collide in the table."""
    cdef size_t n = hashes.shape[0], num_slots = 2, i, slot, last_slot, num_duplicates = 0
    cdef int bits = 1
    cdef uint64_t hash_value
    cdef uint64_t *table
    while num_slots < 2 * n:
        num_slots, bits = 2 * num_slots, bits + 1
    cdef Workspace ws = acquire(False, False)
    try:
        table = <uint64_t *>ws.get_buffer(0, num_slots * sizeof(uint64_t))
        if table == NULL:
            raise MemoryError("no memory to compare words of an array")
        with nogil:
            memset(table, 0, num_slots * sizeof(uint64_t))  # a 0 is an empty slot; the number 0 is counted as 1
            for i in range(n):
                hash_value = max(hashes[i], <uint64_t>1)
                slot = (hash_value ^ hash_value >> 29) * HASH_MULTIPLIER >> (64 - bits)
                last_slot = slot + MAX_PROBES
                while (
                    slot < last_slot and table[slot & (num_slots - 1)] != 0
                    and table[slot & (num_slots - 1)] != hash_value
                ):
                    slot += 1
                slot &= num_slots - 1
                num_duplicates += table[slot] != 0
                table[slot] = hash_value
    finally:
        release(ws)
    return num_duplicates
