/* Numbers out of MLX's quantised groups, one table of functions per SIMD level; every level gives the same bits (NaN is
 * NaN).
 *
 * A number is computed as MLX does it: code times scale, then plus bias, each rounded to the type of the scales.
 */
#ifndef KVMNN_GROUPS_H
#define KVMNN_GROUPS_H

#include <stddef.h>
#include <stdint.h>

enum { KVMNN_GROUPS_F16, KVMNN_GROUPS_BF16, KVMNN_GROUPS_F32, KVMNN_GROUPS_TYPES };

/* Rows of codes of `bits` bits, from the lowest bit of the first byte on: 8, or a whole number of 8 codes a row. Scales
 * and biases: a word for each group of a row; to: a word for each code. All rows lie one after the other. */
typedef struct {
    const uint8_t *codes, *scales, *biases;
    uint8_t *out;
    size_t rows, values, groups;
    int bits;
} kvmnn_group_rows;

typedef struct {
    const char *name;
    void (*dequantize[KVMNN_GROUPS_TYPES])(const kvmnn_group_rows *groups);
} kvmnn_group_kernels;

/* The table of a level of simd.h that this processor runs. */
const kvmnn_group_kernels *kvmnn_group_kernels_at(int level);

#endif
