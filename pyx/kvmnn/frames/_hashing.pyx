"""The engine's 64-bit hash: FNV-1a's steps from a start value that is not FNV's."""

from libc.stdint cimport uint8_t, uint64_t

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
