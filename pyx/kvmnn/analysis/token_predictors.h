/* Predictors along the token axis, and bitshuffle: leaf kernels over one block of one byte lane, [token][head][dim].
 *
 * Source and destination never overlap. There is one table per level of simd.h.
 */
#ifndef KVMNN_TOKEN_PREDICTORS_H
#define KVMNN_TOKEN_PREDICTORS_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name;

    /* dst[i] = src[i] - src[i - row], the first `row` bytes as they are; row is the bytes of a token. */
    void (*delta)(const uint8_t *src, size_t n, size_t row, uint8_t *dst);

    /* The same over the data itself. */
    void (*delta_in_place)(uint8_t *data, size_t n, size_t row);

    /* delta with exclusive or instead of the difference. */
    void (*exclusive_or)(const uint8_t *src, size_t n, size_t row, uint8_t *dst);

    /* In each run of `dims` bytes, odd columns minus their left neighbour; even columns as they are. */
    void (*pair)(const uint8_t *src, size_t n, size_t dims, uint8_t *dst);

    /* The inverses, in place. */
    void (*undo_delta)(uint8_t *data, size_t n, size_t row);
    void (*undo_exclusive_or)(uint8_t *data, size_t n, size_t row);
    void (*undo_pair)(uint8_t *data, size_t n, size_t dims);

    /* All bits 0 of the n bytes, then all bits 1 ..., packed from the lowest bit of each byte up into n bytes. */
    void (*bitshuffle)(const uint8_t *src, size_t n, uint8_t *dst);
} kvmnn_token_kernels;

/* The table of a level of simd.h that this processor runs. */
const kvmnn_token_kernels *kvmnn_token_kernels_at(int level);

#endif
