"""The engine's 64-bit hash, FNV-1a's steps from a start value that is not FNV's, and a fast checksum."""

from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy, memset

SEED = 0x14650FB0739D0383
"""Start value of the engine's hash; the standard FNV-1a basis 0xcbf29ce484222325 has one more digit."""


def fnv1a64(const uint8_t[::1] data not None, uint64_t seed) -> int:
    """The hash of `data` continued from `seed`."""
    cdef uint64_t h = seed
    cdef Py_ssize_t i, n = data.shape[0]
    cdef const uint8_t *p
    if n:
        p = &data[0]
        with nogil:
            for i in range(n):
                h = (h ^ p[i]) * 1099511628211ULL
    return h


cdef enum:
    COLUMNS = 8  # sums side by side: enough for vector registers and to hide the latency of additions


def checksum(const uint8_t[::1] data not None, uint64_t seed) -> int:
    """64 bits over `data` and its length, continued from `seed`; the words are the machine's."""
    cdef uint64_t sums[COLUMNS]
    cdef uint64_t weighted[COLUMNS]
    cdef uint64_t words[COLUMNS]
    cdef uint64_t h, word
    cdef size_t n = data.shape[0], at = 0
    cdef int column
    cdef const uint8_t *p = &data[0] if n else NULL
    memset(sums, 0, sizeof(sums))
    memset(weighted, 0, sizeof(weighted))
    with nogil:
        while at + sizeof(words) <= n:
            for column in range(COLUMNS):  # word by word: through an array of eight, compilers take four times as long
                memcpy(&word, p + at + 8 * column, 8)
                sums[column] += word
                weighted[column] += sums[column]
            at += sizeof(words)
        if at < n:
            memset(words, 0, sizeof(words))
            memcpy(words, p + at, n - at)
            for column in range(COLUMNS):
                sums[column] += words[column]
                weighted[column] += sums[column]
        h = seed ^ n
        for column in range(COLUMNS):
            h = (h ^ sums[column]) * 0x9E3779B97F4A7C15ULL
            h = ((h ^ (h >> 29)) ^ weighted[column]) * 0xBF58476D1CE4E5B9ULL
    return h
