/* Numbers out of ggml's blocks of 32, one table of functions per SIMD level; every level gives the same bits (NaN is NaN).
 *
 * A number is computed as ggml does it in float32, each operation rounded: code times scale, or code times scale, plus
 * minimum. No allocation, no Python; blocks may start at any address.
 */
#ifndef KVMNN_BLOCKS_H
#define KVMNN_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

enum { KVMNN_BLOCK_VALUES = 32 };
enum { KVMNN_Q4_0, KVMNN_Q4_1, KVMNN_Q5_0, KVMNN_Q5_1, KVMNN_Q8_0, KVMNN_IQ4_NL, KVMNN_BLOCK_KINDS };

/* Rows of blocks that lie one after the other: block b of row r is at from + r * stride + b * its size. */
typedef struct {
    const uint8_t *source;
    size_t rows, count, stride;
} kvmnn_block_rows;

typedef struct {
    const char *name;

    /* to[0 .. 32 * rows * count) = the numbers of all blocks, row by row. */
    void (*dequantize[KVMNN_BLOCK_KINDS])(const kvmnn_block_rows *blocks, float *to);
} kvmnn_block_kernels;

/* The table of a level of simd.h that this processor runs. */
const kvmnn_block_kernels *kvmnn_block_kernels_at(int level);

/* Bytes of a block of a kind. */
size_t kvmnn_block_bytes(int kind);

#endif
