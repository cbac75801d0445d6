/* By AVX-512: rows of sixteen tokens to columns and back, in units of 32 bits; angles of sixteen tokens. */

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
        const __m512i a = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x88), c = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xdd);
        const __m512i b = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
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

/* (s x z) >> 30 of numbers that fit in 32 bits. */
static inline __m512i scale512(__m512i s, __m512i z) { return _mm512_srai_epi64(_mm512_mul_epi32(s, z), 30); }

/* `linear_compute_rotation` of eight angles. */
static inline void compute_rotations512(__m512i angles, __m512i *cosines, __m512i *sines) {
    static const int64_t S[5] = {1686629713, -693598668, 85569306, -5026995, 172272};
    static const int64_t C[6] = {1073741824, -1324675879, 272375560, -22401992, 987048, -27060};
    const __m512i turned = _mm512_add_epi64(_mm512_srli_epi64(angles, 34), _mm512_set1_epi64(1 << 27));
    const __m512i inside = _mm512_and_si512(turned, _mm512_set1_epi64((1 << 28) - 1));
    const __m512i x = _mm512_slli_epi64(_mm512_sub_epi64(inside, _mm512_set1_epi64(1 << 27)), 2), z = scale512(x, x);
    __m512i s = _mm512_set1_epi64(S[4]), c = _mm512_set1_epi64(C[5]);
    for (int i = 3; i >= 0; --i) s = _mm512_add_epi64(_mm512_set1_epi64(S[i]), scale512(s, z));
    for (int i = 4; i >= 0; --i) c = _mm512_add_epi64(_mm512_set1_epi64(C[i]), scale512(c, z));
    s = scale512(s, x);
    /* quadrants: (c, s), (-s, c), (-c, -s), (s, -c) */
    const __mmask8 is_odd = _mm512_test_epi64_mask(turned, _mm512_set1_epi64(1 << 28));
    const __mmask8 is_back = _mm512_test_epi64_mask(turned, _mm512_set1_epi64(1 << 29)), is_left = is_odd ^ is_back;
    const __m512i zero = _mm512_setzero_si512();
    const __m512i cosine = _mm512_mask_mov_epi64(c, is_odd, s), sine = _mm512_mask_mov_epi64(s, is_odd, c);
    *cosines = _mm512_mask_sub_epi64(cosine, is_left, zero, cosine);
    *sines = _mm512_mask_sub_epi64(sine, is_back, zero, sine);
}

/* Cosines and sines of all tokens of a group at their positions, and the numbers of their angles. */
static inline void compute_group_rotations512(const int64_t positions[GROUP], uint64_t frequency, int32_t *cosines,
                                              int32_t *sines, uint8_t *numbers) {
    for (int t = 0; t < GROUP; t += 8) {
        const __m512i angles =
            _mm512_mullo_epi64(_mm512_loadu_si512(positions + t), _mm512_set1_epi64((int64_t)frequency));
        const __m512i number = _mm512_srli_epi64(_mm512_add_epi64(angles, _mm512_set1_epi64((int64_t)1 << 56)), 57);
        __m512i c, s;
        compute_rotations512(angles, &c, &s);
        _mm256_storeu_si256((void *)(cosines + t), _mm512_cvtepi64_epi32(c));
        _mm256_storeu_si256((void *)(sines + t), _mm512_cvtepi64_epi32(s));
        if (numbers)
            _mm_storel_epi64((void *)(numbers + t),
                             _mm512_cvtepi64_epi8(_mm512_and_si512(number, _mm512_set1_epi64(ANGLES - 1))));
    }
}
