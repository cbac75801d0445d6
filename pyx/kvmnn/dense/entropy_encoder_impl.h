/* More of the kernels of residuals.h: the entropy coder's, and those that part rows by whether words are equal. Four words at
 * a time where there is AVX2; the baseline's kernels say what they do. */

#ifdef ISA_F16C

/* Bytes that a mask picks of four, one after the other. */
static const uint32_t ISA_FN(SELECT_SHUFFLE)[16] = {
    0x00000000, 0x00000000, 0x00000001, 0x00000100, 0x00000002, 0x00000200, 0x00000201, 0x00020100,
    0x00000003, 0x00000300, 0x00000301, 0x00030100, 0x00000302, 0x00030200, 0x00030201, 0x03020100,
};
/* The next of bytes 0 to 3 where the mask has a bit, else the next of 4 to 7. */
static const uint32_t ISA_FN(MERGE_SHUFFLE)[16] = {
    0x07060504, 0x06050400, 0x06050004, 0x05040100, 0x06000504, 0x05010400, 0x05010004, 0x04020100,
    0x00060504, 0x01050400, 0x01050004, 0x02040100, 0x01000504, 0x02010400, 0x02010004, 0x03020100,
};
/* Lower halves of the states that a mask picks of four, at the end of 8 bytes. */
#ifdef ISA_AVX512
static const uint64_t ISA_FN(UNIT_SHUFFLE)[16] = {
    0x1f1f1f1f1f1f1f1f, 0x01001f1f1f1f1f1f, 0x09081f1f1f1f1f1f, 0x090801001f1f1f1f,
    0x11101f1f1f1f1f1f, 0x111001001f1f1f1f, 0x111009081f1f1f1f, 0x1110090801001f1f,
    0x19181f1f1f1f1f1f, 0x191801001f1f1f1f, 0x191809081f1f1f1f, 0x1918090801001f1f,
    0x191811101f1f1f1f, 0x1918111001001f1f, 0x1918111009081f1f, 0x1918111009080100,
};
#else
static const uint64_t ISA_FN(UNIT_SHUFFLE)[16] = {
    0x8080808080808080, 0x0100808080808080, 0x0504808080808080, 0x0504010080808080,
    0x0908808080808080, 0x0908010080808080, 0x0908050480808080, 0x0908050401008080,
    0x0d0c808080808080, 0x0d0c010080808080, 0x0d0c050480808080, 0x0d0c050401008080,
    0x0d0c090880808080, 0x0d0c090801008080, 0x0d0c090805048080, 0x0d0c090805040100,
};
#endif

static inline __m128i ISA_FN(load_four)(const uint8_t *p) { return _mm_cvtsi32_si128((int)dense_load32(p)); }

static inline unsigned ISA_FN(equal_mask_of_four)(const uint8_t *a, const uint8_t *b) {
    return (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(ISA_FN(load_four)(a), ISA_FN(load_four)(b))) & 15;
}

static inline void ISA_FN(store_four)(uint8_t *out, __m128i bytes, uint32_t order) {
    uint32_t packed_bytes = (uint32_t)_mm_cvtsi128_si32(_mm_shuffle_epi8(bytes, _mm_cvtsi32_si128((int)order)));
    memcpy(out, &packed_bytes, 4);
}

#ifdef ISA_AVX512

