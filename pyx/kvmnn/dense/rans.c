/* Interleaved rANS: 4 states of 31 bits, units of 16 bits, frequencies of 11 bits, no branch in a step. */
#include "rans.h"

void dense_encoder_table(const dense_table *t, dense_code codes[256]) {
    uint32_t start = 0;
    for (int s = 0; s < 256; ++s) {
        uint32_t f = t->f[s];
        dense_code code = {0, 0, 0};
        if (f == 1) { /* x * 2048 + start, with the quotient taken as x - 1 */
            code = (dense_code){~0u, (uint16_t)(start + SCALE - 1), 1 << 4};
        } else if (f) {
            uint32_t shift = dense_width(f - 1);
            uint64_t reciprocal = (((uint64_t)1 << (shift + 31)) + f - 1) / f;
            code = (dense_code){(uint32_t)reciprocal, (uint16_t)start, (uint16_t)(f << 4 | (shift - 1))};
        }
        codes[s] = code;
        start += f;
    }
}

void dense_decoder_table(const dense_table *t, uint32_t entries[SCALE]) {
    for (uint32_t s = 0; s < 256; ++s) {
        uint32_t f = t->f[s];
        for (uint32_t i = 0; i < f; ++i) *entries++ = s | f << 8 | i << 20;
    }
}

dense_error dense_decode_flat(const uint8_t *section, size_t units, const uint32_t entries[SCALE], uint8_t *symbols,
                              size_t n) {
    uint32_t v[STATES];
    const uint8_t *at = section + 4 * STATES, *end = at + 2 * units;
    if (!dense_load_states(section, v)) return DENSE_STATE;
    uint32_t a = v[0], b = v[1], c = v[2], d = v[3];
    size_t i = 0;
    while (i + 4 <= n) { /* as many as the units that are left will do for, then see how many there are */
        size_t turns = (size_t)(end - at) / 8;
        if (turns > (n - i) / 4) turns = (n - i) / 4;
        if (turns == 0) break;
        uint64_t taken = 0;
        for (; turns; --turns, i += 4) {
            DECODE(a, entries, symbols[i]);
            DECODE(b, entries, symbols[i + 1]);
            DECODE(c, entries, symbols[i + 2]);
            DECODE(d, entries, symbols[i + 3]);
        }
        at += 2 * taken;
    }
    v[0] = a, v[1] = b, v[2] = c, v[3] = d;
    for (; i < n; ++i)
        if (!dense_decode_checked(&v[i & 3], entries, &symbols[i], &at, end)) return DENSE_STATE;
    return at == end && dense_states_done(v) ? DENSE_OK : DENSE_STATE;
}
