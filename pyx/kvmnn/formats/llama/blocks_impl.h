/* The loops of blocks.h, included once per SIMD level: LEVEL(name) gives each function its own name. All trip counts
 * are constants, and codes are taken apart before they are multiplied, so that compilers make vectors of them. */

/* 16 small numbers as floats: times a scale, less a shift before it, plus a minimum after it. Sixteen bytes are a vector on every processor: what is
 * stored in one piece is read again in one piece. */
static inline void LEVEL(scaled)(const int8_t *restrict codes, float scale, float *restrict to) {
    for (int i = 0; i < 16; ++i) to[i] = (float)codes[i] * scale;
}

static inline void LEVEL(shifted)(const uint8_t *restrict codes, float shift, float scale, float *restrict to) {
    for (int i = 0; i < 16; ++i) to[i] = ((float)codes[i] - shift) * scale;
}

static inline void LEVEL(moved)(const uint8_t *restrict codes, float scale, float least, float *restrict to) {
    for (int i = 0; i < 16; ++i) to[i] = (float)codes[i] * scale + least;
}

/* The low halves of 16 bytes and the high ones. */
static inline void LEVEL(halves)(const uint8_t *restrict bytes, uint8_t *restrict low, uint8_t *restrict high) {
    for (int i = 0; i < 16; ++i) low[i] = bytes[i] & 15;
    for (int i = 0; i < 16; ++i) high[i] = bytes[i] >> 4;
}

/* A fifth bit for 16 codes, the first from the lowest bit of two bytes. */
static inline void LEVEL(fifth)(const uint8_t *restrict bits, uint8_t *restrict codes) {
    const uint64_t first = bits[0] * UINT64_C(0x0101010101010101), second = bits[1] * UINT64_C(0x0101010101010101);
    uint8_t spread[16];
    memcpy(spread, &first, 8);
    memcpy(spread + 8, &second, 8);
    for (int i = 0; i < 16; ++i) codes[i] |= (uint8_t)((spread[i] & kvmnn_bit[i]) == kvmnn_bit[i] ? 16 : 0);
}

static void LEVEL(q4_0)(const uint8_t *restrict from, size_t count, float *restrict to) {
    for (; count > 0; --count, from += 18, to += 32) {
        const float scale = kvmnn_half(from);
        uint8_t low[16], high[16];
        LEVEL(halves)(from + 2, low, high);
        LEVEL(shifted)(low, 8, scale, to);
        LEVEL(shifted)(high, 8, scale, to + 16);
    }
}

static void LEVEL(q4_1)(const uint8_t *restrict from, size_t count, float *restrict to) {
    for (; count > 0; --count, from += 20, to += 32) {
        const float scale = kvmnn_half(from), least = kvmnn_half(from + 2);
        uint8_t low[16], high[16];
        LEVEL(halves)(from + 4, low, high);
        LEVEL(moved)(low, scale, least, to);
        LEVEL(moved)(high, scale, least, to + 16);
    }
}

static void LEVEL(q5_0)(const uint8_t *restrict from, size_t count, float *restrict to) {
    for (; count > 0; --count, from += 22, to += 32) {
        const float scale = kvmnn_half(from);
        uint8_t low[16], high[16];
        LEVEL(halves)(from + 6, low, high);
        LEVEL(fifth)(from + 2, low);
        LEVEL(shifted)(low, 16, scale, to);
        LEVEL(fifth)(from + 4, high);
        LEVEL(shifted)(high, 16, scale, to + 16);
    }
}

static void LEVEL(q5_1)(const uint8_t *restrict from, size_t count, float *restrict to) {
    for (; count > 0; --count, from += 24, to += 32) {
        const float scale = kvmnn_half(from), least = kvmnn_half(from + 2);
        uint8_t low[16], high[16];
        LEVEL(halves)(from + 8, low, high);
        LEVEL(fifth)(from + 4, low);
        LEVEL(moved)(low, scale, least, to);
        LEVEL(fifth)(from + 6, high);
        LEVEL(moved)(high, scale, least, to + 16);
    }
}

static void LEVEL(q8_0)(const uint8_t *restrict from, size_t count, float *restrict to) {
    for (; count > 0; --count, from += 34, to += 32) {
        const float scale = kvmnn_half(from);
        LEVEL(scaled)((const int8_t *)from + 2, scale, to);
        LEVEL(scaled)((const int8_t *)from + 18, scale, to + 16);
    }
}

static void LEVEL(iq4_nl)(const uint8_t *restrict from, size_t count, float *restrict to) {
    for (; count > 0; --count, from += 18, to += 32) {
        const float scale = kvmnn_half(from);
        float values[16];
        for (int i = 0; i < 16; ++i) values[i] = kvmnn_iq4[i] * scale;
        for (int i = 0; i < 16; ++i) to[i] = values[from[2 + i] & 15];
        for (int i = 0; i < 16; ++i) to[16 + i] = values[from[2 + i] >> 4];
    }
}

static const kvmnn_blocks_table LEVEL(table) = {
    KVMNN_LEVEL_NAME,
    {LEVEL(q4_0), LEVEL(q4_1), LEVEL(q5_0), LEVEL(q5_1), LEVEL(q8_0), LEVEL(iq4_nl)},
};