/* One step of ENCODE for the states of four symbols, in words of 64 bits; `mark`: whether any is an escape. */
static inline uint16_t *ISA_FN(encode_four)(__m256i *states, uint8_t *mark, const dense_code *a, const dense_code *b,
                                            const dense_code *c, const dense_code *d, uint16_t *end) {
    __m256i ac = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)a)),
                                         _mm_loadu_si128((const __m128i *)(const void *)c), 1);
    __m256i bd = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)b)),
                                         _mm_loadu_si128((const __m128i *)(const void *)d), 1);
    __m256i reciprocal = _mm256_unpacklo_epi64(ac, bd), code_words = _mm256_unpackhi_epi64(ac, bd), v = *states;
    __m256i f = _mm256_srli_epi64(code_words, 52);
    __m256i start = _mm256_and_si256(_mm256_srli_epi64(code_words, 32), _mm256_set1_epi64x(START_MASK));
    *mark = _mm256_test_epi64_mask(code_words, _mm256_set1_epi64x((long long)ESCAPE_MARK << 32));
    __mmask8 full = _mm256_cmpge_epu64_mask(v, _mm256_slli_epi64(f, 20));
    uint32_t full_bits; /* said so that the mask stays one: to take it back from the number all states would wait */
    __asm__("kmovb %1, %0" : "=r"(full_bits) : "k"(full));
    __m128i order = _mm_loadl_epi64((const __m128i *)(const void *)&ISA_FN(UNIT_SHUFFLE)[full_bits]);
    __m256i units = _mm256_permutexvar_epi8(_mm256_castsi128_si256(order), v);
    _mm_storel_epi64((__m128i *)(void *)(end - 4), _mm256_castsi256_si128(units));
    /* both quotients before it is known which one counts: all states wait for this */
    __m256i shifted = _mm256_srli_epi64(v, 16), zero = _mm256_setzero_si256();
    __m256i quotient = _mm256_madd52hi_epu64(zero, v, reciprocal),
            shifted_quotient = _mm256_madd52hi_epu64(zero, shifted, reciprocal);
    __m256i sum = _mm256_mask_add_epi64(_mm256_add_epi64(v, start), full, shifted, start);
    __m256i complement = _mm256_sub_epi64(_mm256_set1_epi64x(SCALE), f);
    *states = _mm256_madd52lo_epu64(sum, _mm256_mask_mov_epi64(quotient, full, shifted_quotient), complement);
    return end - __builtin_popcount(full_bits);
}

#else

/* One step of ENCODE for the states of four symbols; `mark`: whether any is an escape. */
static inline uint16_t *ISA_FN(encode_four)(__m128i *states, uint8_t *mark, const dense_code *a, const dense_code *b,
                                            const dense_code *c, const dense_code *d, uint16_t *end) {
    __m128 ab = _mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(const void *)&a->reciprocal)),
                             (const __m64 *)(const void *)&b->reciprocal);
    __m128 cd = _mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(const void *)&c->reciprocal)),
                             (const __m64 *)(const void *)&d->reciprocal);
    __m128i reciprocal = _mm_castps_si128(_mm_shuffle_ps(ab, cd, 0x88));
    __m128i code_words = _mm_castps_si128(_mm_shuffle_ps(ab, cd, 0xdd)), v = *states;
    __m128i f = _mm_srli_epi32(code_words, 20), start = _mm_and_si128(code_words, _mm_set1_epi32(START_MASK));
    *mark = (uint8_t)_mm_movemask_ps(_mm_castsi128_ps(_mm_slli_epi32(code_words, 16)));
    __m128i shift = _mm_and_si128(_mm_srli_epi32(code_words, 16), _mm_set1_epi32(15)), thirty_two = _mm_set1_epi64x(32);
    __m128i complement = _mm_sub_epi32(_mm_set1_epi32(SCALE), f);
    __m128i keep_mask = _mm_cmpgt_epi32(_mm_slli_epi32(f, 20), v); /* both are below 2^31 */
    unsigned full = (unsigned)_mm_movemask_ps(_mm_castsi128_ps(keep_mask)) ^ 15;
    __m128i units = _mm_shuffle_epi8(v, _mm_loadl_epi64((const __m128i *)(const void *)&ISA_FN(UNIT_SHUFFLE)[full]));
    _mm_storel_epi64((__m128i *)(void *)(end - 4), units);
    v = _mm_srlv_epi32(v, _mm_andnot_si128(keep_mask, _mm_set1_epi32(16)));
    __m128i even = _mm_mul_epu32(v, reciprocal); /* states 0 and 2; 1 and 3 */
    __m128i odd = _mm_mul_epu32(_mm_srli_epi64(v, 32), _mm_srli_epi64(reciprocal, 32));
    __m128i even_shift = _mm_and_si128(shift, _mm_set1_epi64x(15));
    even = _mm_srlv_epi64(even, _mm_add_epi64(even_shift, thirty_two));
    odd = _mm_srlv_epi64(odd, _mm_add_epi64(_mm_srli_epi64(shift, 32), thirty_two));
    even = _mm_mul_epu32(even, complement);
    odd = _mm_mul_epu32(odd, _mm_srli_epi64(complement, 32));
    *states = _mm_add_epi32(_mm_add_epi32(v, start), _mm_or_si128(even, _mm_slli_epi64(odd, 32)));
    return end - __builtin_popcount(full);
}

