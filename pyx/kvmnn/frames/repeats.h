/* Words that occurred before, found once for all lanes of an array: equal chunks of 16 words at multiples of 16. */
#ifndef KVMNN_REPEATS_H
#define KVMNN_REPEATS_H

#include <stddef.h>
#include <stdint.h>

enum { KVMNN_CHUNK = 16 };

typedef struct {
    uint32_t at, length, distance; /* in words; ascending, and none reaches into the next */
} kvmnn_repeat;

/* Room for that many repeats in `words` words. */
static inline size_t kvmnn_repeats_bound(size_t words) { return words / KVMNN_CHUNK + 1; }

/* Entries of the table for `words` words, a power of two. */
size_t kvmnn_repeats_table(size_t words);

/* The repeats in `words` words of `stride` bytes; their number. A sample of the chunks says first whether looking pays.
   `table` has kvmnn_repeats_table(words) entries of any content. */
size_t kvmnn_repeats_find(const uint8_t *src, size_t words, int stride, uint32_t *table, kvmnn_repeat *out);

/* Repeats of ten bytes and more in a lane of its own, put between those that are known. `table` has
   KVMNN_BYTE_TABLE entries, `out` room for kvmnn_byte_repeats_bound(n) + count. Returns their number. */
enum { KVMNN_BYTE_TABLE = 1 << 13 };
static inline size_t kvmnn_byte_repeats_bound(size_t n) { return n / 10 + 1; }
size_t kvmnn_byte_repeats_find(const uint8_t *lane, size_t n, const kvmnn_repeat *known, size_t count, uint32_t *table,
                               kvmnn_repeat *out);

#endif
