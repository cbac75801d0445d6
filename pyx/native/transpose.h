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

#if defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 12)
#define KVMNN_VECTORS 1

typedef uint16_t kvmnn_v8x16 __attribute__((vector_size(16)));
typedef uint32_t kvmnn_v4x32 __attribute__((vector_size(16)));
typedef uint64_t kvmnn_v2x64 __attribute__((vector_size(16)));

#define KVMNN_LOAD(type, p)                      \
    __extension__({                              \
        type loaded_;                            \
        memcpy(&loaded_, (p), sizeof loaded_);   \
        loaded_;                                 \
    })
#define KVMNN_STORE(p, v)                        \
    do {                                         \
        __typeof__(v) stored_ = (v);             \
        memcpy((p), &stored_, sizeof stored_);   \
    } while (0)

/* The low and the high halves of two vectors, element by element in turns. */
#define KVMNN_LOW16(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define KVMNN_HIGH16(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define KVMNN_LOW32(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define KVMNN_HIGH32(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#define KVMNN_LOW64(a, b) __builtin_shufflevector(a, b, 0, 2)
#define KVMNN_HIGH64(a, b) __builtin_shufflevector(a, b, 1, 3)

/* Four rows of four 32-bit units. */
static inline void kvmnn_4x4x32(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride) {
    kvmnn_v4x32 a = KVMNN_LOAD(kvmnn_v4x32, from), b = KVMNN_LOAD(kvmnn_v4x32, from + from_stride);
    kvmnn_v4x32 c = KVMNN_LOAD(kvmnn_v4x32, from + 2 * from_stride);
    kvmnn_v4x32 d = KVMNN_LOAD(kvmnn_v4x32, from + 3 * from_stride);
    kvmnn_v2x64 ab0 = (kvmnn_v2x64)KVMNN_LOW32(a, b), ab1 = (kvmnn_v2x64)KVMNN_HIGH32(a, b);
    kvmnn_v2x64 cd0 = (kvmnn_v2x64)KVMNN_LOW32(c, d), cd1 = (kvmnn_v2x64)KVMNN_HIGH32(c, d);
    KVMNN_STORE(to, KVMNN_LOW64(ab0, cd0));
    KVMNN_STORE(to + to_stride, KVMNN_HIGH64(ab0, cd0));
    KVMNN_STORE(to + 2 * to_stride, KVMNN_LOW64(ab1, cd1));
    KVMNN_STORE(to + 3 * to_stride, KVMNN_HIGH64(ab1, cd1));
}

/* Eight rows of eight 16-bit units. */
static inline void kvmnn_8x8x16(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride) {
    kvmnn_v4x32 pairs[8], fours[8];
    for (int i = 0; i < 4; ++i) {
        kvmnn_v8x16 a = KVMNN_LOAD(kvmnn_v8x16, from + (size_t)(2 * i) * from_stride);
        kvmnn_v8x16 b = KVMNN_LOAD(kvmnn_v8x16, from + (size_t)(2 * i + 1) * from_stride);
        pairs[2 * i] = (kvmnn_v4x32)KVMNN_LOW16(a, b);
        pairs[2 * i + 1] = (kvmnn_v4x32)KVMNN_HIGH16(a, b);
    }
    for (int i = 0; i < 2; ++i)
        for (int half = 0; half < 2; ++half) {
            kvmnn_v4x32 a = pairs[4 * i + half], b = pairs[4 * i + 2 + half];
            fours[4 * i + 2 * half] = KVMNN_LOW32(a, b);
            fours[4 * i + 2 * half + 1] = KVMNN_HIGH32(a, b);
        }
    for (int i = 0; i < 4; ++i) {
        kvmnn_v2x64 a = (kvmnn_v2x64)fours[i], b = (kvmnn_v2x64)fours[4 + i];
        KVMNN_STORE(to + (size_t)(2 * i) * to_stride, KVMNN_LOW64(a, b));
        KVMNN_STORE(to + (size_t)(2 * i + 1) * to_stride, KVMNN_HIGH64(a, b));
    }
}