#endif

#endif

#ifdef ISA_AVX512

/* The first n bytes of 64. */
static inline __mmask64 ISA_FN(first_bytes_mask)(size_t n) {
    return n < 64 ? _bzhi_u64(~(uint64_t)0, (unsigned)n) : ~(__mmask64)0;
}

static inline __m512i ISA_FN(masked_load)(__mmask64 active, const uint8_t *p) {
    return _mm512_maskz_loadu_epi8(active, p);
}

#endif

static size_t ISA_FN(select_equal)(const uint8_t *src, const uint8_t *a, const uint8_t *b, size_t n, int equal,
                                   uint8_t *out) {
    const uint8_t *begin = out;
    size_t i = 0;
#ifdef ISA_AVX512
    for (; i < n; i += 64) {
        __mmask64 active = ISA_FN(first_bytes_mask)(n - i);
        __mmask64 equal_mask =
            _mm512_mask_cmpeq_epi8_mask(active, ISA_FN(masked_load)(active, a + i), ISA_FN(masked_load)(active, b + i));
        if (!equal) equal_mask ^= active;
        _mm512_storeu_si512((void *)out, _mm512_maskz_compress_epi8(equal_mask, ISA_FN(masked_load)(active, src + i)));
        out += __builtin_popcountll(equal_mask);
    }
#elif defined(ISA_F16C)
    for (unsigned flip = equal ? 0 : 15; i + 4 <= n; i += 4) {
        unsigned mask = ISA_FN(equal_mask_of_four)(a + i, b + i) ^ flip;
        ISA_FN(store_four)(out, ISA_FN(load_four)(src + i), ISA_FN(SELECT_SHUFFLE)[mask]);
        out += __builtin_popcount(mask);
    }
#endif
    for (; i < n; ++i) {
        *out = src[i];
        out += (a[i] == b[i]) == equal;
    }
    return (size_t)(out - begin);
}

static void ISA_FN(merge)(const uint8_t *equal, const uint8_t *unequal, const uint8_t *a, const uint8_t *b, size_t n,
                          uint8_t *out) {
    size_t i = 0;
#ifdef ISA_AVX512
    for (; i < n; i += 64) {
        __mmask64 active = ISA_FN(first_bytes_mask)(n - i);
        __mmask64 equal_mask =
            _mm512_mask_cmpeq_epi8_mask(active, ISA_FN(masked_load)(active, a + i), ISA_FN(masked_load)(active, b + i));
        __m512i merged_bytes = _mm512_maskz_expand_epi8(equal_mask, _mm512_loadu_si512((const void *)equal));
        merged_bytes =
            _mm512_mask_expand_epi8(merged_bytes, active ^ equal_mask, _mm512_loadu_si512((const void *)unequal));
        _mm512_mask_storeu_epi8(out + i, active, merged_bytes);
        equal += __builtin_popcountll(equal_mask), unequal += __builtin_popcountll(active ^ equal_mask);
    }
#elif defined(ISA_F16C)
    for (; i + 4 <= n; i += 4) {
        unsigned mask = ISA_FN(equal_mask_of_four)(a + i, b + i), count = (unsigned)__builtin_popcount(mask);
        __m128i eight_bytes = _mm_unpacklo_epi32(ISA_FN(load_four)(equal), ISA_FN(load_four)(unequal));
        ISA_FN(store_four)(out + i, eight_bytes, ISA_FN(MERGE_SHUFFLE)[mask]);
        equal += count, unequal += 4 - count;
    }
#endif
    for (; i < n; ++i) {
        int equal_mask = a[i] == b[i];
        out[i] = equal_mask ? *equal : *unequal;
        equal += equal_mask, unequal += !equal_mask;
    }
}

