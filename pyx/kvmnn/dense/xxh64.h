/* XXH64 of the xxHash specification, piece by piece, on little-endian machines. */
#ifndef KVMNN_DENSE_XXH64_H
#define KVMNN_DENSE_XXH64_H

#include "dense.h"

#define XXH_P1 0x9E3779B185EBCA87u
#define XXH_P2 0xC2B2AE3D27D4EB4Fu
#define XXH_P3 0x165667B19E3779F9u
#define XXH_P4 0x85EBCA77C2B2AE63u
#define XXH_P5 0x27D4EB2F165667C5u

enum { STRIPE = 32 };

/* Whole stripes up to `cursor` are hashed. */
typedef struct {
    uint64_t lanes[4], seed;
    const uint8_t *begin, *cursor;
} dense_hash;

void dense_hash_begin(dense_hash *h, const uint8_t *p, uint64_t seed);
/* Of all n bytes from `begin` on. */
uint64_t dense_hash_end(dense_hash *state, size_t n);

static inline uint64_t dense_load64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

static inline uint64_t dense_hash_round(uint64_t lane, uint64_t x) {
    lane += x * XXH_P2;
    return (lane << 31 | lane >> 33) * XXH_P1;
}

static inline void dense_hash_stripe(dense_hash *h) {
    for (int i = 0; i < 4; ++i) h->lanes[i] = dense_hash_round(h->lanes[i], dense_load64(h->cursor + 8 * i));
    h->cursor += STRIPE;
}

/* Whole stripes up to `end`. */
static inline void dense_hash_to(dense_hash *h, const uint8_t *end) {
    dense_hash local_state = *h;
    while (end - local_state.cursor >= STRIPE) dense_hash_stripe(&local_state);
    *h = local_state;
}

#endif
