/* Keys and values as int8, with the float operations in the order in which the engine's portable C does them.
 *
 * One head at a time; plain rows are `dims` floats, `row_stride` bytes apart. docs/layout.md has the layouts. Built
 * without contraction of a * b + c, every result is the same on every machine.
 */
#ifndef KVMNN_QUANTIZE_H
#define KVMNN_QUANTIZE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    size_t dims;
    size_t lP;           /* lP8 */
    size_t hP;           /* hP8 */
    size_t block_tokens; /* tokens in a block of V */
} kvmnn_int8_layout;

/* Append `count` tokens at `num_past`. `sums` has a float for each token slot, `running_max` one for each dim: the
 * running maximum, raised only where count > 1. */
void kvmnn_quantize_keys(const kvmnn_int8_layout *layout, uint8_t *head, float *sums, float *running_max,
                         size_t num_past, size_t count, const uint8_t *rows, size_t row_stride);

/* Append `count` tokens at `num_past` to a head with `blocks` blocks. `sums` is [blocks][dims rounded up to hP]. */
void kvmnn_quantize_values(const kvmnn_int8_layout *layout, uint8_t *head, float *sums, size_t blocks, size_t num_past,
                           size_t count, const uint8_t *rows, size_t row_stride);

/* code * scale + bias for the tokens [start, start + count). */
void kvmnn_dequantize_keys(const kvmnn_int8_layout *layout, const uint8_t *head, size_t start, size_t count,
                           uint8_t *rows, size_t row_stride);
void kvmnn_dequantize_values(const kvmnn_int8_layout *layout, const uint8_t *head, size_t start, size_t count,
                             uint8_t *rows, size_t row_stride);

#endif
