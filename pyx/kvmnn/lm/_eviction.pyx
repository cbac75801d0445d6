"""Evict single tokens from a model's cache: compact tables of live tokens, mask evicted ones, move K and V together.

kvmnn.lm.cache has checked shapes and counts; nothing is checked again here. A row is one set of live tokens: of a
layer, of one of its heads, or of all layers. `slots` has the slot of each live token in the layer's K and V, ascending.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove


cdef struct TokenRun:
    Py_ssize_t begin
    Py_ssize_t size


def compact_tables(
    const int64_t[:, ::1] kept_indices not None,
    int64_t num_live,
    const int64_t[:, ::1] slots not None,
    float[:, ::1] bias not None,
    float masked_bias,
    tables,
) -> bool:
    """Move the entries `kept_indices` of each row of every table to its front, and mask the others.

    bias[row, slot] of the others becomes `masked_bias`. A single row of `kept_indices` applies to all rows. `slots` has
    the slot of each entry; it may be among the tables, which are C-contiguous arrays of int64 or float32 with equally
    many rows. Return False, with nothing done, unless each row of `kept_indices` ascends in [0, num_live).
    """
    cdef Py_ssize_t rows = kept_indices.shape[0], count = kept_indices.shape[1], row, num_runs = 0
    cdef unsigned char[:, ::1] table
    cdef TokenRun *token_runs
    cdef Py_ssize_t *ends
    if count > num_live:
        return False
    if count == 0:
        mask_evicted(slots, bias, masked_bias, NULL, NULL, 0, num_live)
        return True
    # a run ends where something is left out
    token_runs = <TokenRun *>malloc(rows * min(count, num_live - count + 1) * sizeof(TokenRun))
    ends = <Py_ssize_t *>malloc(rows * sizeof(Py_ssize_t))
    try:
        if token_runs == NULL or ends == NULL:
            raise MemoryError()
        for row in range(rows):
            if not is_ascending(&kept_indices[row, 0], count, num_live):
                return False
            num_runs = append_runs(&kept_indices[row, 0], count, token_runs, num_runs)
            ends[row] = num_runs
        mask_evicted(slots, bias, masked_bias, token_runs, ends, rows, num_live)
        for array in tables:
            table = array.view("u1")
            move_rows(table, token_runs, ends, rows, array.itemsize)
        return True
    finally:
        free(token_runs)
        free(ends)


cdef bint is_ascending(const int64_t *kept_indices, Py_ssize_t count, int64_t num_live) noexcept nogil:
    """Return whether the numbers ascend and lie in [0, num_live)."""
    cdef Py_ssize_t i
    cdef bint is_valid = kept_indices[0] >= 0 and kept_indices[count - 1] < num_live
    for i in range(1, count):
        is_valid &= kept_indices[i] > kept_indices[i - 1]
    return is_valid


cdef Py_ssize_t append_runs(
    const int64_t *kept_indices, Py_ssize_t count, TokenRun *token_runs, Py_ssize_t num_runs
) noexcept nogil:
    """Append the runs of consecutive numbers among ascending ones to `token_runs`; return the new number of runs."""
    cdef Py_ssize_t i, begin = 0
    for i in range(1, count + 1):
        if i < count and kept_indices[i] == kept_indices[i - 1] + 1:
            continue
        token_runs[num_runs].begin = kept_indices[begin]
        token_runs[num_runs].size = i - begin
        num_runs += 1
        begin = i
    return num_runs


cdef void mask_evicted(
    const int64_t[:, ::1] slots,
    float[:, ::1] bias,
    float masked_bias,
    const TokenRun *token_runs,
    const Py_ssize_t *ends,
    Py_ssize_t rows,
    int64_t num_live,
) noexcept nogil:
    """Set bias[row, slot] = masked_bias for the entries that are in no run."""
    cdef Py_ssize_t row, run, first = 0, last = 0, i, end
    for row in range(slots.shape[0]):
        if rows > 0:
            last = ends[row if rows > 1 else 0]
        if rows > 1:
            first = ends[row - 1] if row else 0
        i = 0
        for run in range(first, last + 1):
            end = token_runs[run].begin if run < last else num_live
            while i < end:
                bias[row, slots[row, i]] = masked_bias
                i += 1
            if run < last:
                i = token_runs[run].begin + token_runs[run].size


cdef void move_rows(
    unsigned char[:, ::1] table, const TokenRun *token_runs, const Py_ssize_t *ends, Py_ssize_t rows,
    Py_ssize_t itemsize
) noexcept nogil:
    cdef Py_ssize_t row, run, first = 0
    cdef unsigned char *out
    for row in range(table.shape[0]):
        out = &table[row, 0]
        if rows > 1:
            first = ends[row - 1] if row else 0
        for run in range(first, ends[row if rows > 1 else 0]):
            if out != &table[row, token_runs[run].begin * itemsize]:
                memmove(out, &table[row, token_runs[run].begin * itemsize], token_runs[run].size * itemsize)
            out += token_runs[run].size * itemsize


def add_columns(
    const float[:, :, ::1] attention not None,
    const int64_t[:, ::1] slots not None,
    float[:, ::1] scores not None,
    Py_ssize_t num_live,
    float decay,
) -> None:
    """Decay scores and add attention: scores[row, i] = decay * scores[row, i] + the sum for slot slots[row, i].

    Attention ``[query_head, query, slot]`` is summed over queries first, then over the row's heads, in float32 and in
    order. A single row gets all heads; otherwise each row gets an equal share of heads.
    """
    cdef Py_ssize_t heads = attention.shape[0], queries = attention.shape[1], width = attention.shape[2]
    cdef Py_ssize_t rows = scores.shape[0], group = heads // rows, row, head, query, i
    cdef const int64_t *row_slots
    cdef const float *given
    cdef float *columns
    cdef float *sums
    cdef float *out
    if num_live == 0:
        return
    columns = <float *>malloc(2 * width * sizeof(float))
    if columns == NULL:
        raise MemoryError()
    sums = columns + width
    with nogil:
        for row in range(rows):
            for head in range(row * group, (row + 1) * group):
                add_queries(&attention[head, 0, 0], queries, width, columns if head > row * group else sums)
                if head > row * group:
                    for i in range(width):
                        sums[i] += columns[i]
            row_slots = &slots[row, 0]
            out = &scores[row, 0]
            for i in range(num_live):
                out[i] = out[i] * decay + sums[row_slots[i]]
    free(columns)


cdef void add_queries(const float *rows, Py_ssize_t queries, Py_ssize_t width, float *out) noexcept nogil:
    """Sum the rows, from the first to the last, into out."""
    cdef Py_ssize_t query, i
    memcpy(out, rows, width * sizeof(float))
    for query in range(1, queries):
        rows += width
        for i in range(width):
            out[i] += rows[i]


def gather(unsigned char[:, :, ::1] rows not None, const int64_t[:, ::1] slots not None, Py_ssize_t num_live) -> None:
    """Move the live rows of ``[kv_head, slot, byte]`` to the front of the buffer: ``[kv_head, num_live, byte]`` from
    there on."""
    cdef Py_ssize_t head, begin, end, size = rows.shape[2]
    cdef const int64_t *head_slots
    cdef unsigned char *out
    if num_live == 0 or size == 0 or rows.shape[0] == 0:
        return
    out = &rows[0, 0, 0]
    with nogil:
        for head in range(rows.shape[0]):
            head_slots = &slots[head if slots.shape[0] > 1 else 0, 0]
            begin = 0
            while begin < num_live:
                end = begin + 1
                while end < num_live and head_slots[end] == head_slots[end - 1] + 1:
                    end += 1
                memmove(out, &rows[head, head_slots[begin], 0], (end - begin) * size)
                out += (end - begin) * size
                begin = end
