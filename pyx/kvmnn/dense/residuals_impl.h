/* The kernels of residuals.h, compiled once per SIMD level (../simd.h). */

/* -- symbols and low parts ----------------------------------------------------------------------------------------- */

static inline int ISA_FN(split_into)(const uint8_t *words, size_t n, int dtype, int base, uint8_t *restrict symbols,
                                     uint8_t *restrict low) {
    if (dtype == KVMNN_FP16) {
        const uint16_t *u = (const uint16_t *)words;
        for (size_t i = 0; i < n; ++i) {
            if (symbols) symbols[i] = (uint8_t)(u[i] >> 8);
            if (low) low[i] = (uint8_t)u[i];
        }
        return 0;
    }
    uint16_t outside_mask = 0;
    if (dtype == KVMNN_BF16) {
        const uint16_t *u = (const uint16_t *)words;
        for (size_t i = 0; i < n; ++i) {
            uint16_t v = u[i], e = (uint16_t)((v >> 7 & 255) - base);
            uint16_t inside = (uint16_t)(e - 1) < EXPONENT_WINDOW ? 0xffff : 0;
            e &= inside;
            outside_mask |= (uint16_t)~inside;
            if (symbols) symbols[i] = (uint8_t)((v >> 8 & 128) | e << 2 | (v >> 5 & 3));
            if (low) low[i] = (uint8_t)(v & 31);
        }
    } else {
        const uint32_t *u = (const uint32_t *)words;
        for (size_t i = 0; i < n; ++i) {
            uint16_t v = (uint16_t)(u[i] >> 16), e = (uint16_t)((v >> 7 & 255) - base);
            uint16_t inside = (uint16_t)(e - 1) < EXPONENT_WINDOW ? 0xffff : 0;
            e &= inside;
            outside_mask |= (uint16_t)~inside;
            if (symbols) symbols[i] = (uint8_t)((v >> 8 & 128) | e << 2 | (v >> 5 & 3));
            if (low) low[i] = (uint8_t)(v & 31);
        }
    }
    return outside_mask != 0;
}

static int ISA_FN(split)(const uint8_t *words, size_t n, int dtype, int base, uint8_t *restrict symbols,
                         uint8_t *restrict low) {
    if (!low) return ISA_FN(split_into)(words, n, dtype, base, symbols, NULL);
    if (!symbols) return ISA_FN(split_into)(words, n, dtype, base, NULL, low);
    return ISA_FN(split_into)(words, n, dtype, base, symbols, low);
}

static void ISA_FN(join)(const uint8_t *restrict symbols, const uint8_t *restrict low, const uint8_t *restrict tails,
                         size_t n, int dtype, int base, uint8_t *restrict words) {
    uint16_t *restrict u = (uint16_t *)words;
    if (dtype == KVMNN_FP16) {
        for (size_t i = 0; i < n; ++i) u[i] = (uint16_t)(symbols[i] << 8 | low[i]);
    } else if (dtype == KVMNN_BF16) {
        for (size_t i = 0; i < n; ++i) {
            uint16_t s = symbols[i];
            u[i] = (uint16_t)((s & 128) << 8 | ((s >> 2 & 31) + base) << 7 | (s & 3) << 5 | low[i]);
        }
    } else {
        for (size_t i = 0; i < n; ++i) {
            uint16_t s = symbols[i];
            u[2 * i + 1] = (uint16_t)((s & 128) << 8 | ((s >> 2 & 31) + base) << 7 | (s & 3) << 5 | low[i]);
            memcpy(u + 2 * i, tails + 2 * i, 2);
        }
    }
}

static int ISA_FN(unfold)(const uint8_t *restrict folded, const uint8_t *restrict predicted, size_t n,
                          uint8_t *restrict symbols) {
    uint8_t has_escape = 0;
    for (size_t i = 0; i < n; ++i) {
        has_escape |= folded[i] == ESCAPE_SYMBOL ? 1 : 0;
        symbols[i] = (uint8_t)(folded[i] ^ (predicted[i] & 128));
    }
    return has_escape;
}

static int ISA_FN(has_outside_exponent)(const uint8_t *symbols, size_t n) {
    uint8_t any_outside = 0;
    for (size_t i = 0; i < n; ++i) any_outside |= (symbols[i] & 124) == 0 ? 1 : 0;
    return any_outside;
}

/* -- rotation ------------------------------------------------------------------------------------------------------ */

