"""What the loops of dense streams offer (coding.h)."""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

cdef extern from "kvmnn/dense/coding.h" nogil:
    enum:
        HEADER_BYTES
        CHECKSUM_AT
        PAD
        BUCKETS
        MODEL_BYTES
        MOST_BASE
        SET_HEADER_BYTES
    ctypedef enum dense_error:
        DENSE_OK
        DENSE_HEAD
    ctypedef struct dense_loops:
        pass
    const dense_loops *kvmnn_dense_loops_at(int level)
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
        const dense_loops *loops
        dense_shape shape
        dense_rows rows
        const uint8_t *own
        dense_rotary rotary
        const uint32_t *positions
        const int32_t *known
        const dense_table_set *set
    size_t dense_encode_room(const dense_input *input)
    int dense_choose_base(const dense_input *input)
    size_t dense_alike(const dense_input *input, uint8_t *room)
    size_t dense_encode_out(const dense_input *input)
    size_t dense_encode(
        const dense_input *input, uint8_t *room, uint8_t *out, size_t limit, uint32_t *references)
    ctypedef struct dense_counts:
        pass
    size_t dense_cluster_room()
    void dense_count(const dense_input *input, uint8_t *room, dense_counts *counts)
    size_t dense_put_set(
        const dense_loops *loops, dense_counts *counts, int dtype, int base, const dense_rotary *rotary,
        void *cluster_room, uint8_t *out)
    dense_error dense_get_set(const uint8_t *data, size_t n, dense_table_set *set)
    void dense_put_header(
        uint8_t *header, const dense_shape *shape, int method, int flags, size_t rows, size_t payload)
    uint64_t dense_checksum(const uint8_t *header, size_t control, const uint8_t *words, size_t n)
    void dense_part_pairs(
        uint8_t *words, size_t rows, const dense_shape *shape, size_t dims, int apart, uint8_t *row)
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
        size_t units
        size_t *low_count
        size_t *low_units
        size_t rest_bytes
        uint64_t set_id
        int low_mask
    dense_error dense_parse(dense_stream *s)
    size_t dense_decode_room(const dense_stream *s)
    dense_error dense_decode(
        const dense_stream *s, const dense_loops *loops, const uint8_t *history, const dense_table_set *set,
        uint8_t *room, uint8_t *words)
    uint64_t kvmnn_xxh64(const uint8_t *p, size_t n, uint64_t seed)
