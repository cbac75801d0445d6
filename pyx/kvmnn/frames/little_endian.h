/* Eight bytes as a word whose lowest byte is the first, on every machine. */
#ifndef KVMNN_LITTLE_ENDIAN_H
#define KVMNN_LITTLE_ENDIAN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t kvmnn_load_le64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    return x;
}

static inline void kvmnn_store_le64(uint8_t *p, uint64_t x) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    memcpy(p, &x, 8);
}

/* Index of the lowest bit that is set; x is not 0. */
static inline size_t kvmnn_lowest_bit(uint64_t x) {
#if defined(__GNUC__)
    return (size_t)__builtin_ctzll(x);
#else
    size_t i = 0;
    while (!(x >> i & 1)) ++i;
    return i;
#endif
}

#endif