static void ISA_FN(angles)(const uint64_t *frequencies, size_t pairs, uint64_t distance, int32_t *restrict scratch,
                           float *restrict cosines, float *restrict sines) {
    for (size_t i = 0; i < pairs; ++i)
        scratch[i] = (int32_t)(((distance * frequencies[i] >> 39) + (1 << 22)) & ((1 << 25) - 1));
    for (size_t i = 0; i < pairs; ++i) {
        uint32_t turns = (uint32_t)scratch[i], quarter = turns >> 23;
        float x = (float)((int32_t)(turns & ((1 << 23) - 1)) - (1 << 22)) * 0x1p-23f;
        float z = x * x;
        uint32_t sine = dense_bits(x * (S0 + z * (S1 + z * (S2 + z * S3))));
        uint32_t cosine = dense_bits(1.0f + z * (C1 + z * (C2 + z * (C3 + z * C4))));
        uint32_t swap_mask = 0u - (quarter & 1), exchange = (sine ^ cosine) & swap_mask;
        cosines[i] = dense_float((cosine ^ exchange) ^ ((quarter + 1) & 2) << 30);
        sines[i] = dense_float((sine ^ exchange) ^ (quarter & 2) << 30);
    }
}

static inline float ISA_FN(half_to_float)(uint32_t word) {
    uint32_t normal = (word & 0x7c00) - 0x400 < 0x7800 ? 0xffffffffu : 0;
    return dense_float(((word & 0x8000) << 16 | (((word & 0x7fff) << 13) + 0x38000000)) & normal);
}

static inline uint16_t ISA_FN(float_to_half)(float x) {
    uint32_t bits = dense_bits(x);
    int32_t y = (int32_t)(((bits & 0x7fffffff) + 0x1000) >> 13) - (112 << 10);
    y = y < 1024 ? 0 : y;
    y = y > 31743 ? 31743 : y;
    return (uint16_t)((bits >> 16 & 0x8000) | (uint32_t)y);
}

static inline float ISA_FN(bits_to_float)(uint32_t bits) {
    uint32_t normal_mask = (bits & 0x7f800000) - (64u << 23) < (128u << 23) ? 0xffffffffu : 0;
    return dense_float(bits & normal_mask);
}

static inline uint16_t ISA_FN(float_to_bf16)(float x) { /* a sum below 2^66: rounding does not reach the sign */
    return (uint16_t)((dense_bits(x) + 0x8000) >> 16);
}

#ifdef ISA_F16C

/* Words of fp16 that have no value of their own as 0. */
static inline __m128i ISA_FN(flush_special_fp16)(__m128i words) {
    __m128i field = _mm_and_si128(words, _mm_set1_epi16(0x7c00));
    __m128i is_subnormal = _mm_cmpeq_epi16(field, _mm_setzero_si128());
    __m128i special = _mm_cmpeq_epi16(field, _mm_set1_epi16(0x7c00));
    return _mm_andnot_si128(_mm_or_si128(is_subnormal, special), words);
}

/* float_to_half of eight: what is added makes cutting off into rounding. */
static inline __m128i ISA_FN(floats_to_halves)(__m256 x) {
    __m256i rounded_up = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x1000));
    __m128i y = _mm256_cvtps_ph(_mm256_castsi256_ps(rounded_up), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    __m128i is_subnormal = _mm_cmpeq_epi16(_mm_and_si128(y, _mm_set1_epi16(0x7c00)), _mm_setzero_si128());
    return _mm_andnot_si128(_mm_and_si128(is_subnormal, _mm_set1_epi16(0x7fff)), y);
}

#endif

#ifdef ISA_AVX512 /* the same of sixteen */

static inline __m256i ISA_FN(flush_special_fp16_16)(__m256i words) {
    __m256i field = _mm256_sub_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x7c00)), _mm256_set1_epi16(0x400));
    return _mm256_maskz_mov_epi16(_mm256_cmplt_epu16_mask(field, _mm256_set1_epi16(0x7800)), words);
}

static inline __m256i ISA_FN(floats_to_halves_16)(__m512 x) {
    __m512i rounded_up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x1000));
    __m256i y = _mm512_cvtps_ph(_mm512_castsi512_ps(rounded_up), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    __mmask16 is_subnormal = _mm256_testn_epi16_mask(y, _mm256_set1_epi16(0x7c00));
    return _mm256_mask_mov_epi16(y, is_subnormal, _mm256_and_si256(y, _mm256_set1_epi16((short)0x8000)));
}

#endif

