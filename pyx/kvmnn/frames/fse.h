/* Finite state entropy as zstd has it (RFC 8878, section 4.1): tables of up to 64 states, for the encoder. */
#ifndef KVMNN_FSE_H
#define KVMNN_FSE_H

#include "bitwriter.h"

enum { KVMNN_MAX_FSE_SYMBOLS = 53, KVMNN_MAX_FSE_STATES = 64 };

typedef struct {
    int table_log;
    uint16_t next_state[KVMNN_MAX_FSE_STATES];
    int32_t delta_find_state[KVMNN_MAX_FSE_SYMBOLS];
    uint32_t delta_num_bits[KVMNN_MAX_FSE_SYMBOLS];
} kvmnn_fse_table;

/* A table that fits `n` symbols as they are counted, of which two at least differ, and its description in `dst`, which
   has room for 128 bytes. Returns how many it takes. */
size_t kvmnn_fse_build_fitted(kvmnn_fse_table *table, const uint32_t *counts, int symbols, size_t n, uint8_t *dst);

/* A table of a single symbol, which costs nothing. */
void kvmnn_fse_build_rle(kvmnn_fse_table *table, unsigned symbol);

/* A table from probabilities that add up to 1 << table_log; -1 stands for "less than one". table_log is
   5 or 6. */
void kvmnn_fse_build(kvmnn_fse_table *table, const int8_t *probabilities, int symbols, int table_log);

/* The state that codes `symbol` last, at the lowest cost. */
static inline uint32_t kvmnn_fse_init_state(const kvmnn_fse_table *table, unsigned symbol) {
    uint32_t bits = (table->delta_num_bits[symbol] + (1u << 15)) >> 16;
    uint32_t value = (bits << 16) - table->delta_num_bits[symbol];
    return table->next_state[(int32_t)(value >> bits) + table->delta_find_state[symbol]];
}

static inline uint32_t kvmnn_fse_encode_symbol(const kvmnn_fse_table *table, uint32_t state, unsigned symbol,
                                               kvmnn_bitwriter *out) {
    uint32_t bits = (state + table->delta_num_bits[symbol]) >> 16;
    kvmnn_bitwriter_put(out, state & ((1u << bits) - 1), bits);
    return table->next_state[(int32_t)(state >> bits) + table->delta_find_state[symbol]];
}

static inline void kvmnn_fse_flush_state(const kvmnn_fse_table *table, uint32_t state, kvmnn_bitwriter *out) {
    kvmnn_bitwriter_put(out, state & ((1u << table->table_log) - 1), (unsigned)table->table_log);
}

/* The bytes of a tree description: `n` weights of 0 to 11 as a table and what it codes. Returns their number, or 0 where
   they are all alike or there are fewer than two. `dst` has room for n + 32 bytes. */
size_t kvmnn_fse_encode_weights(const uint8_t *weights, size_t n, uint8_t *dst);

#endif
