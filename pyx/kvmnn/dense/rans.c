/* Interleaved rANS: 4 states of 31 bits, units of 16 bits, frequencies of 11 bits, no branch in a step. */
#include "rans.h"

/* The code of a frequency that begins at 0. */
static dense_code code_of(uint32_t f) {
    const uint64_t one = (uint64_t)1 << 52;
    if (f == 1) return (dense_code){one - 1, ~0u, SCALE - 1, 1 << 4}; /* x * 2048, with the quotient taken as x - 1 */
    uint32_t shift = dense_width(f - 1);
    uint64_t reciprocal = (((uint64_t)1 << (shift + 31)) + f - 1) / f;
    return (dense_code){(one + f - 1) / f, (uint32_t)reciprocal, 0, (uint16_t)(f << 4 | (shift - 1))};
}

void dense_encoder_table(const dense_table *t, dense_known_codes *known, dense_code codes[256]) {
    uint32_t start = 0;
    memset(codes, 0, 256 * sizeof *codes);
    for (int s = 0; s < 256; ++s) {
        uint32_t f = t->f[s];
        if (f == 0) continue;
        unsigned k = dense_high_bit(f), place = k * 4 + (f << 2 >> k & 3);
        if (known->f[place] != f) known->f[place] = (uint16_t)f, known->codes[place] = code_of(f);
        codes[s] = known->codes[place];
        codes[s].start = (uint16_t)(codes[s].start + start);
        start += f;
    }
}

void dense_mark_escapes(dense_code codes[256]) {
    codes[ESCAPE].start |= ESCAPE_MARK;
    for (int s = 0; s < 256; ++s)
        if (codes[s].f_shift == 0) codes[s] = codes[ESCAPE];
}

void dense_decoder_table(const dense_table *t, uint32_t entries[SCALE]) {
    enum { AT_ONCE = 16 };
    const uint32_t *end = entries + SCALE;
    uint8_t listed[256];
    int count = 0;
    for (int s = 0; s < 256; ++s) {
        listed[count] = (uint8_t)s;
        count += t->f[s] != 0;
    }
    for (int j = 0; j < count; ++j) {
        uint32_t f = t->f[listed[j]], entry = f << 21 | listed[j];
        if (f + AT_ONCE <= (size_t)(end - entries)) { /* what is too many is written again */
            uint32_t i = 0;
            do {
                for (uint32_t k = 0; k < AT_ONCE; ++k) entries[i + k] = entry + ((i + k) << 8);
                i += AT_ONCE;
            } while (i < f);
        } else {
            for (uint32_t i = 0; i < f; ++i) entries[i] = entry + (i << 8);
        }
        entries += f;
    }
}
