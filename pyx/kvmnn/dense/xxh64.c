/* XXH64 of the xxHash specification, on little-endian machines. */
#include "dense.h"

static const uint64_t P1 = 0x9E3779B185EBCA87u, P2 = 0xC2B2AE3D27D4EB4Fu, P3 = 0x165667B19E3779F9u,
                      P4 = 0x85EBCA77C2B2AE63u, P5 = 0x27D4EB2F165667C5u;

static inline uint64_t turned(uint64_t x, int by) { return x << by | x >> (64 - by); }

static inline uint64_t load64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

static inline uint64_t round64(uint64_t acc, uint64_t lane) { return turned(acc + lane * P2, 31) * P1; }

static inline uint64_t merged(uint64_t h, uint64_t acc) { return (h ^ round64(0, acc)) * P1 + P4; }

uint64_t kvmnn_xxh64(const uint8_t *p, size_t n, uint64_t seed) {
    const uint8_t *end = p + n;
    uint64_t h;
    if (n >= 32) {
        uint64_t a = seed + P1 + P2, b = seed + P2, c = seed, d = seed - P1;
        for (; end - p >= 32; p += 32) {
            a = round64(a, load64(p));
            b = round64(b, load64(p + 8));
            c = round64(c, load64(p + 16));
            d = round64(d, load64(p + 24));
        }
        h = turned(a, 1) + turned(b, 7) + turned(c, 12) + turned(d, 18);
        h = merged(merged(merged(merged(h, a), b), c), d);
    } else {
        h = seed + P5;
    }
    h += n;
    for (; end - p >= 8; p += 8) h = turned(h ^ round64(0, load64(p)), 27) * P1 + P4;
    if (end - p >= 4) {
        h = turned(h ^ dense_load32(p) * P1, 23) * P2 + P3;
        p += 4;
    }
    for (; p < end; ++p) h = turned(h ^ *p * P5, 11) * P1;
    h = (h ^ h >> 33) * P2;
    h = (h ^ h >> 29) * P3;
    return h ^ h >> 32;
}
