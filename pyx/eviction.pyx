"""A model's cache cut token by token: rows of what is known of live tokens, masks of dead ones, K and V moved together.

kvmnn.lm.cache has checked shapes and counts; nothing is checked again here. A row is one set of live tokens: of a layer,
of one of its heads, or of all layers. `slots` says where each live token lies in the layer's K and V, ascending.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memmove, memset

ctypedef fused value:
    int64_t
    float


def cut(value[:, ::1] rows not None, const int64_t[:, ::1] kept not None) -> None:
    """Keep of each row the entries `kept`, ascending, at its front. One row of `kept` serves all."""
    cdef Py_ssize_t row, i, one = kept.shape[0] == 1
    cdef const int64_t *indices
    cdef value *entries
    if kept.shape[1] == 0:
        return
    with nogil:
        for row in range(rows.shape[0]):
            indices = &kept[0 if one else row, 0]
            entries = &rows[row, 0]
            for i in range(kept.shape[1]):
                entries[i] = entries[indices[i]]


def fill_bias(
    float[:, :, ::1] bias not None, const int64_t[:, ::1] slots not None, Py_ssize_t live, float dead
) -> None:
    """bias[layer, head, slot] = 0 for live tokens and `dead` for all others.

    Rows of `slots` belong to layer x KV head, to layers, or one to all; query heads in a row share a KV head.
    """
    cdef Py_ssize_t layer, head, i, row, layers = bias.shape[0], heads = bias.shape[1], width = bias.shape[2]
    cdef Py_ssize_t rows = slots.shape[0] // layers if slots.shape[0] > 1 else 0
    cdef float *out
    if width == 0:
        return
    with nogil:
        for layer in range(layers):
            for head in range(heads):
                out = &bias[layer, head, 0]
                row = 0 if rows == 0 else layer * rows + head * rows // heads
                for i in range(width):
                    out[i] = dead
                for i in range(live):
                    out[slots[row, i]] = 0


def ascending(const int64_t[:, ::1] kept not None, int64_t live) -> bool:
    """Whether every row holds numbers in [0, live), each larger than the one before it."""
    cdef Py_ssize_t row, i
    cdef int64_t last
    cdef bint good = True
    with nogil:
        for row in range(kept.shape[0]):
            last = -1
            for i in range(kept.shape[1]):
                good = good and kept[row, i] > last
                last = kept[row, i]
            good = good and last < live
    return good


def column_sums(
    const float[:, :, ::1] attention not None, const int64_t[:, ::1] slots not None, float[:, ::1] sums not None
) -> None:
    """sums[row, i] = attention ``[query_head, query, slot]`` of slot slots[row, i], over the queries and the row's heads.

    Queries are added first, then the heads, in float32 and in order. One row: all heads; else heads in a row share one.
    """
    cdef Py_ssize_t heads = attention.shape[0], rows = sums.shape[0], live = sums.shape[1]
    cdef Py_ssize_t group = heads // rows, row, head, query, i
    cdef const int64_t *where
    cdef const float *given
    cdef float *columns
    if live == 0:
        return
    columns = <float *>malloc(live * sizeof(float))
    if columns == NULL:
        raise MemoryError()
    with nogil:
        for row in range(rows):
            where = &slots[row, 0]
            memset(&sums[row, 0], 0, live * sizeof(float))
            for head in range(row * group, (row + 1) * group):
                memset(columns, 0, live * sizeof(float))
                for query in range(attention.shape[1]):
                    given = &attention[head, query, 0]
                    for i in range(live):
                        columns[i] += given[where[i]]
                for i in range(live):
                    sums[row, i] += columns[i]
    free(columns)


def gather(unsigned char[:, :, ::1] rows not None, const int64_t[:, ::1] slots not None, Py_ssize_t live) -> None:
    """Move the live rows of ``[kv_head, slot, byte]`` to the front of the buffer: ``[kv_head, live, byte]`` from there on."""
    cdef Py_ssize_t head, begin, end, size = rows.shape[2]
    cdef const int64_t *where
    cdef unsigned char *out
    if live == 0 or size == 0 or rows.shape[0] == 0:
        return
    out = &rows[0, 0, 0]
    with nogil:
        for head in range(rows.shape[0]):
            where = &slots[head if slots.shape[0] > 1 else 0, 0]
            begin = 0
            while begin < live:
                end = begin + 1
                while end < live and where[end] == where[end - 1] + 1:
                    end += 1
                memmove(out, &rows[head, where[begin], 0], (end - begin) * size)
                out += (end - begin) * size
                begin = end