static DENSE_ALWAYS_INLINE void ISA_FN(rotate_fp16)(const uint16_t *a, const uint16_t *b, size_t n, const float *c,
                                                    const float *s, uint16_t *restrict to_a, uint16_t *restrict to_b) {
    size_t i = 0;
#ifdef ISA_AVX512
    for (; i + 16 <= n; i += 16) {
        __m512 x =
            _mm512_cvtph_ps(ISA_FN(flush_special_fp16_16)(_mm256_loadu_si256((const __m256i *)(const void *)(a + i))));
        __m512 y =
            _mm512_cvtph_ps(ISA_FN(flush_special_fp16_16)(_mm256_loadu_si256((const __m256i *)(const void *)(b + i))));
        __m512 cosine = _mm512_loadu_ps(c + i), sine = _mm512_loadu_ps(s + i);
        __m512 rotated_a = _mm512_sub_ps(_mm512_mul_ps(x, cosine), _mm512_mul_ps(y, sine));
        __m512 rotated_b = _mm512_add_ps(_mm512_mul_ps(y, cosine), _mm512_mul_ps(x, sine));
        _mm256_storeu_si256((__m256i *)(void *)(to_a + i), ISA_FN(floats_to_halves_16)(rotated_a));
        _mm256_storeu_si256((__m256i *)(void *)(to_b + i), ISA_FN(floats_to_halves_16)(rotated_b));
    }
#endif
#ifdef ISA_F16C
    for (; i + 8 <= n; i += 8) {
        __m256 x = _mm256_cvtph_ps(ISA_FN(flush_special_fp16)(_mm_loadu_si128((const __m128i *)(const void *)(a + i))));
        __m256 y = _mm256_cvtph_ps(ISA_FN(flush_special_fp16)(_mm_loadu_si128((const __m128i *)(const void *)(b + i))));
        __m256 cosine = _mm256_loadu_ps(c + i), sine = _mm256_loadu_ps(s + i);
        __m256 rotated_a = _mm256_sub_ps(_mm256_mul_ps(x, cosine), _mm256_mul_ps(y, sine));
        __m256 rotated_b = _mm256_add_ps(_mm256_mul_ps(y, cosine), _mm256_mul_ps(x, sine));
        _mm_storeu_si128((__m128i *)(void *)(to_a + i), ISA_FN(floats_to_halves)(rotated_a));
        _mm_storeu_si128((__m128i *)(void *)(to_b + i), ISA_FN(floats_to_halves)(rotated_b));
    }
#endif
    for (; i < n; ++i) {
        float x = ISA_FN(half_to_float)(a[i]), y = ISA_FN(half_to_float)(b[i]);
        float xc = x * c[i], ys = y * s[i], yc = y * c[i], xs = x * s[i];
        to_a[i] = ISA_FN(float_to_half)(xc - ys);
        to_b[i] = ISA_FN(float_to_half)(yc + xs);
    }
}

static void ISA_FN(rotate_bf16)(const uint16_t *a, const uint16_t *b, size_t n, const float *c, const float *s,
                                uint16_t *restrict to_a, uint16_t *restrict to_b) {
    for (size_t i = 0; i < n; ++i) {
        float x = ISA_FN(bits_to_float)((uint32_t)a[i] << 16), y = ISA_FN(bits_to_float)((uint32_t)b[i] << 16);
        float xc = x * c[i], ys = y * s[i], yc = y * c[i], xs = x * s[i];
        to_a[i] = ISA_FN(float_to_bf16)(xc - ys);
        to_b[i] = ISA_FN(float_to_bf16)(yc + xs);
    }
}

static void ISA_FN(rotate_fp32)(const uint32_t *a, const uint32_t *b, size_t n, const float *c, const float *s,
                                uint32_t *restrict to_a, uint32_t *restrict to_b) {
    for (size_t i = 0; i < n; ++i) {
        float x = ISA_FN(bits_to_float)(a[i]), y = ISA_FN(bits_to_float)(b[i]);
        float xc = x * c[i], ys = y * s[i], yc = y * c[i], xs = x * s[i];
        to_a[i] = dense_bits(xc - ys);
        to_b[i] = dense_bits(yc + xs);
    }
}

/* -- comparing rows ------------------------------------------------------------------------------------------------ */

static size_t ISA_FN(count_equal)(const uint8_t *a, const uint8_t *b, size_t n) {
    size_t sum = 0, i = 0;
#if defined(ISA_AVX512)
    for (; n - i >= 64; i += 64)
        sum += (size_t)__builtin_popcountll(_mm512_cmpeq_epi8_mask(_mm512_loadu_si512((const void *)(a + i)),
                                                                   _mm512_loadu_si512((const void *)(b + i))));
#elif defined(ISA_F16C)
    for (; n - i >= 32; i += 32) {
        __m256i equal_mask = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)(const void *)(a + i)),
                                               _mm256_loadu_si256((const __m256i *)(const void *)(b + i)));
        sum += (size_t)__builtin_popcount((unsigned)_mm256_movemask_epi8(equal_mask));
    }
