/* Rows put together from the ends of rows and the beginnings of others: what moving tokens out of phase comes to.
 *
 * kvmnn_merge_rows(): row by row of `width` bytes, to = the last width - skip bytes of `first`, then the first `skip`
 * bytes of `second`. Rows follow each other without gaps. `dst` may be `first` or lie before it. Up to width bytes
 * after the rows of `first` and before those of `second` may be read.
 */
#ifndef KVMNN_ROW_MERGE_H
#define KVMNN_ROW_MERGE_H

#include "transpose.h"

/* Whether kvmnn_merge_rows() takes these rows; the others have to go another way. */
static inline int kvmnn_can_merge_rows(size_t width, size_t rows) {
#ifdef KVMNN_VECTORS
    return (width % 16 == 0 || 16 % width == 0) && width * rows % 16 == 0;
#else
    (void)width, (void)rows;
    return 0;
#endif
}

#ifdef KVMNN_VECTORS
/* Rows that a vector holds one or more of. */
static inline void kvmnn_merge_rows_narrow(uint8_t *dst, const uint8_t *first, const uint8_t *second, size_t width,
                                           size_t skip, size_t bytes) {
    uint8_t first_mask[16];
    for (size_t i = 0; i < 16; ++i) first_mask[i] = i % width < width - skip ? 0xff : 0;
    const kvmnn_vector mask = kvmnn_load(first_mask);
    first += skip;
    second -= width - skip;
    for (size_t i = 0; i < bytes; i += 16) {
        kvmnn_vector a = kvmnn_load(first + i), b = kvmnn_load(second + i);
        kvmnn_store(dst + i, (a & mask) | (b & ~mask));
    }
}

/* Rows of whole vectors; one of them may be of both kinds. */
static inline void kvmnn_merge_rows_wide(uint8_t *dst, const uint8_t *first, const uint8_t *second, size_t width,
                                         size_t skip, size_t rows) {
    const size_t first_bytes = width - skip, whole_bytes = first_bytes - first_bytes % 16;
    uint8_t first_mask[16];
    for (size_t i = 0; i < 16; ++i) first_mask[i] = whole_bytes + i < first_bytes ? 0xff : 0;
    const kvmnn_vector mask = kvmnn_load(first_mask);
    for (; rows > 0; --rows, dst += width, first += width, second += width) {
        size_t i = 0;
        for (; i < whole_bytes; i += 16) kvmnn_store(dst + i, kvmnn_load(first + skip + i));
        if (i < first_bytes) {
            kvmnn_vector a = kvmnn_load(first + skip + i), b = kvmnn_load(second + i - first_bytes);
            kvmnn_store(dst + i, (a & mask) | (b & ~mask));
            i += 16;
        }
        for (; i < width; i += 16) kvmnn_store(dst + i, kvmnn_load(second + i - first_bytes));
    }
}
#endif

static inline void kvmnn_merge_rows(uint8_t *dst, const uint8_t *first, const uint8_t *second, size_t width,
                                    size_t skip, size_t rows) {
#ifdef KVMNN_VECTORS
    if (width <= 16) kvmnn_merge_rows_narrow(dst, first, second, width, skip, rows * width);
    else kvmnn_merge_rows_wide(dst, first, second, width, skip, rows);
#else
    (void)dst, (void)first, (void)second, (void)width, (void)skip, (void)rows;
#endif
}

#endif
