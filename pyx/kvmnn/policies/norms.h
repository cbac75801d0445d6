/* L2 norms of rows and the choice of the lowest values, one table of functions per SIMD level.
 *
 * Every level gives the same bits. A norm is float32: element j of a row is squared and added to the partial sum
 * j mod 16, elements in ascending order; then the partial sums k and k + 8 are added, of those eight k and k + 4, then
 * k and k + 2, then the last two; and the square root is taken. Each operation is rounded to float32.
 *
 * No allocation, no Python; words are of the machine's byte order and may start at any address.
 */
#ifndef KVMNN_NORMS_H
#define KVMNN_NORMS_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name;

    /* out[i] = norm of the `dims` words at rows + i * stride (bytes); words of 2, 2 and 4 bytes. */
    void (*fp16)(const uint8_t *rows, ptrdiff_t stride, size_t count, size_t dims, float *out);
    void (*bf16)(const uint8_t *rows, ptrdiff_t stride, size_t count, size_t dims, float *out);
    void (*fp32)(const uint8_t *rows, ptrdiff_t stride, size_t count, size_t dims, float *out);

    /* ranks[i] compares as values[i] should be preferred: a lower rank first. NaN is last, -0 equals 0. */
    void (*rank)(const float *values, size_t n, int highest, uint32_t *ranks);
} kvmnn_norm_kernels;

/* The table of a level of simd.h that this processor runs; the baseline where the compiler has no vector types. */
const kvmnn_norm_kernels *kvmnn_norm_kernels_at(int level);

/* out = the indices of the m lowest of n ranks in ascending order of index; of equal ranks the first ones. 0 < m <= n. */
void kvmnn_select_lowest(const uint32_t *ranks, size_t n, size_t m, int64_t *out);

#endif
