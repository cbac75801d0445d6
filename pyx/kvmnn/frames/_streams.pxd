from libc.stdint cimport uint8_t, uint64_t

cdef extern from "kvmnn/frames/lanes.h" nogil:
    enum:
        KVMNN_MODE_RAW
        KVMNN_MODE_DELTA
        KVMNN_MODE_XOR

    ctypedef struct kvmnn_lane_kernels:
        const char *name
        void (*predict_lane)(
            const uint8_t *src, size_t num_elements, int itemsize, int lane, int mode, uint8_t *dst) noexcept nogil
        void (*split)(
            const uint8_t *src, size_t num_elements, int itemsize, uint8_t *const *lanes,
            size_t *repeats) noexcept nogil
        void (*predict_lane_part)(
            const uint8_t *src, size_t start, size_t end, int itemsize, int lane, uint8_t *raw, uint8_t *delta,
            uint8_t *exclusive_or, size_t *repeats) noexcept nogil
        void (*copy_nontemporal)(uint8_t *dst, const uint8_t *src, size_t n) noexcept nogil
        void (*predict)(const uint8_t *src, size_t n, int mode, uint8_t *dst) noexcept nogil
        size_t (*predict_counting_repeats)(const uint8_t *src, size_t n, int mode, uint8_t *dst) noexcept nogil
        void (*unpredict)(uint8_t *stream, size_t n, int mode) noexcept nogil
        void (*join)(const uint8_t *const *lanes, size_t num_elements, int itemsize, uint8_t *dst) noexcept nogil
        void (*join_nontemporal)(
            const uint8_t *const *lanes, size_t num_elements, int itemsize, uint8_t *dst) noexcept nogil
        int (*join_equals)(
            const uint8_t *const *lanes, size_t num_elements, int itemsize, const uint8_t *expected) noexcept nogil
        size_t (*find_run4)(const uint8_t *s, size_t i, size_t n) noexcept nogil
        size_t (*repeats)(const uint8_t *s, size_t n) noexcept nogil
        size_t (*run_length)(const uint8_t *s, size_t i, size_t n) noexcept nogil
        void (*histogram)(const uint8_t *s, size_t n, uint64_t *counts) noexcept nogil

cdef enum:
    MIN_BYPASS_BYTES = 8 << 20  # bytes that no cache keeps until they are read

cdef const kvmnn_lane_kernels *lane_kernels() noexcept nogil

cdef size_t rle_bound(size_t n) noexcept nogil

cdef size_t rle_min_size(size_t n, size_t repeats) noexcept nogil
cdef size_t rle_size(const uint8_t *s, size_t n, size_t limit) noexcept nogil
cdef size_t rle_encode(const uint8_t *s, size_t n, uint8_t *dst) noexcept nogil
cdef bint rle_decode(const uint8_t *payload, size_t n, uint8_t *dst, size_t expected_bytes) noexcept nogil
cdef double compute_entropy(const uint64_t *counts) noexcept nogil