/* Four rows of eight 16-bit units: eight rows of eight bytes. */
static inline void kvmnn_4x8x16(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride) {
    kvmnn_v8x16 a = KVMNN_LOAD(kvmnn_v8x16, from), b = KVMNN_LOAD(kvmnn_v8x16, from + from_stride);
    kvmnn_v8x16 c = KVMNN_LOAD(kvmnn_v8x16, from + 2 * from_stride);
    kvmnn_v8x16 d = KVMNN_LOAD(kvmnn_v8x16, from + 3 * from_stride);
    kvmnn_v4x32 ab[2] = {(kvmnn_v4x32)KVMNN_LOW16(a, b), (kvmnn_v4x32)KVMNN_HIGH16(a, b)};
    kvmnn_v4x32 cd[2] = {(kvmnn_v4x32)KVMNN_LOW16(c, d), (kvmnn_v4x32)KVMNN_HIGH16(c, d)};
    for (int half = 0; half < 2; ++half) {
        kvmnn_v2x64 two[2] = {(kvmnn_v2x64)KVMNN_LOW32(ab[half], cd[half]), (kvmnn_v2x64)KVMNN_HIGH32(ab[half], cd[half])};
        for (int i = 0; i < 2; ++i) {
            memcpy(to, &two[i], 8);
            memcpy(to + to_stride, (const uint8_t *)&two[i] + 8, 8);
            to += 2 * to_stride;
        }
    }
}

/* Eight rows of four 16-bit units: four rows of sixteen bytes. */
static inline void kvmnn_8x4x16(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride) {
    kvmnn_v8x16 rows[4];
    for (int i = 0; i < 4; ++i) { /* rows i and i + 4 side by side */
        memcpy(&rows[i], from + (size_t)i * from_stride, 8);
        memcpy((uint8_t *)&rows[i] + 8, from + (size_t)(i + 4) * from_stride, 8);
    }
    kvmnn_v8x16 even0 = KVMNN_LOW16(rows[0], rows[2]), odd0 = KVMNN_LOW16(rows[1], rows[3]);
    kvmnn_v8x16 even1 = KVMNN_HIGH16(rows[0], rows[2]), odd1 = KVMNN_HIGH16(rows[1], rows[3]);
    kvmnn_v2x64 a0 = (kvmnn_v2x64)KVMNN_LOW16(even0, odd0), a1 = (kvmnn_v2x64)KVMNN_HIGH16(even0, odd0);
    kvmnn_v2x64 b0 = (kvmnn_v2x64)KVMNN_LOW16(even1, odd1), b1 = (kvmnn_v2x64)KVMNN_HIGH16(even1, odd1);
    KVMNN_STORE(to, KVMNN_LOW64(a0, b0));
    KVMNN_STORE(to + to_stride, KVMNN_HIGH64(a0, b0));
    KVMNN_STORE(to + 2 * to_stride, KVMNN_LOW64(a1, b1));
    KVMNN_STORE(to + 3 * to_stride, KVMNN_HIGH64(a1, b1));
}
#endif

static inline void kvmnn_transpose_plain(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride,
                                         size_t rows, size_t cols, size_t unit) {
    /* Columns go by in stripes, so that lines of `to` fill while they are near. */
    for (size_t stripe = 0; stripe < cols; stripe += 16) {
        size_t end = stripe + 16 < cols ? stripe + 16 : cols;
        for (size_t r = 0; r < rows; ++r)
            for (size_t c = stripe; c < end; ++c)
                memcpy(to + c * to_stride + r * unit, from + r * from_stride + c * unit, unit);
    }
}

/* What the vectors leave: the last `cols % step` columns of all rows, and the last `rows % step` rows of the others. */
static inline void kvmnn_transpose_rest(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride,
                                        size_t rows, size_t cols, size_t unit, size_t rows_done, size_t cols_done) {
    kvmnn_transpose_plain(to + rows_done * unit, to_stride, from + rows_done * from_stride, from_stride,
                          rows - rows_done, cols_done, unit);
    kvmnn_transpose_plain(to + cols_done * to_stride, to_stride, from + cols_done * unit, from_stride, rows,
                          cols - cols_done, unit);
}

#ifdef KVMNN_VECTORS
/* Two rows woven into one, and one row unwoven into two: what lP = 2 makes of V. */
static inline void kvmnn_weave(uint8_t *to, const uint8_t *from, size_t from_stride, size_t cols, size_t unit) {
    size_t c = 0, step = 16 / unit;
    for (; c + step <= cols; c += step) {
        const uint8_t *p = from + c * unit;
        uint8_t *q = to + 2 * c * unit;
        if (unit == 2) {
            kvmnn_v8x16 a = KVMNN_LOAD(kvmnn_v8x16, p), b = KVMNN_LOAD(kvmnn_v8x16, p + from_stride);
            KVMNN_STORE(q, KVMNN_LOW16(a, b));
            KVMNN_STORE(q + 16, KVMNN_HIGH16(a, b));
        } else {
            kvmnn_v4x32 a = KVMNN_LOAD(kvmnn_v4x32, p), b = KVMNN_LOAD(kvmnn_v4x32, p + from_stride);
            KVMNN_STORE(q, KVMNN_LOW32(a, b));
            KVMNN_STORE(q + 16, KVMNN_HIGH32(a, b));
        }
    }
    kvmnn_transpose_rest(to, 2 * unit, from, from_stride, 2, cols, unit, 2, c);
}

