#include "scores.h"

#if defined(_MSC_VER)
#define restrict __restrict
#endif

enum { PARALLEL_BLOCKS = 8 };

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

/* Keys [begin, begin + count) of each of eight neighbouring blocks; one chain of additions for each. */
static void sum_eight_blocks(const float *restrict p, size_t count, size_t block, float *restrict a) {
    float a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3], a4 = a[4], a5 = a[5], a6 = a[6], a7 = a[7];
    for (size_t k = 0; k < count; ++k) {
        a0 += p[k];
        a1 += p[block + k];
        a2 += p[2 * block + k];
        a3 += p[3 * block + k];
        a4 += p[4 * block + k];
        a5 += p[5 * block + k];
        a6 += p[6 * block + k];
        a7 += p[7 * block + k];
    }
    a[0] = a0, a[1] = a1, a[2] = a2, a[3] = a3, a[4] = a4, a[5] = a5, a[6] = a6, a[7] = a7;
}

static float sum_block(const float *p, size_t count, float sum) {
    for (size_t k = 0; k < count; ++k) sum += p[k];
    return sum;
}

/* One head whose tiles and blocks end together: every block is cut into the same segments. */
static void sum_regular_head(const kvmnn_attention_rows *r, const float *head, size_t segment, float *sums) {
    size_t full = r->keys / r->block_keys, b = 0;
    for (; b + PARALLEL_BLOCKS <= full; b += PARALLEL_BLOCKS)
        for (size_t s = 0; s < r->block_keys; s += segment)
            for (size_t q = 0; q < r->queries; ++q)
                sum_eight_blocks(head + (ptrdiff_t)q * r->query_stride + b * r->block_keys + s, segment, r->block_keys,
                                 sums + b);
    for (; b * r->block_keys < r->keys; ++b) {
        size_t size = min_size(r->block_keys, r->keys - b * r->block_keys);
        for (size_t s = 0; s < size; s += segment)
            for (size_t q = 0; q < r->queries; ++q)
                sums[b] = sum_block(head + (ptrdiff_t)q * r->query_stride + b * r->block_keys + s,
                                    min_size(segment, size - s), sums[b]);
    }
}

static void sum_irregular_head(const kvmnn_attention_rows *r, const float *head, float *sums) {
    for (size_t start = 0; start < r->keys; start += r->tile_keys) {
        size_t end = start + min_size(r->tile_keys, r->keys - start);
        for (size_t q = 0; q < r->queries; ++q) {
            const float *row = head + (ptrdiff_t)q * r->query_stride;
            for (size_t k = start; k < end;) {
                size_t b = k / r->block_keys;
                size_t stop = b * r->block_keys + min_size(r->block_keys, end - b * r->block_keys);
                sums[b] = sum_block(row + k, stop - k, sums[b]);
                k = stop;
            }
        }
    }
}

void kvmnn_block_sums(const kvmnn_attention_rows *r, const float *rows, float *sums) {
    /* Tiles change the order only among several queries, and only where they cut a block. */
    int is_regular = r->queries == 1 || r->tile_keys >= r->keys || r->tile_keys % r->block_keys == 0;
    for (size_t h = 0; h < r->heads; ++h) {
        const float *head = rows + (ptrdiff_t)h * r->head_stride;
        if (is_regular) sum_regular_head(r, head, r->block_keys, sums);
        else if (r->block_keys % r->tile_keys == 0) sum_regular_head(r, head, r->tile_keys, sums);
        else sum_irregular_head(r, head, sums);
    }
}
