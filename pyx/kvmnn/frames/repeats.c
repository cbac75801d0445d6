#include "repeats.h"

#include <string.h>

enum { SAMPLED = 16, WORTH = 32 }; /* one chunk in 16 is looked at first; one in 32 of those must be a repeat */

size_t kvmnn_repeats_table(size_t words) {
    size_t size = 256;
    while (size < 4 * (words / KVMNN_CHUNK)) size *= 2;
    return size;
}

static inline uint64_t hash(const uint8_t *chunk, int stride) {
    uint64_t a, b;
    memcpy(&a, chunk, 8);
    memcpy(&b, chunk + 8 * stride, 8); /* inside the chunk's second half */
    return (a ^ (b * 0x9E3779B97F4A7C15ULL)) * 0xD6E8FEB86659FD93ULL;
}

/* Adds the chunk to the table; the chunk that stood there and is equal, or SIZE_MAX. */
static inline size_t seen(const uint8_t *src, size_t chunk, size_t bytes, uint64_t h, uint32_t *table, unsigned shift) {
    uint32_t *entry = table + (h >> shift);
    size_t before = *entry;
    *entry = (uint32_t)chunk + 1;
    if (before == 0 || memcmp(src + (before - 1) * bytes, src + chunk * bytes, bytes) != 0) return SIZE_MAX;
    return before - 1;
}

static unsigned shift_of(size_t size) {
    unsigned shift = 64;
    while (size > 1) {
        size >>= 1;
        --shift;
    }
    return shift;
}

static int worth_looking(const uint8_t *src, size_t chunks, int stride, uint32_t *table, size_t size) {
    size_t bytes = (size_t)KVMNN_CHUNK * (size_t)stride, looked = 0, found = 0;
    size_t small = size / SAMPLED < 256 ? 256 : size / SAMPLED;
    unsigned shift = shift_of(small);
    memset(table, 0, small * sizeof *table);
    for (size_t i = 0; i < chunks; ++i) {
        uint64_t h = hash(src + i * bytes, stride);
        if (h & (SAMPLED - 1)) continue; /* the content decides, so that equal chunks are both in the sample */
        ++looked;
        found += seen(src, i, bytes, h, table, shift) != SIZE_MAX;
    }
    return found * WORTH > looked;
}

size_t kvmnn_repeats_find(const uint8_t *src, size_t words, int stride, uint32_t *table, kvmnn_repeat *out) {
    size_t chunks = words / KVMNN_CHUNK, bytes = (size_t)KVMNN_CHUNK * (size_t)stride;
    size_t size = kvmnn_repeats_table(words), count = 0;
    unsigned shift = shift_of(size);
    if (!worth_looking(src, chunks, stride, table, size)) return 0;
    memset(table, 0, size * sizeof *table);
    size_t back = 0; /* chunks from the last one to what it repeats, 0 where it repeats nothing */
    for (size_t i = 0; i < chunks; ++i) {
        const uint8_t *chunk = src + i * bytes;
        size_t before = seen(src, i, bytes, hash(chunk, stride), table, shift);
        if (back && memcmp(chunk, chunk - back * bytes, bytes) == 0) { /* a row goes on where its first part stood */
            out[count - 1].length += KVMNN_CHUNK;
            continue;
        }
        back = before == SIZE_MAX ? 0 : i - before;
        if (back)
            out[count++] = (kvmnn_repeat){(uint32_t)(i * KVMNN_CHUNK), KVMNN_CHUNK, (uint32_t)(back * KVMNN_CHUNK)};
    }
    return count;
}

static inline uint64_t load8(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

size_t kvmnn_byte_repeats_find(const uint8_t *lane, size_t n, const kvmnn_repeat *known, size_t count, uint32_t *table,
                               kvmnn_repeat *out) {
    enum { LOOK = 8, LEAST = 10, PATIENCE = 6 }; /* 64 looks in vain make the steps longer */
    const unsigned shift = 64 - 13;
    size_t at = 0, found = 0, next = 0, vain = 0;
    memset(table, 0, KVMNN_BYTE_TABLE * sizeof *table);
    while (at + LOOK <= n || next < count) {
        size_t stop = next < count ? known[next].at : n;
        if (at + LOOK > stop) { /* nothing fits before what is known */
            if (next == count) break;
            out[found++] = known[next];
            at = known[next].at + known[next].length;
            ++next;
            continue;
        }
        uint64_t bytes = load8(lane + at);
        uint32_t *entry = table + ((bytes * 0x9E3779B97F4A7C15ULL) >> shift);
        size_t before = *entry;
        *entry = (uint32_t)at + 1;
        if (before == 0 || load8(lane + before - 1) != bytes) {
            at += 1 + (vain++ >> PATIENCE);
            continue;
        }
        size_t from = before - 1, length = LOOK;
        while (at + length < stop && lane[from + length] == lane[at + length]) ++length;
        if (length < LEAST) {
            ++at;
            continue;
        }
        out[found++] = (kvmnn_repeat){(uint32_t)at, (uint32_t)length, (uint32_t)(at - from)};
        at += length;
        vain = 0;
    }
    return found;
}