#endif
    while (n - i >= 32) {
        uint8_t byte_counts[32] = {0};
        size_t end = n - i > 32 * 255 ? i + 32 * 255 : i + (n - i) / 32 * 32;
        for (; i < end; i += 32)
            for (int k = 0; k < 32; ++k) byte_counts[k] = (uint8_t)(byte_counts[k] + (a[i + k] == b[i + k]));
        uint64_t words64[4], pairs = 0;
        memcpy(words64, byte_counts, 32);
        for (int k = 0; k < 4; ++k)
            pairs += (words64[k] & 0x00ff00ff00ff00ffu) + (words64[k] >> 8 & 0x00ff00ff00ff00ffu);
        sum += (size_t)(pairs * 0x0001000100010001u >> 48);
    }
    for (; i < n; ++i) sum += a[i] == b[i];
    return sum;
}

/* Bits of as many rows as a vector holds. */
#if defined(__GNUC__)
typedef uint64_t ISA_FN(bits) __attribute__((vector_size(4 * ISA_VECTOR_FLOATS)));
#else
typedef uint64_t ISA_FN(bits);
#endif

/* Three bits of a weight to one, and one of twice the weight. */
#ifdef ISA_AVX512
#define ISA_TERNARY(a, b, c, table) \
    (ISA_FN(bits)) _mm512_ternarylogic_epi64((__m512i)(a), (__m512i)(b), (__m512i)(c), table)
#define FULL_ADD(high, low, x, y)                \
    do {                                         \
        ISA_FN(bits) x_ = (x), y_ = (y);         \
        (high) = ISA_TERNARY(low, x_, y_, 0xe8); \
        (low) = ISA_TERNARY(low, x_, y_, 0x96);  \
    } while (0)
#else
#define FULL_ADD(high, low, x, y)                              \
    do {                                                       \
        ISA_FN(bits) x_ = (x), y_ = (y), differ_ = (low) ^ x_; \
        (high) = ((low) & x_) | (differ_ & y_);                \
        (low) = differ_ ^ y_;                                  \
    } while (0)
#endif

static inline ISA_FN(bits) ISA_FN(load_bits)(const void *p) {
    ISA_FN(bits) x;
    memcpy(&x, p, sizeof x);
    return x;
}

static void ISA_FN(vote)(const uint8_t *const bitmaps[NUM_COLUMNS], size_t blocks, size_t num_columns,
                         dense_votes *votes) {
    const size_t num_padded = num_columns > NUM_COLUMNS / 2 ? NUM_COLUMNS : NUM_COLUMNS / 2,
                 step = sizeof(ISA_FN(bits));
    for (size_t offset = 0; offset < blocks * VOTE_BLOCK_ROWS / 8; offset += step) {
        ISA_FN(bits) planes[VOTE_PLANES] = {{0}}, a, b, c, d, e;
#define BITS_OF(i) ISA_FN(load_bits)(bitmaps[k + (i)] + offset)
        for (size_t k = 0; k < num_padded; k += 8) {
            FULL_ADD(a, planes[0], BITS_OF(0), BITS_OF(1));
            FULL_ADD(b, planes[0], BITS_OF(2), BITS_OF(3));
            FULL_ADD(c, planes[1], a, b);
            FULL_ADD(a, planes[0], BITS_OF(4), BITS_OF(5));
            FULL_ADD(b, planes[0], BITS_OF(6), BITS_OF(7));
            FULL_ADD(d, planes[1], a, b);
            FULL_ADD(e, planes[2], c, d);
            a = planes[3] & e;
            planes[3] ^= e;
            b = planes[4] & a;
            planes[4] ^= a;
            planes[5] |= b;
        }
#undef BITS_OF
        for (int p = 0; p < VOTE_PLANES; ++p) memcpy((uint8_t *)votes->planes[p] + offset, &planes[p], step);
    }
}

#undef FULL_ADD
#undef ISA_TERNARY

/* Which words are not 0. */
static inline unsigned ISA_FN(nonzero_mask)(ISA_FN(bits) bits) {
#if defined(ISA_AVX512)
    return _mm512_test_epi64_mask((__m512i)bits, (__m512i)bits);
#elif defined(ISA_F16C)
    __m256i zero_mask = _mm256_cmpeq_epi64((__m256i)bits, _mm256_setzero_si256());
    return (unsigned)_mm256_movemask_pd(_mm256_castsi256_pd(zero_mask)) ^ 15;
#else
    uint64_t words[sizeof bits / 8];
    unsigned mask = 0;
    memcpy(words, &bits, sizeof words);
    for (size_t w = 0; w < sizeof words / 8; ++w) mask |= (unsigned)(words[w] != 0) << w;
    return mask;
#endif
}

