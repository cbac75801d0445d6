/* Rows of sixteen tokens to columns and back, by AVX-512, in units of 32 bits. */

/* The transpose of 16 x 16 numbers of 32 bits. */
static inline void transpose512(__m512i x[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 4) { /* 4 x 4 blocks */
        const __m512i a = _mm512_unpacklo_epi32(x[i], x[i + 1]), b = _mm512_unpackhi_epi32(x[i], x[i + 1]);
        const __m512i c = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]), d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
        y[i] = _mm512_unpacklo_epi64(a, c), y[i + 1] = _mm512_unpackhi_epi64(a, c);
        y[i + 2] = _mm512_unpacklo_epi64(b, d), y[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; ++i) { /* of each block of 4 columns, and those 4 columns further on */
        const __m512i a = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x88), b = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xdd), d = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
        x[i] = _mm512_shuffle_i32x4(a, b, 0x88), x[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
        x[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88), x[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
}

/* out[i][t] = from[t][i], where each is of 32 bits, for as many i as there are sixteens of; rows may be NULL, all 0. */
static inline size_t ISA_FN(gather512)(const int16_t *const from[GROUP], size_t count, int16_t *out) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512i x[16];
        for (int t = 0; t < GROUP; ++t)
            x[t] = from[t] ? _mm512_loadu_si512(from[t] + 2 * i) : _mm512_setzero_si512();
        transpose512(x);
        for (int j = 0; j < 16; ++j) _mm512_storeu_si512(out + 2 * GROUP * (i + (size_t)j), x[j]);
    }
    return i;
}

/* columns[i][t] = rows[t][i] of `count` units of 32 bits, and back. */
static inline void load_columns512(const void *rows, size_t count, uint32_t *columns) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512i x[16];
        for (size_t t = 0; t < GROUP; ++t) x[t] = _mm512_loadu_si512((const char *)rows + 4 * (t * count + i));
        transpose512(x);
        for (size_t j = 0; j < 16; ++j) _mm512_storeu_si512(columns + GROUP * (i + j), x[j]);
    }
    for (; i < count; ++i)
        for (size_t t = 0; t < GROUP; ++t) memcpy(columns + GROUP * i + t, (const char *)rows + 4 * (t * count + i), 4);
}

static inline void store_columns512(const uint32_t *columns, size_t count, void *rows) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512i x[16];
        for (size_t j = 0; j < 16; ++j) x[j] = _mm512_loadu_si512(columns + GROUP * (i + j));
        transpose512(x);
        for (size_t t = 0; t < GROUP; ++t) _mm512_storeu_si512((char *)rows + 4 * (t * count + i), x[t]);
    }
    for (; i < count; ++i)
        for (size_t t = 0; t < GROUP; ++t) memcpy((char *)rows + 4 * (t * count + i), columns + GROUP * i + t, 4);
}