static inline void kvmnn_unweave(uint8_t *to, size_t to_stride, const uint8_t *from, size_t rows, size_t unit) {
    size_t r = 0, step = 16 / unit;
    for (; r + step <= rows; r += step) {
        const uint8_t *p = from + 2 * r * unit;
        uint8_t *q = to + r * unit;
        if (unit == 2) {
            kvmnn_v8x16 a = KVMNN_LOAD(kvmnn_v8x16, p), b = KVMNN_LOAD(kvmnn_v8x16, p + 16);
            KVMNN_STORE(q, __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14));
            KVMNN_STORE(q + to_stride, __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15));
        } else {
            kvmnn_v4x32 a = KVMNN_LOAD(kvmnn_v4x32, p), b = KVMNN_LOAD(kvmnn_v4x32, p + 16);
            KVMNN_STORE(q, __builtin_shufflevector(a, b, 0, 2, 4, 6));
            KVMNN_STORE(q + to_stride, __builtin_shufflevector(a, b, 1, 3, 5, 7));
        }
    }
    kvmnn_transpose_rest(to, to_stride, from, 2 * unit, rows, 2, unit, r, 2);
}

static inline void kvmnn_transpose32(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride,
                                     size_t rows, size_t cols) {
    size_t whole_rows = rows - rows % 4, whole_cols = cols - cols % 4;
    for (size_t stripe = 0; stripe < whole_cols; stripe += 16) {
        size_t end = stripe + 16 < whole_cols ? stripe + 16 : whole_cols;
        for (size_t r = 0; r < whole_rows; r += 4)
            for (size_t c = stripe; c < end; c += 4)
                kvmnn_4x4x32(to + c * to_stride + r * 4, to_stride, from + r * from_stride + c * 4, from_stride);
    }
    kvmnn_transpose_rest(to, to_stride, from, from_stride, rows, cols, 4, whole_rows, whole_cols);
}

static inline void kvmnn_transpose16(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride,
                                     size_t rows, size_t cols) {
    size_t whole_rows = rows - rows % 8, whole_cols = cols - cols % 8;
    for (size_t stripe = 0; stripe < whole_cols; stripe += 32) {
        size_t end = stripe + 32 < whole_cols ? stripe + 32 : whole_cols;
        for (size_t r = 0; r < whole_rows; r += 8)
            for (size_t c = stripe; c < end; c += 8)
                kvmnn_8x8x16(to + c * to_stride + r * 2, to_stride, from + r * from_stride + c * 2, from_stride);
    }
    if (rows - whole_rows >= 4) {
        for (size_t c = 0; c < whole_cols; c += 8)
            kvmnn_4x8x16(to + c * to_stride + whole_rows * 2, to_stride, from + whole_rows * from_stride + c * 2,
                         from_stride);
        kvmnn_transpose_rest(to, to_stride, from, from_stride, rows, cols, 2, whole_rows + 4, whole_cols);
    } else if (cols - whole_cols >= 4) {
        for (size_t r = 0; r < whole_rows; r += 8)
            kvmnn_8x4x16(to + whole_cols * to_stride + r * 2, to_stride, from + r * from_stride + whole_cols * 2,
                         from_stride);
        kvmnn_transpose_rest(to, to_stride, from, from_stride, rows, cols, 2, whole_rows, whole_cols + 4);
    } else {
        kvmnn_transpose_rest(to, to_stride, from, from_stride, rows, cols, 2, whole_rows, whole_cols);
    }
}
#endif

static inline void kvmnn_transpose(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride, size_t rows,
                                   size_t cols, size_t unit) {
#ifdef KVMNN_VECTORS
    if (rows == 2 && to_stride == 2 * unit && unit <= 4) kvmnn_weave(to, from, from_stride, cols, unit);
    else if (cols == 2 && from_stride == 2 * unit && unit <= 4) kvmnn_unweave(to, to_stride, from, rows, unit);
    else if (unit == 2) kvmnn_transpose16(to, to_stride, from, from_stride, rows, cols);
    else if (unit == 4) kvmnn_transpose32(to, to_stride, from, from_stride, rows, cols);
    else
#endif
        if (unit == 2) kvmnn_transpose_plain(to, to_stride, from, from_stride, rows, cols, 2);
    else if (unit == 4) kvmnn_transpose_plain(to, to_stride, from, from_stride, rows, cols, 4);
    else if (unit == 8) kvmnn_transpose_plain(to, to_stride, from, from_stride, rows, cols, 8);
    else if (unit == 16) kvmnn_transpose_plain(to, to_stride, from, from_stride, rows, cols, 16);
    else kvmnn_transpose_plain(to, to_stride, from, from_stride, rows, cols, unit);
}

#endif
