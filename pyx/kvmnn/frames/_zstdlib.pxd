ctypedef size_t (*compress_fn)(void *, void *, size_t, const void *, size_t, int) noexcept nogil
ctypedef size_t (*decompress_fn)(void *, void *, size_t, const void *, size_t) noexcept nogil

cdef struct zstd_api:
    void *(*new_cctx)() noexcept nogil
    size_t (*free_cctx)(void *) noexcept nogil
    void *(*new_dctx)() noexcept nogil
    size_t (*free_dctx)(void *) noexcept nogil
    compress_fn compress            # (cctx, dst, capacity, src, n, level), as ZSTD_compressCCtx
    compress_fn compress_unsized    # the same without the content size in the frame header
    decompress_fn decompress        # (dctx, dst, capacity, src, n), as ZSTD_decompressDCtx
    unsigned (*is_error)(size_t) noexcept nogil
    size_t (*bound)(size_t) noexcept nogil
    bint stops                      # compress gives up when `capacity` is full, as `is_no_room` tells

cdef enum:
    ZSTD_error_dstSize_tooSmall = 70  # a number that zstd_errors.h promises to keep

cdef inline bint is_no_room(size_t code) noexcept nogil:
    return code == <size_t>-ZSTD_error_dstSize_tooSmall

cdef zstd_api zstd

cdef size_t frame_end(const unsigned char *p, size_t n, size_t at, size_t *most) noexcept nogil
cdef size_t most_output(const unsigned char *p, size_t n) noexcept nogil