static void ISA_FN(subtract)(const uint8_t *x, const uint8_t *y, uint8_t mask, size_t n, uint8_t *restrict out) {
    for (size_t i = 0; i < n; ++i) out[i] = (uint8_t)(x[i] - y[i]) & mask;
}

static void ISA_FN(add_equal)(const uint8_t *y, const uint8_t *a, const uint8_t *b, uint8_t mask, size_t n,
                              uint8_t *restrict out) {
    for (size_t i = 0; i < n; ++i) {
        uint8_t equal_mask = a[i] == b[i] ? 0xff : 0, sum = (uint8_t)(out[i] + y[i]) & mask;
        out[i] = (uint8_t)((sum & equal_mask) | (out[i] & ~equal_mask));
    }
}

/* x * log2(x), to 1e-5 of x; 0 for 0. Plain operations in a fixed order, so that all machines make the same tables. */
static inline float ISA_FN(x_log2_x)(float x) {
    uint32_t bits = dense_bits(x);
    float e = (float)(int32_t)(bits >> 23) - 127.0f, m = dense_float((bits & 0x7fffff) | 0x3f800000);
    float p =
        3.1157899f + m * (-3.3241990f + m * (2.5988452f + m * (-1.2315303f + m * (0.31821337f - m * 0.034436006f))));
    return x * (e + p * (m - 1.0f));
}

#ifdef ISA_AVX512

static inline __m512 ISA_FN(x_log2_x_16)(__m512 x) {
#define PLUS(a, b) _mm512_add_ps(a, b)
#define TIMES(a, b) _mm512_mul_ps(a, b)
#define NUMBER(a) _mm512_set1_ps(a)
    __m512i bits = _mm512_castps_si512(x);
    __m512 e = _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(bits, 23)), NUMBER(127.0f));
    bits = _mm512_or_si512(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffff)), _mm512_set1_epi32(0x3f800000));
    __m512 m = _mm512_castsi512_ps(bits), p = _mm512_sub_ps(NUMBER(0.31821337f), TIMES(m, NUMBER(0.034436006f)));
    p = PLUS(NUMBER(2.5988452f), TIMES(m, PLUS(NUMBER(-1.2315303f), TIMES(m, p))));
    p = PLUS(NUMBER(3.1157899f), TIMES(m, PLUS(NUMBER(-3.3241990f), TIMES(m, p))));
    return TIMES(x, PLUS(e, TIMES(p, _mm512_sub_ps(m, NUMBER(1.0f)))));
#undef PLUS
#undef TIMES
#undef NUMBER
}

#endif

