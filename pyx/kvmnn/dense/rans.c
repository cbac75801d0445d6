/* Interleaved rANS: 4 states of 31 bits, units of 16 bits, frequencies of 11 bits, no branch in a step. */
#include "rans.h"

void dense_encoder_table(const dense_table *t, dense_code codes[256]) {
    uint32_t start = 0;
    for (int s = 0; s < 256; ++s) {
        uint32_t f = t->f[s];
        dense_code code = {0, 0, 0, 0};
        const uint64_t one = (uint64_t)1 << 52;
        if (f == 1) { /* x * 2048 + start, with the quotient taken as x - 1 */
            code = (dense_code){one - 1, ~0u, (uint16_t)(start + SCALE - 1), 1 << 4};
        } else if (f) {
            uint32_t shift = dense_width(f - 1);
            uint64_t reciprocal = (((uint64_t)1 << (shift + 31)) + f - 1) / f;
            code = (dense_code){(one + f - 1) / f, (uint32_t)reciprocal, (uint16_t)start,
                                (uint16_t)(f << 4 | (shift - 1))};
        }
        codes[s] = code;
        start += f;
    }
}

void dense_decoder_table(const dense_table *t, uint32_t entries[SCALE]) {
    for (uint32_t s = 0; s < 256; ++s) {
        uint32_t f = t->f[s];
        for (uint32_t i = 0; i < f; ++i) *entries++ = f << 21 | i << 8 | s;
    }
}
