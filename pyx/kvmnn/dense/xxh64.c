#include "xxh64.h"

static inline uint64_t rotate_left(uint64_t x, int count) { return x << count | x >> (64 - count); }

static inline uint64_t merge_lane(uint64_t h, uint64_t lane) {
    return (h ^ dense_hash_round(0, lane)) * XXH_P1 + XXH_P4;
}

void dense_hash_begin(dense_hash *h, const uint8_t *p, uint64_t seed) {
    *h = (dense_hash){{seed + XXH_P1 + XXH_P2, seed + XXH_P2, seed, seed - XXH_P1}, seed, p, p};
}

uint64_t dense_hash_end(dense_hash *state, size_t n) {
    const uint8_t *end = state->begin + n;
    uint64_t h = state->seed + XXH_P5;
    if (n >= STRIPE) {
        const uint64_t *lanes = state->lanes;
        dense_hash_to(state, end);
        h = rotate_left(lanes[0], 1) + rotate_left(lanes[1], 7) + rotate_left(lanes[2], 12) + rotate_left(lanes[3], 18);
        for (int i = 0; i < 4; ++i) h = merge_lane(h, lanes[i]);
    }
    const uint8_t *p = state->cursor;
    h += n;
    for (; end - p >= 8; p += 8) h = rotate_left(h ^ dense_hash_round(0, dense_load64(p)), 27) * XXH_P1 + XXH_P4;
    if (end - p >= 4) {
        h = rotate_left(h ^ dense_load32(p) * XXH_P1, 23) * XXH_P2 + XXH_P3;
        p += 4;
    }
    for (; p < end; ++p) h = rotate_left(h ^ *p * XXH_P5, 11) * XXH_P1;
    h = (h ^ h >> 33) * XXH_P2;
    h = (h ^ h >> 29) * XXH_P3;
    return h ^ h >> 32;
}

uint64_t kvmnn_xxh64(const uint8_t *p, size_t n, uint64_t seed) {
    dense_hash h;
    dense_hash_begin(&h, p, seed);
    return dense_hash_end(&h, n);
}
