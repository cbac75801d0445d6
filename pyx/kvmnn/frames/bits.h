/* Bits written from the lowest one up, as zstd reads them from the end back. */
#ifndef KVMNN_BITS_H
#define KVMNN_BITS_H

#include "little_endian.h"

typedef struct {
    uint64_t held;
    unsigned count; /* bits in `held`, below 8 after a flush */
    uint8_t *at;
} kvmnn_bits;

static inline void kvmnn_bits_add(kvmnn_bits *b, uint64_t value, unsigned count) {
    b->held |= value << b->count;
    b->count += count;
}

/* Writes eight bytes of which only the full ones count; there must be room for them. */
static inline void kvmnn_bits_flush(kvmnn_bits *b) {
    kvmnn_store_le64(b->at, b->held);
    b->at += b->count >> 3;
    b->held >>= b->count & ~7u;
    b->count &= 7;
}

/* The end mark; what is behind the last byte. */
static inline uint8_t *kvmnn_bits_end(kvmnn_bits *b) {
    kvmnn_bits_add(b, 1, 1);
    kvmnn_bits_flush(b);
    if (b->count) *b->at++ = (uint8_t)b->held;
    return b->at;
}

static inline int kvmnn_high_bit(uint32_t x) { /* x is not 0 */
#if defined(__GNUC__)
    return 31 - __builtin_clz(x);
#else
    int n = 0;
    while (x >>= 1) ++n;
    return n;
#endif
}

#endif
