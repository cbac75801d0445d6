"""Block scores: sums of attention rows, their running mean, and their order (docs/h2o.md).

float32 after every operation, in the engine's order: the same bits on every machine.
"""

from libc.stdint cimport int32_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from ...errors import KvmnnError


cdef extern from "kvmnn/policies/h2o/scores.h":
    ctypedef struct kvmnn_attention_rows:
        size_t heads
        size_t queries
        size_t keys
        ptrdiff_t head_stride
        ptrdiff_t query_stride
        size_t block_keys
        size_t tile_keys
    void kvmnn_block_sums(const kvmnn_attention_rows *r, const float *rows, float *sums) noexcept nogil


def sum_blocks(
    const float[:, :, :] rows not None, size_t block_keys, size_t tile_keys, size_t threads, float[::1] sums not None
):
    """Sum rows ``[head, query, key]`` over blocks of keys in the order of the engine on `threads` threads.

    `sums` has a float for each block and is replaced.
    """
    cdef size_t heads = rows.shape[0], blocks = sums.shape[0], first = 0, heads_per_thread, index
    cdef float *partial_sums
    cdef kvmnn_attention_rows r
    if block_keys == 0 or tile_keys == 0 or threads == 0:
        raise KvmnnError("block, tile and threads must be at least 1")
    if rows.shape[2] == 0 or blocks != (<size_t>rows.shape[2] - 1) // block_keys + 1:
        raise KvmnnError(f"{blocks} sums for {rows.shape[2]} keys in blocks of {block_keys}")
    if rows.strides[2] != sizeof(float) or rows.strides[0] % sizeof(float) or rows.strides[1] % sizeof(float):
        raise KvmnnError("rows must be contiguous along the keys")
    r.queries = rows.shape[1]
    r.keys = rows.shape[2]
    r.head_stride = rows.strides[0] // <Py_ssize_t>sizeof(float)
    r.query_stride = rows.strides[1] // <Py_ssize_t>sizeof(float)
    r.block_keys = block_keys
    r.tile_keys = tile_keys
    memset(&sums[0], 0, blocks * sizeof(float))
    if heads == 0 or r.queries == 0:
        return
    heads_per_thread = (heads - 1) // threads + 1
    partial_sums = <float *>calloc(blocks, sizeof(float))
    if partial_sums == NULL:
        raise MemoryError
    with nogil:
        while first < heads:
            r.heads = min(heads_per_thread, heads - first)
            kvmnn_block_sums(&r, &rows[0, 0, 0] + <ptrdiff_t>first * r.head_stride, partial_sums)
            for index in range(blocks):
                sums[index] = sums[index] + partial_sums[index]
            memset(partial_sums, 0, blocks * sizeof(float))
            first += heads_per_thread
        free(partial_sums)


def update_running_mean(float[::1] scores not None, const float[::1] sums not None, float norm, float alpha):
    """Update scores in place: ``alpha * score + (1 - alpha) * (sum / norm)``, each operation rounded to float32."""
    cdef Py_ssize_t i
    cdef float complement = <float>1.0 - alpha, current, previous_part, current_part
    if scores.shape[0] != sums.shape[0]:
        raise KvmnnError(f"{sums.shape[0]} sums for {scores.shape[0]} scores")
    with nogil:
        for i in range(scores.shape[0]):
            current = sums[i] / norm
            previous_part = alpha * scores[i]
            current_part = complement * current
            scores[i] = previous_part + current_part


def compute_order_keys(const float[::1] scores not None, int32_t[::1] keys not None):
    """Write integers in the order of the scores: both zeros are equal, every NaN is below minus infinity."""
    cdef Py_ssize_t i
    cdef float score
    cdef uint32_t bits
    if scores.shape[0] != keys.shape[0]:
        raise KvmnnError(f"{keys.shape[0]} keys for {scores.shape[0]} scores")
    with nogil:
        for i in range(scores.shape[0]):
            score = scores[i]
            memcpy(&bits, &score, 4)
            if score != score:
                bits = 0x80000000u
            elif score == 0:
                bits = 0
            elif bits >> 31:
                bits ^= 0x7fffffff
            keys[i] = <int32_t>bits
