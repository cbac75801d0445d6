"""L2 norms of keys, and the lowest or highest values of rows: calls of norms.c (docs/policies.md).

The kernels are those of the SIMD level that `kvmnn._simd` has chosen. kvmnn.policies.topk has checked shapes,
types and counts; nothing is checked again here.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport free, malloc

from kvmnn._simd cimport active_level

cdef extern from "kvmnn/policies/norms.h" nogil:
    ctypedef struct kvmnn_norm_kernels:
        const char *name
        void (*fp16)(const uint8_t *rows, ptrdiff_t stride, size_t count, size_t dims, float *out) noexcept nogil
        void (*bf16)(const uint8_t *rows, ptrdiff_t stride, size_t count, size_t dims, float *out) noexcept nogil
        void (*fp32)(const uint8_t *rows, ptrdiff_t stride, size_t count, size_t dims, float *out) noexcept nogil
        void (*rank)(const float *values, size_t n, int highest, uint32_t *ranks) noexcept nogil

    const kvmnn_norm_kernels *kvmnn_norm_kernels_at(int level)
    void kvmnn_select_lowest(const uint32_t *ranks, size_t n, size_t m, int64_t *out)


def get_level() -> str:
    """Return the name of the kernels in use."""
    return kvmnn_norm_kernels_at(active_level).name.decode()


def compute_norms16(const uint16_t[:, :, :] rows not None, bint bf16, float[:, ::1] out not None) -> None:
    """Write the norm of rows[h, t, :] to out[h, t]; words of fp16 or bf16, last axis contiguous."""
    cdef const kvmnn_norm_kernels *table = kvmnn_norm_kernels_at(active_level)
    cdef Py_ssize_t head
    if out.shape[0] == 0 or out.shape[1] == 0 or rows.shape[2] == 0:
        out[:, :] = 0
        return
    with nogil:
        for head in range(rows.shape[0]):
            (table.bf16 if bf16 else table.fp16)(
                <const uint8_t *>&rows[head, 0, 0], rows.strides[1], rows.shape[1], rows.shape[2], &out[head, 0])


def compute_norms32(const float[:, :, :] rows not None, float[:, ::1] out not None) -> None:
    """Write the norm of rows[h, t, :] to out[h, t]; last axis contiguous."""
    cdef const kvmnn_norm_kernels *table = kvmnn_norm_kernels_at(active_level)
    cdef Py_ssize_t head
    if out.shape[0] == 0 or out.shape[1] == 0 or rows.shape[2] == 0:
        out[:, :] = 0
        return
    with nogil:
        for head in range(rows.shape[0]):
            table.fp32(
                <const uint8_t *>&rows[head, 0, 0], rows.strides[1], rows.shape[1], rows.shape[2], &out[head, 0])


def select_extreme(
    const float[:, :] values not None, bint highest, int64_t[:, :] out not None, int64_t first_index
) -> None:
    """Write the indices of the lowest or highest values of each row to out, ascending, plus first_index.

    There are out.shape[1] of them; of equal values the first are selected. The last axes are contiguous, and that of
    `values` is at least as long as that of `out`.
    """
    cdef const kvmnn_norm_kernels *table = kvmnn_norm_kernels_at(active_level)
    cdef Py_ssize_t row, i, n = values.shape[1], num_selected = out.shape[1]
    cdef int64_t *row_indices
    cdef uint32_t *ranks
    if out.shape[0] == 0 or num_selected == 0:
        return
    ranks = <uint32_t *>malloc(n * sizeof(uint32_t))
    if ranks == NULL:
        raise MemoryError()
    with nogil:
        for row in range(values.shape[0]):
            table.rank(&values[row, 0], n, highest, ranks)
            row_indices = &out[row, 0]
            kvmnn_select_lowest(ranks, n, num_selected, row_indices)
            if first_index:
                for i in range(num_selected):
                    row_indices[i] += first_index
    free(ranks)
