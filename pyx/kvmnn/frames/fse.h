/* Finite state entropy as zstd has it (RFC 8878, section 4.1): tables of up to 64 states, for the encoder. */
#ifndef KVMNN_FSE_H
#define KVMNN_FSE_H

#include "bits.h"

enum { KVMNN_FSE_SYMBOLS = 53, KVMNN_FSE_STATES = 64 };

typedef struct {
    int log;
    uint16_t next[KVMNN_FSE_STATES];
    int32_t find[KVMNN_FSE_SYMBOLS];
    uint32_t bits[KVMNN_FSE_SYMBOLS];
} kvmnn_fse;

/* A table that fits `n` symbols as they are counted, of which two at least differ, and its description in `dst`, which
   has room for 128 bytes. Returns how many it takes. */
size_t kvmnn_fse_fit(kvmnn_fse *table, const uint32_t *counts, int symbols, size_t n, uint8_t *dst);

/* A table of a single symbol, which costs nothing. */
void kvmnn_fse_single(kvmnn_fse *table, unsigned symbol);

/* A table from probabilities that add up to 1 << log; -1 stands for "less than one". log is 5 or 6. */
void kvmnn_fse_build(kvmnn_fse *table, const int8_t *probabilities, int symbols, int log);

/* The state that codes `symbol` last, at the lowest cost. */
static inline uint32_t kvmnn_fse_begin(const kvmnn_fse *t, unsigned symbol) {
    uint32_t bits = (t->bits[symbol] + (1u << 15)) >> 16;
    uint32_t value = (bits << 16) - t->bits[symbol];
    return t->next[(int32_t)(value >> bits) + t->find[symbol]];
}

static inline uint32_t kvmnn_fse_put(const kvmnn_fse *t, uint32_t state, unsigned symbol, kvmnn_bits *out) {
    uint32_t bits = (state + t->bits[symbol]) >> 16;
    kvmnn_bits_add(out, state & ((1u << bits) - 1), bits);
    return t->next[(int32_t)(state >> bits) + t->find[symbol]];
}

static inline void kvmnn_fse_end(const kvmnn_fse *t, uint32_t state, kvmnn_bits *out) {
    kvmnn_bits_add(out, state & ((1u << t->log) - 1), (unsigned)t->log);
}

/* The bytes of a tree description: `n` weights of 0 to 11 as a table and what it codes. Returns their number, or 0 where
   they are all alike or there are fewer than two. `dst` has room for n + 32 bytes. */
size_t kvmnn_fse_weights(const uint8_t *weights, size_t n, uint8_t *dst);

#endif