static float ISA_FN(log_sum)(const uint32_t *a, const uint32_t *b, int n, uint32_t *num_nonzero) {
    float sums[8] = {0}, sum = 0;
    uint32_t nonzero_counts[8] = {0}, entries = 0;
    int i = 0;
#ifdef ISA_AVX512 /* the same sums in the same order */
    __m256 eight = _mm256_setzero_ps();
    for (; i + 16 <= n; i += 16) {
        __m512i counts = _mm512_add_epi32(_mm512_loadu_si512(a + i), _mm512_loadu_si512(b + i));
        __m512 terms = ISA_FN(x_log2_x_16)(_mm512_cvtepi32_ps(counts));
        eight = _mm256_add_ps(eight, _mm512_castps512_ps256(terms));
        eight = _mm256_add_ps(eight, _mm512_extractf32x8_ps(terms, 1));
        entries += (uint32_t)__builtin_popcount(_mm512_test_epi32_mask(counts, counts));
    }
    _mm256_storeu_ps(sums, eight);
#endif
    for (; i < n; i += 8)
        for (int k = 0; k < 8; ++k) {
            uint32_t count = a[i + k] + b[i + k];
            sums[k] += ISA_FN(x_log2_x)((float)(int32_t)count);
            nonzero_counts[k] += count != 0;
        }
    for (int k = 0; k < 8; ++k) sum += sums[k], entries += nonzero_counts[k];
    *num_nonzero = entries;
    return sum;
}

static void ISA_FN(fold)(const uint8_t *p, const uint8_t *s, size_t n, uint16_t *restrict out) {
    for (size_t i = 0; i < n; ++i) out[i] = (uint16_t)((p[i] & 127) << 8 | (s[i] ^ (p[i] & 128)));
}

static inline uint16_t *ISA_FN(encode_all)(const uint8_t *p, const uint8_t *s, size_t n, const uint32_t *tables,
                                           const dense_code *codes, uint32_t states[NUM_STATES], uint16_t *end,
                                           uint8_t *marks) {
    size_t num_grouped = n & ~(size_t)3;
    uint32_t mark = 0;
#define CODE_OF(j) (const dense_code *)(const void *)((const uint8_t *)codes + ((tables ? tables[p[j]] : 0) ^ (uint32_t)s[j] << 4))
    for (size_t j = n; j > num_grouped; --j) ENCODE(states[(j - 1) & 3], CODE_OF(j - 1));
    if (num_grouped < n) marks[num_grouped / 4] = (uint8_t)(mark / ESCAPE_MARK);
#ifdef ISA_AVX512
    __m256i packed_states = _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(const void *)states));
#elif defined(ISA_F16C)
    __m128i packed_states = _mm_loadu_si128((const __m128i *)(const void *)states);
#endif
#ifdef ISA_F16C
    for (size_t j = num_grouped; j > 0; j -= 4) {
        const dense_code *a = CODE_OF(j - 4), *b = CODE_OF(j - 3), *c = CODE_OF(j - 2), *d = CODE_OF(j - 1);
        end = ISA_FN(encode_four)(&packed_states, &marks[j / 4 - 1], a, b, c, d, end);
    }
#else
    uint32_t a = states[0], b = states[1], c = states[2], d = states[3];
    for (size_t j = num_grouped; j > 0; j -= 4) {
        mark = 0;
        ENCODE(d, CODE_OF(j - 1));
        ENCODE(c, CODE_OF(j - 2));
        ENCODE(b, CODE_OF(j - 3));
        ENCODE(a, CODE_OF(j - 4));
        marks[j / 4 - 1] = (uint8_t)(mark / ESCAPE_MARK);
    }
    states[0] = a, states[1] = b, states[2] = c, states[3] = d;
#endif
#ifdef ISA_AVX512
    _mm_storeu_si128((__m128i *)(void *)states, _mm256_cvtepi64_epi32(packed_states));
#elif defined(ISA_F16C)
    _mm_storeu_si128((__m128i *)(void *)states, packed_states);
#endif
#undef CODE_OF
    return end;
}

static uint16_t *ISA_FN(encode)(const uint8_t *p, const uint8_t *s, size_t n, const uint32_t *tables,
                                const dense_code *codes, uint32_t states[NUM_STATES], uint16_t *end, uint8_t *marks) {
    if (tables) return ISA_FN(encode_all)(p, s, n, tables, codes, states, end, marks);
    return ISA_FN(encode_all)(p, s, n, NULL, codes, states, end, marks);
}
