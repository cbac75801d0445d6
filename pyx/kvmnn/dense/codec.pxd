"""What the kernels of dense streams offer (codec.h)."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

cdef extern from "kvmnn/dense/codec.h" nogil:
    enum:
        HEADER_BYTES
        CHECKSUM_OFFSET
        PAD_BYTES
        SIMILARITY_CLASSES
        MAX_MODEL_BYTES
        MAX_BASE
        SET_HEADER_BYTES
    ctypedef enum dense_error:
        DENSE_OK
        DENSE_HEAD
    ctypedef struct dense_kernels:
        pass
    const dense_kernels *kvmnn_dense_kernels_at(int level)
    ctypedef struct dense_shape:
        int dtype
        int base
        uint32_t heads
        uint32_t dim
        size_t words
        size_t word_bytes
    ctypedef struct dense_rotary:
        uint32_t dims
        int interleaved
        const uint64_t *frequencies
    ctypedef struct dense_rows:
        const uint8_t *history
        const uint8_t *own
        size_t history_rows
        size_t rows
        size_t row_bytes
    ctypedef struct dense_table_set:
        uint64_t id
        int dtype
        int base
        dense_rotary rotary
    ctypedef struct dense_input:
        const dense_kernels *kernels
        dense_shape shape
        dense_rows rows
        const uint8_t *original_rows
        dense_rotary rotary
        const uint32_t *positions
        const int32_t *reference_hints
        const dense_table_set *table_set
    size_t dense_encode_scratch_bytes(const dense_input *input)
    int dense_choose_base(const dense_input *input)
    size_t dense_count_predicted(const dense_input *input, uint8_t *scratch)
    size_t dense_encode_capacity(const dense_input *input)
    size_t dense_encode(
        const dense_input *input, uint8_t *scratch, uint8_t *out, size_t limit, uint32_t *references)
    ctypedef struct dense_counts:
        pass
    size_t dense_cluster_scratch_bytes()
    void dense_count_symbols(const dense_input *input, uint8_t *scratch, dense_counts *counts)
    size_t dense_write_table_set(
        const dense_kernels *kernels, dense_counts *counts, int dtype, int base, const dense_rotary *rotary,
        void *cluster_scratch, uint8_t *out)
    dense_error dense_read_table_set(const uint8_t *data, size_t n, dense_table_set *table_set)
    void dense_write_header(
        uint8_t *header, const dense_shape *shape, int method, int flags, size_t rows, size_t payload)
    uint64_t dense_checksum(const uint8_t *header, size_t control, const uint8_t *words, size_t n)
    void dense_reorder_pairs(
        uint8_t *words, size_t rows, const dense_shape *shape, size_t dims, int to_halves, uint8_t *row)
    ctypedef struct dense_stream:
        dense_shape shape
        size_t rows
        size_t history
        int flags
        const uint8_t *header
        const uint8_t *payload
        size_t payload_bytes
        size_t head_bytes
        size_t exponent_count
        size_t escape_count
        size_t num_units
        size_t *low_count
        size_t *num_low_units
        size_t uncoded_low_bytes
        uint64_t set_id
        int low_mask
    dense_error dense_parse(dense_stream *s)
    size_t dense_decode_scratch_bytes(const dense_stream *s)
    dense_error dense_decode(
        const dense_stream *s, const dense_kernels *kernels, const uint8_t *history, const dense_table_set *table_set,
        uint8_t *scratch, uint8_t *words)
    uint64_t kvmnn_xxh64(const uint8_t *p, size_t n, uint64_t seed)
