#include "lanes.h"

#include <string.h>

static uint64_t kvmnn_load_le64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    return x;
}

static void kvmnn_store_le64(uint8_t *p, uint64_t x) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    memcpy(p, &x, 8);
}

/* Index of the lowest byte of a little-endian word that is not 0; x is not 0. */
static size_t kvmnn_first_byte(uint64_t x) {
#if defined(__GNUC__)
    return (size_t)__builtin_ctzll(x) / 8;
#else
    size_t i = 0;
    while ((x & 0xff) == 0) {
        x >>= 8;
        ++i;
    }
    return i;
#endif
}

/* Asks for the cache line of an address, which need not be anyone's. */
static void kvmnn_prefetch_to_write(const uint8_t *p) {
#if defined(__GNUC__)
    __builtin_prefetch(p, 1);
#else
    (void)p;
#endif
}

#define KVMNN_LOOPS "frames/lanes_impl.h"
#define KVMNN_TABLE kvmnn_lanes
#include "../simd.h"

const kvmnn_lanes *kvmnn_lanes_at(int level) { return level_tables[level]; }
