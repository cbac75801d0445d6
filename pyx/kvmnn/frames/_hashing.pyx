"""The engine's 64-bit hash (FNV-1a's steps from another start value), and a fast checksum."""

from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from ..errors import KvmnnError

SEED = 0x14650FB0739D0383
"""Start value of the engine's hash; the standard FNV-1a basis 0xcbf29ce484222325 has one more digit."""


def fnv1a64(const uint8_t[::1] data not None, uint64_t seed) -> int:
    """Return the hash of `data` continued from `seed`."""
    cdef uint64_t h = seed
    cdef Py_ssize_t i, n = data.shape[0]
    cdef const uint8_t *p
    if n:
        p = &data[0]
        with nogil:
            for i in range(n):
                h = (h ^ p[i]) * 1099511628211ULL
    return h


def integrity_checksum(const uint8_t[::1] data not None, uint64_t seed) -> int:
    """Return 64 bits over `data` and its length, continued from `seed`; words are in native byte order."""
    cdef uint64_t h
    cdef const uint8_t *p = &data[0] if data.shape[0] else NULL
    with nogil:
        h = compute_checksum(p, data.shape[0], seed)
    return h


cdef struct RunningSums:
    ChecksumSums sums
    uint8_t pending[CHECKSUM_STEP_BYTES]  # of a step that is not full yet ...
    size_t num_pending                    # ... and how many


cdef inline void add_bytes(RunningSums *sums_state, const uint8_t *p, size_t n) noexcept nogil:
    cdef size_t num_bytes = 0
    if sums_state.num_pending:
        num_bytes = min(n, CHECKSUM_STEP_BYTES - sums_state.num_pending)
        memcpy(sums_state.pending + sums_state.num_pending, p, num_bytes)
        sums_state.num_pending += num_bytes
        if sums_state.num_pending < CHECKSUM_STEP_BYTES:
            return
        add_to_sums(&sums_state.sums, sums_state.pending, CHECKSUM_STEP_BYTES)
        sums_state.num_pending = 0
    num_bytes += add_to_sums(&sums_state.sums, p + num_bytes, n - num_bytes)
    if num_bytes < n:
        memcpy(sums_state.pending, p + num_bytes, n - num_bytes)
        sums_state.num_pending = n - num_bytes


cdef uint64_t sum_rows(
    const uint8_t *p, Py_ssize_t row_step, Py_ssize_t token_step, size_t rows, size_t tokens, size_t size,
    uint8_t *copy, RunningSums *running
) noexcept nogil:
    """Return the checksum of all rows' tokens of `size` bytes, continued from row to row.

    `copy`, if not NULL, receives the rows, concatenated. Tokens are read in memory order, with a running sum for each
    row.
    """
    cdef uint64_t h = 0
    cdef size_t row, token
    cdef const uint8_t *source
    if token_step == <Py_ssize_t>size or tokens == 1:
        for row in range(rows):
            source = p + <Py_ssize_t>row * row_step
            if copy != NULL:
                memcpy(copy, source, tokens * size)
                copy += tokens * size
            h = compute_checksum(source, tokens * size, h)
        return h
    memset(running, 0, rows * sizeof(RunningSums))
    for token in range(tokens):
        for row in range(rows):
            source = p + <Py_ssize_t>row * row_step + <Py_ssize_t>token * token_step
            if copy != NULL:
                memcpy(copy + (row * tokens + token) * size, source, size)
            add_bytes(&running[row], source, size)
    for row in range(rows):
        add_tail(&running[row].sums, running[row].pending, running[row].num_pending)
        h = finish_checksum(&running[row].sums, tokens * size, h)
    return h


cdef RunningSums *allocate_sums(const uint8_t[:, :, :] rows) except? NULL:
    cdef RunningSums *sums = <RunningSums *>malloc((rows.shape[0] + 1) * sizeof(RunningSums))
    if rows.shape[2] > 1 and rows.strides[2] != 1:
        free(sums)
        raise KvmnnError(f"rows with a stride of {rows.strides[2]}: expected contiguous ones")
    if sums == NULL:
        raise MemoryError("no memory for the sums of rows")
    return sums


def checksum_blocks(const uint8_t[:, :, :] rows not None, Py_ssize_t block_tokens) -> list:
    """Return the checksum of each block of `block_tokens` tokens of all rows ``[row, token, byte]``, continued from row
    to row.

    The last block may be shorter; rows without bytes have no blocks.
    """
    cdef uint64_t h
    cdef Py_ssize_t begin, tokens = rows.shape[1], size = rows.shape[2]
    cdef RunningSums *sums = allocate_sums(rows)
    try:
        checksums = []
        for begin in range(0, tokens if size and rows.shape[0] else 0, block_tokens):
            with nogil:
                h = sum_rows(
                    &rows[0, begin, 0], rows.strides[0], rows.strides[1], rows.shape[0],
                    min(block_tokens, tokens - begin), size, NULL, sums)
            checksums.append(h)
        return checksums
    finally:
        free(sums)


def copy_rows(const uint8_t[:, :, :] rows not None, uint8_t[:, ::1] out not None) -> int:
    """Copy rows ``[row, token, byte]`` to contiguous ``out``, ``[row, byte]``; return their checksum as one block."""
    cdef uint64_t h = 0
    cdef Py_ssize_t size = rows.shape[1] * rows.shape[2]
    cdef RunningSums *sums = allocate_sums(rows)
    try:
        if out.shape[0] != rows.shape[0] or out.shape[1] != size:
            raise KvmnnError(
                f"out has {out.shape[0]} rows of {out.shape[1]} bytes: expected {rows.shape[0]} of {size}")
        if out.shape[0] and size:
            with nogil:
                h = sum_rows(
                    &rows[0, 0, 0], rows.strides[0], rows.strides[1], rows.shape[0], rows.shape[1], rows.shape[2],
                    &out[0, 0], sums)
        return h
    finally:
        free(sums)
