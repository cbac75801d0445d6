/* Sums of attention rows over blocks of keys, in the engine's order of additions (docs/h2o.md). */
#ifndef KVMNN_SCORES_H
#define KVMNN_SCORES_H

#include <stddef.h>

typedef struct {
    size_t heads;
    size_t queries;
    size_t keys;
    ptrdiff_t head_stride;  /* floats from one head's rows to the next */
    ptrdiff_t query_stride; /* floats from one row to the next; a row itself is contiguous */
    size_t block_keys;      /* keys in a block; at least 1 */
    size_t tile_keys;       /* keys in a tile of the attention; at least 1 */
} kvmnn_attention_rows;

/* Add every row to `sums`, one float for each block: float32 additions, for each block in the order head, tile, query,
 * key. Sums of different blocks do not meet, so eight of them run side by side. */
void kvmnn_block_sums(const kvmnn_attention_rows *r, const float *rows, float *sums);

#endif
