/* Transposes of small matrices whose elements are units of 2, 4, 8, 16 or any number of bytes.
 *
 * kvmnn_transpose(): to[c * to_stride + r * unit] = from[r * from_stride + c * unit] for r < rows, c < cols; strides in
 * bytes, any alignment, no overlap. Sixteen bytes are handled at a time with the vector types that GCC and Clang have
 * on every architecture; other compilers get the loops.
 */
#ifndef KVMNN_TRANSPOSE_H
#define KVMNN_TRANSPOSE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { KVMNN_CACHE_LINE_BYTES = 64 }; /* bytes of a cache line; a guess costs speed, not correctness */

#if defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 12)
#define KVMNN_VECTORS 1

typedef uint16_t kvmnn_v8x16 __attribute__((vector_size(16)));
typedef uint32_t kvmnn_v4x32 __attribute__((vector_size(16)));
typedef uint64_t kvmnn_v2x64 __attribute__((vector_size(16)));
typedef long long kvmnn_vector __attribute__((vector_size(16)));

static inline kvmnn_vector kvmnn_load(const uint8_t *p) {
    kvmnn_vector v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void kvmnn_store(uint8_t *p, kvmnn_vector v) { memcpy(p, &v, sizeof v); }

/* The low and the high halves of two vectors, element by element in turns. */
static inline kvmnn_vector kvmnn_low16(kvmnn_vector a, kvmnn_vector b) {
    return (kvmnn_vector)__builtin_shufflevector((kvmnn_v8x16)a, (kvmnn_v8x16)b, 0, 8, 1, 9, 2, 10, 3, 11);
}
static inline kvmnn_vector kvmnn_high16(kvmnn_vector a, kvmnn_vector b) {
    return (kvmnn_vector)__builtin_shufflevector((kvmnn_v8x16)a, (kvmnn_v8x16)b, 4, 12, 5, 13, 6, 14, 7, 15);
}
static inline kvmnn_vector kvmnn_low32(kvmnn_vector a, kvmnn_vector b) {
    return (kvmnn_vector)__builtin_shufflevector((kvmnn_v4x32)a, (kvmnn_v4x32)b, 0, 4, 1, 5);
}
static inline kvmnn_vector kvmnn_high32(kvmnn_vector a, kvmnn_vector b) {
    return (kvmnn_vector)__builtin_shufflevector((kvmnn_v4x32)a, (kvmnn_v4x32)b, 2, 6, 3, 7);
}
static inline kvmnn_vector kvmnn_low64(kvmnn_vector a, kvmnn_vector b) {
    return (kvmnn_vector)__builtin_shufflevector((kvmnn_v2x64)a, (kvmnn_v2x64)b, 0, 2);
}
static inline kvmnn_vector kvmnn_high64(kvmnn_vector a, kvmnn_vector b) {
    return (kvmnn_vector)__builtin_shufflevector((kvmnn_v2x64)a, (kvmnn_v2x64)b, 1, 3);
}

/* The even and the odd elements of two vectors. */
static inline kvmnn_vector kvmnn_select_even(kvmnn_vector a, kvmnn_vector b, size_t unit) {
    if (unit == 4) return (kvmnn_vector)__builtin_shufflevector((kvmnn_v4x32)a, (kvmnn_v4x32)b, 0, 2, 4, 6);
    return (kvmnn_vector)__builtin_shufflevector((kvmnn_v8x16)a, (kvmnn_v8x16)b, 0, 2, 4, 6, 8, 10, 12, 14);
}
static inline kvmnn_vector kvmnn_select_odd(kvmnn_vector a, kvmnn_vector b, size_t unit) {
    if (unit == 4) return (kvmnn_vector)__builtin_shufflevector((kvmnn_v4x32)a, (kvmnn_v4x32)b, 1, 3, 5, 7);
    return (kvmnn_vector)__builtin_shufflevector((kvmnn_v8x16)a, (kvmnn_v8x16)b, 1, 3, 5, 7, 9, 11, 13, 15);
}
#endif

static inline void kvmnn_transpose_plain(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride,
                                         size_t rows, size_t cols, size_t unit) {
    for (size_t r = 0; r < rows; ++r)
        for (size_t c = 0; c < cols; ++c)
            memcpy(dst + c * dst_stride + r * unit, src + r * src_stride + c * unit, unit);
}

/* What the vectors left: the last columns of all rows, and the last rows of the other columns. */
static inline void kvmnn_transpose_edges(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride,
                                         size_t rows, size_t cols, size_t unit, size_t rows_done, size_t cols_done) {
    kvmnn_transpose_plain(dst + rows_done * unit, dst_stride, src + rows_done * src_stride, src_stride,
                          rows - rows_done, cols_done, unit);
    kvmnn_transpose_plain(dst + cols_done * dst_stride, dst_stride, src + cols_done * unit, src_stride, rows,
                          cols - cols_done, unit);
}

#ifdef KVMNN_VECTORS
/* Four rows of four 32-bit units. */
static inline void kvmnn_4x4x32(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride) {
    kvmnn_vector a = kvmnn_load(src), b = kvmnn_load(src + src_stride);
    kvmnn_vector c = kvmnn_load(src + 2 * src_stride), d = kvmnn_load(src + 3 * src_stride);
    kvmnn_vector ab0 = kvmnn_low32(a, b), ab1 = kvmnn_high32(a, b);
    kvmnn_vector cd0 = kvmnn_low32(c, d), cd1 = kvmnn_high32(c, d);
    kvmnn_store(dst, kvmnn_low64(ab0, cd0));
    kvmnn_store(dst + dst_stride, kvmnn_high64(ab0, cd0));
    kvmnn_store(dst + 2 * dst_stride, kvmnn_low64(ab1, cd1));
    kvmnn_store(dst + 3 * dst_stride, kvmnn_high64(ab1, cd1));
}

/* Eight rows of eight 16-bit units. */
static inline void kvmnn_8x8x16(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride) {
    kvmnn_vector pairs[8], fours[8];
    for (size_t i = 0; i < 4; ++i) {
        kvmnn_vector a = kvmnn_load(src + 2 * i * src_stride), b = kvmnn_load(src + (2 * i + 1) * src_stride);
        pairs[2 * i] = kvmnn_low16(a, b);
        pairs[2 * i + 1] = kvmnn_high16(a, b);
    }
    for (size_t i = 0; i < 8; i += 4)
        for (size_t half = 0; half < 2; ++half) {
            fours[i + 2 * half] = kvmnn_low32(pairs[i + half], pairs[i + 2 + half]);
            fours[i + 2 * half + 1] = kvmnn_high32(pairs[i + half], pairs[i + 2 + half]);
        }
    for (size_t i = 0; i < 4; ++i) {
        kvmnn_store(dst + 2 * i * dst_stride, kvmnn_low64(fours[i], fours[4 + i]));
        kvmnn_store(dst + (2 * i + 1) * dst_stride, kvmnn_high64(fours[i], fours[4 + i]));
    }
}

/* Two rows of eight bytes each: side by side, or where they belong. */
static inline void kvmnn_store_halves(uint8_t *dst, size_t dst_stride, kvmnn_vector v) {
    if (dst_stride == 8) {
        kvmnn_store(dst, v);
        return;
    }
    memcpy(dst, &v, 8);
    memcpy(dst + dst_stride, (const uint8_t *)&v + 8, 8);
}

static inline kvmnn_vector kvmnn_load_halves(const uint8_t *src, size_t src_stride) {
    kvmnn_vector v;
    memcpy(&v, src, 8);
    memcpy((uint8_t *)&v + 8, src + src_stride, 8);
    return v;
}

/* Four rows of eight 16-bit units: eight rows of eight bytes. */
static inline void kvmnn_4x8x16(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride) {
    kvmnn_vector a = kvmnn_load(src), b = kvmnn_load(src + src_stride);
    kvmnn_vector c = kvmnn_load(src + 2 * src_stride), d = kvmnn_load(src + 3 * src_stride);
    kvmnn_vector ab0 = kvmnn_low16(a, b), ab1 = kvmnn_high16(a, b);
    kvmnn_vector cd0 = kvmnn_low16(c, d), cd1 = kvmnn_high16(c, d);
    kvmnn_store_halves(dst, dst_stride, kvmnn_low32(ab0, cd0));
    kvmnn_store_halves(dst + 2 * dst_stride, dst_stride, kvmnn_high32(ab0, cd0));
    kvmnn_store_halves(dst + 4 * dst_stride, dst_stride, kvmnn_low32(ab1, cd1));
    kvmnn_store_halves(dst + 6 * dst_stride, dst_stride, kvmnn_high32(ab1, cd1));
}

/* Eight rows of four 16-bit units: four rows of sixteen bytes. */
static inline void kvmnn_8x4x16(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride) {
    kvmnn_vector fours[4];
    for (size_t i = 0; i < 2; ++i, src += 4 * src_stride) {
        kvmnn_vector a = kvmnn_load_halves(src, src_stride), b = kvmnn_load_halves(src + 2 * src_stride, src_stride);
        kvmnn_vector even = kvmnn_low16(a, b), odd = kvmnn_high16(a, b);
        fours[2 * i] = kvmnn_low16(even, odd);
        fours[2 * i + 1] = kvmnn_high16(even, odd);
    }
    kvmnn_store(dst, kvmnn_low64(fours[0], fours[2]));
    kvmnn_store(dst + dst_stride, kvmnn_high64(fours[0], fours[2]));
    kvmnn_store(dst + 2 * dst_stride, kvmnn_low64(fours[1], fours[3]));
    kvmnn_store(dst + 3 * dst_stride, kvmnn_high64(fours[1], fours[3]));
}

/* Two rows of two 64-bit units. */
static inline void kvmnn_2x2x64(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride) {
    kvmnn_vector a = kvmnn_load(src), b = kvmnn_load(src + src_stride);
    kvmnn_store(dst, kvmnn_low64(a, b));
    kvmnn_store(dst + dst_stride, kvmnn_high64(a, b));
}

/* Two rows woven into one: what lP = 2 makes of V. */
static inline void kvmnn_interleave_rows(uint8_t *dst, const uint8_t *src, size_t src_stride, size_t cols,
                                         size_t unit) {
    const size_t step = 16 / unit;
    size_t c = 0;
    for (; c + step <= cols; c += step, dst += 32) {
        kvmnn_vector a = kvmnn_load(src + c * unit), b = kvmnn_load(src + src_stride + c * unit);
        kvmnn_store(dst, unit == 2 ? kvmnn_low16(a, b) : kvmnn_low32(a, b));
        kvmnn_store(dst + 16, unit == 2 ? kvmnn_high16(a, b) : kvmnn_high32(a, b));
    }
    kvmnn_transpose_plain(dst, 2 * unit, src + c * unit, src_stride, 2, cols - c, unit);
}

/* One row unwoven into two. */
static inline void kvmnn_deinterleave_rows(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t rows,
                                           size_t unit) {
    const size_t step = 16 / unit;
    size_t r = 0;
    for (; r + step <= rows; r += step, src += 32) {
        kvmnn_vector a = kvmnn_load(src), b = kvmnn_load(src + 16);
        kvmnn_store(dst + r * unit, kvmnn_select_even(a, b, unit));
        kvmnn_store(dst + dst_stride + r * unit, kvmnn_select_odd(a, b, unit));
    }
    kvmnn_transpose_plain(dst + r * unit, dst_stride, src, 2 * unit, rows - r, 2, unit);
}

/* As many units each way as sixteen bytes hold, one of larger ones. */
static inline void kvmnn_block(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride, size_t unit) {
    if (unit == 2) kvmnn_8x8x16(dst, dst_stride, src, src_stride);
    else if (unit == 4) kvmnn_4x4x32(dst, dst_stride, src, src_stride);
    else if (unit == 8) kvmnn_2x2x64(dst, dst_stride, src, src_stride);
    else
        for (size_t i = 0; i < unit; i += 16) kvmnn_store(dst + i, kvmnn_load(src + i));
}

/* Rows go by in blocks that fill a line of `dst`; inside a block, columns in stripes that use up a line of every row.
 */
static inline void kvmnn_blocks(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride, size_t rows,
                                size_t cols, size_t unit) {
    const size_t step = unit < 16 ? 16 / unit : 1,
                 line = unit < KVMNN_CACHE_LINE_BYTES ? KVMNN_CACHE_LINE_BYTES / unit : 1;
    const size_t whole_rows = rows - rows % step, whole_cols = cols - cols % step;
    for (size_t block = 0, block_end; block < whole_rows; block = block_end) {
        block_end = whole_rows - block < line ? whole_rows : block + line;
        for (size_t stripe = 0, stripe_end; stripe < whole_cols; stripe = stripe_end) {
            stripe_end = whole_cols - stripe < line ? whole_cols : stripe + line;
            /* The side whose lines lie further apart, and so fall into fewer sets of a cache, has fewer of them at hand. */
            if (unit < 16 && src_stride > dst_stride)
                for (size_t r = block; r < block_end; r += step) {
                    for (size_t k = 0; stripe_end + line < cols && k < step;
                         ++k) /* too many streams for the cache's own */
                        __builtin_prefetch(src + (r + k) * src_stride + (stripe_end + line) * unit);
                    for (size_t c = stripe; c < stripe_end; c += step)
                        kvmnn_block(dst + c * dst_stride + r * unit, dst_stride, src + r * src_stride + c * unit,
                                    src_stride, unit);
                }
            else
                for (size_t c = stripe; c < stripe_end; c += step)
                    for (size_t r = block; r < block_end; r += step)
                        kvmnn_block(dst + c * dst_stride + r * unit, dst_stride, src + r * src_stride + c * unit,
                                    src_stride, unit);
        }
    }
    if (unit == 2 && rows - whole_rows >= 4) {
        for (size_t c = 0; c < whole_cols; c += 8)
            kvmnn_4x8x16(dst + c * dst_stride + whole_rows * 2, dst_stride, src + whole_rows * src_stride + c * 2,
                         src_stride);
        kvmnn_transpose_edges(dst, dst_stride, src, src_stride, rows, cols, 2, whole_rows + 4, whole_cols);
    } else if (unit == 2 && cols - whole_cols >= 4) {
        for (size_t r = 0; r < whole_rows; r += 8)
            kvmnn_8x4x16(dst + whole_cols * dst_stride + r * 2, dst_stride, src + r * src_stride + whole_cols * 2,
                         src_stride);
        kvmnn_transpose_edges(dst, dst_stride, src, src_stride, rows, cols, 2, whole_rows, whole_cols + 4);
    } else {
        kvmnn_transpose_edges(dst, dst_stride, src, src_stride, rows, cols, unit, whole_rows, whole_cols);
    }
}

static inline void kvmnn_transpose(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride, size_t rows,
                                   size_t cols, size_t unit) {
    /* The small ones first, which come in great numbers. */
    if (unit == 4 && rows == 4 && cols % 4 == 0)
        for (size_t c = 0; c < cols; c += 4) kvmnn_4x4x32(dst + c * dst_stride, dst_stride, src + c * 4, src_stride);
    else if (unit == 4 && cols == 4 && rows % 4 == 0)
        for (size_t r = 0; r < rows; r += 4) kvmnn_4x4x32(dst + r * 4, dst_stride, src + r * src_stride, src_stride);
    else if (unit == 2 && rows == 4 && cols % 8 == 0)
        for (size_t c = 0; c < cols; c += 8) kvmnn_4x8x16(dst + c * dst_stride, dst_stride, src + c * 2, src_stride);
    else if (unit == 2 && cols == 4 && rows % 8 == 0)
        for (size_t r = 0; r < rows; r += 8) kvmnn_8x4x16(dst + r * 2, dst_stride, src + r * src_stride, src_stride);
    else if (rows == 2 && dst_stride == 2 * unit && unit == 2) kvmnn_interleave_rows(dst, src, src_stride, cols, 2);
    else if (rows == 2 && dst_stride == 2 * unit && unit == 4) kvmnn_interleave_rows(dst, src, src_stride, cols, 4);
    else if (cols == 2 && src_stride == 2 * unit && unit == 2) kvmnn_deinterleave_rows(dst, dst_stride, src, rows, 2);
    else if (cols == 2 && src_stride == 2 * unit && unit == 4) kvmnn_deinterleave_rows(dst, dst_stride, src, rows, 4);
    else if (unit == 2) kvmnn_blocks(dst, dst_stride, src, src_stride, rows, cols, 2);
    else if (unit == 4) kvmnn_blocks(dst, dst_stride, src, src_stride, rows, cols, 4);
    else if (unit == 8) kvmnn_blocks(dst, dst_stride, src, src_stride, rows, cols, 8);
    else if (unit == 16) kvmnn_blocks(dst, dst_stride, src, src_stride, rows, cols, 16);
    else if (unit == 32) kvmnn_blocks(dst, dst_stride, src, src_stride, rows, cols, 32);
    else if (unit % 16 == 0) kvmnn_blocks(dst, dst_stride, src, src_stride, rows, cols, unit);
    else kvmnn_transpose_plain(dst, dst_stride, src, src_stride, rows, cols, unit);
}
#else
static inline void kvmnn_transpose(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride, size_t rows,
                                   size_t cols, size_t unit) {
    if (unit == 2) kvmnn_transpose_plain(dst, dst_stride, src, src_stride, rows, cols, 2);
    else if (unit == 4) kvmnn_transpose_plain(dst, dst_stride, src, src_stride, rows, cols, 4);
    else kvmnn_transpose_plain(dst, dst_stride, src, src_stride, rows, cols, unit);
}
#endif

#endif
