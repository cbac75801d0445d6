/* Packed K and V: moving tokens between packed heads and plain rows, and inside packed heads.
 *
 * One head at a time. A "word" is one element of 2 or 4 bytes; nothing here looks at its meaning. A plain row is the
 * `dims` words of one token, rows lie `row_stride` bytes apart. Buffers may start at any address. docs/layout.md has
 * the layouts; callers have checked every number, so that each token named lies inside the head.
 */
#ifndef KVMNN_LAYOUT_KERNELS_H
#define KVMNN_LAYOUT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    size_t word_bytes;   /* bytes of an element: 2 or 4 */
    size_t dims;         /* head_dim */
    size_t lP;           /* packing of the axis that the engine's matrix product sums over */
    size_t hP;           /* packing of the other axis */
    size_t block_tokens; /* tokens in a block of V */
} kvmnn_layout;

typedef struct {
    /* Packed tokens [start, start + count) to plain rows. */
    void (*gather)(const kvmnn_layout *p, const uint8_t *head, size_t start, size_t count, uint8_t *rows,
                   size_t row_stride);

    /* The same for more than the caches hold: pieces are made in `scratch` (at least dims * word bytes; large enough
     * for a tile of K and a block of V it pays) and written past the caches. */
    void (*gather_nontemporal)(const kvmnn_layout *p, const uint8_t *head, size_t start, size_t count, uint8_t *rows,
                               size_t row_stride, uint8_t *scratch, size_t scratch_bytes);

    /* Plain rows over packed tokens; padding stays as it is. */
    void (*scatter)(const kvmnn_layout *p, uint8_t *head, size_t start, size_t count, const uint8_t *rows,
                    size_t row_stride);
    void (*scatter_nontemporal)(const kvmnn_layout *p, uint8_t *head, size_t start, size_t count, const uint8_t *rows,
                                size_t row_stride, uint8_t *scratch, size_t scratch_bytes);

    /* Zero the words of tokens [start, start + count); padding stays as it is. */
    void (*zero)(const kvmnn_layout *p, uint8_t *head, size_t start, size_t count);

    /* Zero everything in the head's `bytes` that is no word of the tokens [0, num_valid). */
    void (*pad)(const kvmnn_layout *p, uint8_t *head, size_t live, size_t bytes);

    /* Copy `count` tokens from src to dst in ascending order, as a loop over single tokens would; the ranges may
     * overlap. `scratch` has `scratch_bytes`, at least dims * word. */
    void (*shift)(const kvmnn_layout *p, uint8_t *head, size_t src, size_t dst, size_t count, uint8_t *scratch,
                  size_t scratch_bytes);
} kvmnn_layout_kernels;

extern const kvmnn_layout_kernels kvmnn_key_kernels, kvmnn_value_kernels;

/* What the kernels were compiled for. */
const char *kvmnn_layout_isa_name(void);

#endif
