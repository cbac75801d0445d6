ctypedef size_t (*compress_fn)(void *, void *, size_t, const void *, size_t, int) noexcept nogil
ctypedef size_t (*decompress_fn)(void *, void *, size_t, const void *, size_t) noexcept nogil

cdef struct zstd_api:
    void *(*new_cctx)() noexcept nogil
    size_t (*free_cctx)(void *) noexcept nogil
    void *(*new_dctx)() noexcept nogil
    size_t (*free_dctx)(void *) noexcept nogil
    compress_fn compress               # (cctx, dst, capacity, src, n, level), as ZSTD_compressCCtx
    compress_fn compress_without_size  # the same without the content size in the frame header
    decompress_fn decompress           # (dctx, dst, capacity, src, n), as ZSTD_decompressDCtx
    unsigned (*is_error)(size_t) noexcept nogil
    size_t (*bound)(size_t) noexcept nogil
    bint stops_at_capacity  # compress gives up when `capacity` is full, as `is_dst_too_small` tells

cdef enum:
    ZSTD_error_dstSize_tooSmall = 70  # a number that zstd_errors.h promises to keep

cdef inline bint is_dst_too_small(size_t code) noexcept nogil:
    return code == <size_t>-ZSTD_error_dstSize_tooSmall

cdef zstd_api zstd

cdef size_t find_frame_end(const unsigned char *p, size_t n, size_t pos, size_t *max_output) noexcept nogil
cdef size_t max_output_size(const unsigned char *p, size_t n) noexcept nogil
