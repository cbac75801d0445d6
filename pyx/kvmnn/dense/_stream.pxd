from libc.stdint cimport uint8_t, uint32_t

from kvmnn.dense.codec cimport dense_error, dense_shape, dense_stream, dense_table_set


cdef class TableSet:
    cdef dense_table_set *native


cdef dense_shape make_shape(int dtype, uint32_t heads, uint32_t dim) noexcept nogil
cdef str error_text(dense_error error)
cdef void write_header(uint8_t *header, const dense_shape *shape, int flags, size_t rows, size_t payload) noexcept nogil
cdef dense_error parse_sections(dense_stream *stream) noexcept nogil
cdef dense_error decode_rows(
    const dense_stream *stream, const dense_table_set *tables, const uint8_t *history, uint8_t *words
) except *
