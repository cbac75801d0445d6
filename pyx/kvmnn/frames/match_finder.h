/* Bytes of a lane that occurred before: of rows that are alike, what is equal. */
#ifndef KVMNN_MATCH_FINDER_H
#define KVMNN_MATCH_FINDER_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint32_t start, length, distance; /* ascending, and none reaches into the next */
} kvmnn_repeat;

/* Room for that many repeats in `n` bytes. */
static inline size_t kvmnn_repeats_bound(size_t n) { return n / 4 + 1; }

/* Entries of the table for `n` bytes, a power of two. */
size_t kvmnn_repeats_table_size(size_t n);

/* The repeats in `n` bytes; their number. Looks at one place in eight, at fewer where it finds nothing; from a place that
   was there before it goes on through both rows. `is_thorough`: a literal takes more than four bits, so shorter repeats
   pay.
   `level`: a SIMD level that this processor runs; all find the same.
   `table` has kvmnn_repeats_table_size(n) entries of any content, `out` room for kvmnn_repeats_bound(n). */
size_t kvmnn_repeats_find(int level, const uint8_t *lane, size_t n, int is_thorough, uint32_t *table,
                          kvmnn_repeat *out);

/* Of some places of a lane, how many have bytes that were there before and are in none of its `count` repeats, as a share:
   a search that looks at one place in eight misses rows that lie otherwise. The places are those where a byte is 0, or one
   of a few, so that they are the same wherever bytes are; a few whose eight bytes are looked for right before; and a few
   where five are as in a row before. The largest of the three shares. `level` and `table` as before. */
double kvmnn_repeats_estimate_missed(
    int level, const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count, uint32_t *table);

#endif
