/* Products of 64 bits for eight lanes of 32, by AVX2, and sums with limits. Included once per level with AVX2. */

#define LANES_OF(pointer) _mm256_loadu_si256((const __m256i *)(pointer))
#define STORE_LANES(pointer, x) _mm256_storeu_si256((__m256i *)(pointer), x)

typedef struct {
    __m256i low, high;
} ISA_FN(product);

/* Lower and upper halves of products of 64 bits, given those of even and of odd lanes. */
static inline ISA_FN(product) ISA_FN(join)(__m256i even, __m256i odd) {
    return (ISA_FN(product)){_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa),
                             _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa)};
}

static inline __m256i ISA_FN(odd)(__m256i x) { return _mm256_srli_epi64(x, 32); }

static inline ISA_FN(product) ISA_FN(multiply_add)(__m256i a, __m256i b, int64_t rounding) {
    const __m256i half = _mm256_set1_epi64x(rounding);
    return ISA_FN(join)(_mm256_add_epi64(_mm256_mul_epi32(a, b), half),
                        _mm256_add_epi64(_mm256_mul_epi32(ISA_FN(odd)(a), ISA_FN(odd)(b)), half));
}

/* The product shifted right, as 32 bits that it fits in. */
static inline __m256i ISA_FN(shift)(ISA_FN(product) p, int places) {
    return _mm256_or_si256(_mm256_srli_epi32(p.low, places), _mm256_slli_epi32(p.high, 32 - places));
}

/* The same, limited to 32 bits. */
static inline __m256i ISA_FN(shift_saturated)(ISA_FN(product) p, int places) {
    const __m256i x = ISA_FN(shift)(p, places), limit = _mm256_set1_epi32((1 << (places - 1)) - 1);
    const __m256i sign = _mm256_srai_epi32(p.high, 31);
    const __m256i is_beyond = _mm256_cmpgt_epi32(_mm256_xor_si256(p.high, sign), limit);
    return _mm256_blendv_epi8(x, _mm256_xor_si256(sign, _mm256_set1_epi32(0x7fffffff)), is_beyond);
}

static inline __m256i ISA_FN(limit)(__m256i x, int32_t limit) {
    return _mm256_max_epi32(_mm256_min_epi32(x, _mm256_set1_epi32(limit)), _mm256_set1_epi32(-limit));
}

/* a + b, limited to 32 bits and to `limit`. */
static inline __m256i ISA_FN(add_limited)(__m256i a, __m256i b, int32_t limit) {
    const __m256i sum = _mm256_add_epi32(a, b);
    const __m256i differs = _mm256_and_si256(_mm256_xor_si256(sum, a), _mm256_xor_si256(sum, b));
    const __m256i overflow = _mm256_srai_epi32(differs, 31);
    const __m256i edge = _mm256_xor_si256(_mm256_srai_epi32(a, 31), _mm256_set1_epi32(0x7fffffff));
    return ISA_FN(limit)(_mm256_blendv_epi8(sum, edge, overflow), limit);
}

/* base + ((sums factor + 2^15) >> 16), limited */
static inline __m256i ISA_FN(scale8)(__m256i base, const int32_t *sums, int32_t factor) {
    const ISA_FN(product) p = ISA_FN(multiply_add)(LANES_OF(sums), _mm256_set1_epi32(factor), 1 << 15);
    return ISA_FN(add_limited)(base, ISA_FN(shift_saturated)(p, 16), CENTER_LIMIT);
}
