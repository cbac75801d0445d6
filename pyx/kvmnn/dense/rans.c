/* Interleaved rANS: 4 states of 31 bits, units of 16 bits, frequencies of 11 bits, no branch in a step. */
#include "rans.h"

/* The code of a frequency that begins at 0. */
static dense_code make_code(uint32_t f) {
    const uint64_t scale_52 = (uint64_t)1 << 52;
    if (f == 1)
        return (dense_code){scale_52 - 1, ~0u, SCALE - 1, 1 << 4}; /* x * 2048, with the quotient taken as x - 1 */
    uint32_t shift = dense_bit_width(f - 1);
    uint64_t reciprocal = (((uint64_t)1 << (shift + 31)) + f - 1) / f;
    return (dense_code){(scale_52 + f - 1) / f, (uint32_t)reciprocal, 0, (uint16_t)(f << 4 | (shift - 1))};
}

void dense_build_encoder_table(const dense_table *t, dense_code_cache *cache, dense_code codes[256]) {
    uint32_t start = 0;
    memset(codes, 0, 256 * sizeof *codes);
    for (int s = 0; s < 256; ++s) {
        uint32_t f = t->frequencies[s];
        if (f == 0) continue;
        unsigned k = dense_high_bit(f), slot = k * 4 + (f << 2 >> k & 3);
        if (cache->frequencies[slot] != f) cache->frequencies[slot] = (uint16_t)f, cache->codes[slot] = make_code(f);
        codes[s] = cache->codes[slot];
        codes[s].start = (uint16_t)(codes[s].start + start);
        start += f;
    }
}

void dense_mark_escapes(dense_code codes[256]) {
    codes[ESCAPE_SYMBOL].start |= ESCAPE_MARK;
    for (int s = 0; s < 256; ++s)
        if (codes[s].f_shift == 0) codes[s] = codes[ESCAPE_SYMBOL];
}

void dense_build_decoder_table(const dense_table *t, uint32_t entries[SCALE]) {
    enum { FILL_STEP = 16 };
    const uint32_t *end = entries + SCALE;
    uint8_t symbols_in_use[256];
    int count = 0;
    for (int s = 0; s < 256; ++s) {
        symbols_in_use[count] = (uint8_t)s;
        count += t->frequencies[s] != 0;
    }
    for (int j = 0; j < count; ++j) {
        uint32_t f = t->frequencies[symbols_in_use[j]], entry = f << 21 | symbols_in_use[j];
        if (f + FILL_STEP <= (size_t)(end - entries)) { /* what is too many is written again */
            uint32_t i = 0;
            do {
                for (uint32_t k = 0; k < FILL_STEP; ++k) entries[i + k] = entry + ((i + k) << 8);
                i += FILL_STEP;
            } while (i < f);
        } else {
            for (uint32_t i = 0; i < f; ++i) entries[i] = entry + (i << 8);
        }
        entries += f;
    }
}
