"""The engine's 64-bit hash, FNV-1a's steps from a start value that is not FNV's, and a fast checksum."""

from libc.stdint cimport uint8_t, uint64_t

from ..errors import KvmnnError

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


def checksum(const uint8_t[::1] data not None, uint64_t seed) -> int:
    """64 bits over `data` and its length, continued from `seed`; the words are the machine's."""
    cdef uint64_t h
    cdef const uint8_t *p = &data[0] if data.shape[0] else NULL
    with nogil:
        h = checksum_of(p, data.shape[0], seed)
    return h


def checksum_rows(const uint8_t[:, :] rows not None, Py_ssize_t block_bytes) -> list:
    """For each block of so many bytes of all rows: the checksum of each row's bytes in it, continued from that of the row
    before; the last block may be shorter, and rows of no bytes have none.
    """
    cdef uint64_t h
    cdef Py_ssize_t row, begin, size, n = rows.shape[1]
    if n > 1 and rows.strides[1] != 1:
        raise KvmnnError(f"rows with a stride of {rows.strides[1]}: expected contiguous ones")
    found = []
    for begin in range(0, n, block_bytes):
        size = min(block_bytes, n - begin)
        h = 0
        with nogil:
            for row in range(rows.shape[0]):
                h = checksum_of(&rows[row, begin], size, h)
        found.append(h)
    return found