/* Not by branches, which nobody could foresee. */
static inline uint64_t ISA_FN(select_top_blocks)(const dense_votes *votes, size_t blocks, uint64_t *candidates,
                                                 uint64_t *top) {
    const size_t step = sizeof(ISA_FN(bits)), count = blocks * VOTE_BLOCK_ROWS / 8 / step;
    ISA_FN(bits) best[MAX_VOTE_BLOCKS * VOTE_BLOCK_ROWS / 8 / sizeof(ISA_FN(bits))];
    uint64_t nonzero_words = 0;
    for (size_t i = 0; i < count; ++i) best[i] = ISA_FN(load_bits)(candidates + i * step / 8);
    for (int p = VOTE_PLANES; p-- > 0;) {
        uint64_t planes_set = 0;
        for (size_t i = 0; i < count; ++i)
            planes_set |= (uint64_t)ISA_FN(nonzero_mask)(ISA_FN(load_bits)(votes->planes[p] + i * step / 8) & best[i])
                    << i * step / 8;
        uint64_t keep_mask = planes_set ? 0 : ~(uint64_t)0;
        for (size_t i = 0; i < count; ++i) best[i] &= ISA_FN(load_bits)(votes->planes[p] + i * step / 8) | keep_mask;
        nonzero_words = planes_set ? planes_set : nonzero_words;
    }
    for (size_t i = 0; i < count; ++i) {
        ISA_FN(bits) remaining = ISA_FN(load_bits)(candidates + i * step / 8) & ~best[i];
        memcpy(candidates + i * step / 8, &remaining, step);
        memcpy(top + i * step / 8, &best[i], step);
    }
    return nonzero_words;
}

static uint64_t ISA_FN(select_top)(const dense_votes *votes, size_t blocks, uint64_t *candidates, uint64_t *top) {
    return blocks == 1 ? ISA_FN(select_top_blocks)(votes, 1, candidates, top)
                       : ISA_FN(select_top_blocks)(votes, blocks, candidates, top);
}

/* -- 5 bits -------------------------------------------------------------------------------------------------------- */

static void ISA_FN(pack5)(const uint8_t *low, size_t n, uint8_t *packed) {
    for (size_t i = 0; i < n; i += 8, packed += 5) {
        uint64_t v;
        memcpy(&v, low + i, 8);
        if (n - i < 8) v &= ((uint64_t)1 << 8 * (n - i)) - 1;
        v = (v & 0x001f001f001f001fu) | (v & 0x1f001f001f001f00u) >> 3;
        v = (v & 0x000003ff000003ffu) | (v & 0x03ff000003ff0000u) >> 6;
        v = (v & 0xfffff) | (v >> 32 & 0xfffff) << 20;
        memcpy(packed, &v, 8);
    }
}

static void ISA_FN(unpack5)(const uint8_t *packed, size_t n, uint8_t *low) {
    for (size_t i = 0; i < n; i += 8, packed += 5) {
        uint64_t v;
        memcpy(&v, packed, 8);
        v = (v & 0xfffff) | (v >> 20 & 0xfffff) << 32;
        v = (v & 0x000003ff000003ffu) | (v << 6 & 0x03ff000003ff0000u);
        v = (v & 0x001f001f001f001fu) | (v << 3 & 0x1f001f001f001f00u);
        memcpy(low + i, &v, 8);
    }
}

#include "entropy_encoder_impl.h"
#include "entropy_decoder_impl.h"

static const dense_kernels ISA_FN(table) = {
    ISA_NAME,
    ISA_FN(split),
    ISA_FN(join),
    ISA_FN(unfold),
    ISA_FN(has_outside_exponent),
    ISA_FN(angles),
    ISA_FN(rotate_steps),
    ISA_FN(count_equal),
    ISA_FN(vote),
    ISA_FN(select_top),
    ISA_FN(select_equal),
    ISA_FN(merge),
    ISA_FN(subtract),
    ISA_FN(add_equal),
    ISA_FN(log_sum),
    ISA_FN(fold),
    ISA_FN(encode),
    ISA_FN(decode),
    ISA_FN(decode_low),
    ISA_FN(pack5),
    ISA_FN(unpack5),
};
