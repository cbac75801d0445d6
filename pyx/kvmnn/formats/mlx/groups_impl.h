/* The loops of groups.h, included once per SIMD level: LEVEL(name) gives each function its own name. */

#ifdef LEVEL_WIDE
/* Sixty-four codes: of eight at a time the bytes that have them, and of these the bits of each. */
static inline void LEVEL(sixty_four)(const uint8_t *restrict from, int bits, uint8_t *restrict to) {
    const __m512i bytes = _mm512_set1_epi64(0x0706050403020100), eights = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i begins = _mm512_mullo_epi64(eights, _mm512_set1_epi64(bits * INT64_C(0x0101010101010101)));
    const __m512i shifts = _mm512_set1_epi64(bits * INT64_C(0x0706050403020100));
    const __m512i held = _mm512_maskz_loadu_epi8((UINT64_C(1) << 8 * bits) - 1, from);
    const __m512i codes = _mm512_multishift_epi64_epi8(shifts, _mm512_permutexvar_epi8(_mm512_add_epi8(begins, bytes), held));
    _mm512_storeu_si512(to, _mm512_and_si512(codes, _mm512_set1_epi8((char)((1 << bits) - 1))));
}
#endif

/* Codes, one a byte; a multiple of 8 of them. `bits` is a constant where this is called. */
static inline void LEVEL(apart)(const uint8_t *restrict from, size_t count, int bits, uint8_t *restrict to) {
    const uint8_t mask = (uint8_t)((1 << bits) - 1);
    const size_t size = count / 8 * (size_t)bits;
    size_t i = 0, at = 0;
#ifdef LEVEL_WIDE
    for (; i + 64 <= count; i += 64, at += 8 * (size_t)bits) {
        _mm_prefetch((const char *)(const void *)(from + at + 1024), _MM_HINT_T0);
        LEVEL(sixty_four)(from + at, bits, to + i);
    }
#endif
    for (; i < count; i += 8, at += (size_t)bits) {
        uint64_t held = 0;
        if (at + 8 <= size)  /* more than is needed, and masked away */
            held = kvmnn_eight(from + at);
        else
            for (int k = 0; k < bits; ++k) held |= (uint64_t)from[at + (size_t)k] << 8 * k;
#if defined(LEVEL_F16C) && defined(__x86_64__)
        held = _pdep_u64(held, mask * UINT64_C(0x0101010101010101));
        memcpy(to + i, &held, 8);
#else
        for (int k = 0; k < 8; ++k) to[i + k] = (uint8_t)(held >> bits * k) & mask;
#endif
    }
}

static inline void LEVEL(halves_apart)(const uint8_t *restrict from, size_t count, uint8_t *restrict to) {
    for (size_t i = 0; i < count / 2; ++i) {
        to[2 * i] = from[i] & 15;
        to[2 * i + 1] = from[i] >> 4;
    }
}

static const uint8_t *LEVEL(codes)(const uint8_t *from, size_t count, int bits, uint8_t *scratch) {
    switch (bits) {
        case 2: LEVEL(apart)(from, count, 2, scratch); return scratch;
        case 3: LEVEL(apart)(from, count, 3, scratch); return scratch;
        case 4: LEVEL(halves_apart)(from, count, scratch); return scratch;
        case 5: LEVEL(apart)(from, count, 5, scratch); return scratch;
        case 6: LEVEL(apart)(from, count, 6, scratch); return scratch;
        default: return from;
    }
}

static inline void LEVEL(of_f32)(const uint8_t *restrict codes, size_t n, float scale, float bias, float *restrict to) {
    for (size_t i = 0; i < n; ++i) to[i] = (float)codes[i] * scale + bias;
}

static inline uint32_t LEVEL(to_bf16)(float value) {
    const uint32_t bits = kvmnn_bits_of(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#ifdef LEVEL_F16C
/* The bits of float32 so that those above the lowest 16 are those of the nearest bf16, ties to even. */
static inline __m256i LEVEL(rounded)(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}

/* Eight numbers as bf16 in 32 bits each. */
static inline __m256i LEVEL(eight_bf16)(const uint8_t *codes, __m256 scales, __m256 biases) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)codes);
    const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), scales);
    const __m256i kept = _mm256_and_si256(LEVEL(rounded)(product), _mm256_set1_epi32(~0xffff));
    return _mm256_srli_epi32(LEVEL(rounded)(_mm256_add_ps(_mm256_castsi256_ps(kept), biases)), 16);
}
#endif

#ifdef LEVEL_WIDE
static inline __m512i LEVEL(rounded16)(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}

static inline __m512 LEVEL(sixteen)(const uint8_t *codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes)));
}
#endif

static inline void LEVEL(of_bf16)(const uint8_t *restrict codes, size_t n, float scale, float bias, uint16_t *restrict to) {
    size_t i = 0;
#if defined(LEVEL_WIDE)
    for (; i + 16 <= n; i += 16) {
        const __m512i product = LEVEL(rounded16)(_mm512_mul_ps(LEVEL(sixteen)(codes + i), _mm512_set1_ps(scale)));
        const __m512 kept = _mm512_castsi512_ps(_mm512_and_si512(product, _mm512_set1_epi32(~0xffff)));
        const __m512i sum = LEVEL(rounded16)(_mm512_add_ps(kept, _mm512_set1_ps(bias)));
        _mm256_storeu_si256((__m256i *)(void *)(to + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
    }
#elif defined(LEVEL_F16C)
    const __m256 scales = _mm256_set1_ps(scale), biases = _mm256_set1_ps(bias);
    for (; i + 16 <= n; i += 16) {
        const __m256i first = LEVEL(eight_bf16)(codes + i, scales, biases);
        const __m256i second = LEVEL(eight_bf16)(codes + i + 8, scales, biases);
        const __m256i made = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
        _mm256_storeu_si256((__m256i *)(void *)(to + i), made);
    }
#endif
    for (; i < n; ++i) {
        const float product = kvmnn_float_of(LEVEL(to_bf16)((float)codes[i] * scale) << 16);
        to[i] = (uint16_t)LEVEL(to_bf16)(product + bias);
    }
}

static inline void LEVEL(of_f16)(const uint8_t *restrict codes, size_t n, float scale, float bias, uint16_t *restrict to) {
    size_t i = 0;
#ifdef LEVEL_WIDE
    for (; i + 16 <= n; i += 16) {
        const __m512 product = _mm512_mul_ps(LEVEL(sixteen)(codes + i), _mm512_set1_ps(scale));
        const __m512 rounded = _mm512_cvtph_ps(_mm512_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT));
        const __m512 sum = _mm512_add_ps(rounded, _mm512_set1_ps(bias));
        _mm256_storeu_si256((__m256i *)(void *)(to + i), _mm512_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
#ifdef LEVEL_F16C
    const __m256 scales = _mm256_set1_ps(scale), biases = _mm256_set1_ps(bias);
    for (; i + 8 <= n; i += 8) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(codes + i));
        const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), scales);
        const __m256 rounded = _mm256_cvtph_ps(_mm256_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT));
        const __m128i made = _mm256_cvtps_ph(_mm256_add_ps(rounded, biases), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(void *)(to + i), made);
    }
#endif
    for (; i < n; ++i) to[i] = (uint16_t)kvmnn_to_half(kvmnn_half(kvmnn_to_half((float)codes[i] * scale)) + bias);
}

/* Numbers of codes below 16, looked up in those of all 16 codes. */
static inline void LEVEL(looked_up)(const uint8_t *restrict codes, size_t n, const uint16_t *restrict names, uint16_t *restrict to) {
    size_t i = 0;
#ifdef LEVEL_F16C
    const __m128i first = _mm_loadu_si128((const __m128i *)(const void *)names), bytes = _mm_set1_epi16(255);
    const __m128i second = _mm_loadu_si128((const __m128i *)(const void *)(names + 8));
    const __m128i low = _mm_packus_epi16(_mm_and_si128(first, bytes), _mm_and_si128(second, bytes));
    const __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    for (; i + 16 <= n; i += 16) {
        const __m128i own = _mm_loadu_si128((const __m128i *)(const void *)(codes + i));
        const __m128i lows = _mm_shuffle_epi8(low, own), highs = _mm_shuffle_epi8(high, own);
        _mm_storeu_si128((__m128i *)(void *)(to + i), _mm_unpacklo_epi8(lows, highs));
        _mm_storeu_si128((__m128i *)(void *)(to + i + 8), _mm_unpackhi_epi8(lows, highs));
    }
#endif
    for (; i < n; ++i) to[i] = names[codes[i]];
}

/* As those above; of many codes of few bits the 16 numbers that there can be are made first. */
#define LEVEL_BY_NAME(name, one)                                                                                 \
    static inline void LEVEL(name)(const uint8_t *codes, size_t n, float scale, float bias, int few, uint16_t *to) { \
        if (few && n >= 32) {                                                                                    \
            uint16_t names[16];                                                                                  \
            one(kvmnn_all_codes, 16, scale, bias, names);                                                        \
            LEVEL(looked_up)(codes, n, names, to);                                                               \
        } else                                                                                                   \
            one(codes, n, scale, bias, to);                                                                      \
    }
LEVEL_BY_NAME(run_f16, LEVEL(of_f16))
LEVEL_BY_NAME(run_bf16, LEVEL(of_bf16))
#undef LEVEL_BY_NAME

static inline void LEVEL(run_f32)(const uint8_t *codes, size_t n, float scale, float bias, int few, float *to) {
    (void)few;
    LEVEL(of_f32)(codes, n, scale, bias, to);
}

#ifdef LEVEL_F16C
#define LEVEL_HALF(word) _cvtsh_ss(word)
#else
#define LEVEL_HALF(word) kvmnn_half(word)
#endif

/* All codes of all rows in pieces, and these in runs of one group; `one` makes the numbers of a run at `to`. */
#define LEVEL_GROUPS(name, word, float_of, one)                                                          \
    static void LEVEL(name)(const kvmnn_groups *groups) {                                                \
        const size_t size = groups->values / groups->groups;                                             \
        const int few = groups->bits <= 4;                                                               \
        const uint8_t *from = groups->codes, *scales = groups->scales, *biases = groups->biases;         \
        word *to = (word *)(void *)groups->to;                                                           \
        float scale = 0, bias = 0;                                                                       \
        uint8_t scratch[KVMNN_CODES];                                                                    \
        for (size_t left = groups->rows * groups->values, of_group = 0; left;) {                         \
            size_t count = left < KVMNN_CODES ? left : KVMNN_CODES;                                      \
            const uint8_t *codes = LEVEL(codes)(from, count, groups->bits, scratch);                     \
            from += count * (size_t)groups->bits / 8;                                                    \
            for (left -= count; count;) {                                                                \
                if (!of_group) {                                                                         \
                    word words[2];                                                                       \
                    memcpy(words, scales, sizeof(word));                                                 \
                    memcpy(words + 1, biases, sizeof(word));                                             \
                    scale = float_of(words[0]), bias = float_of(words[1]);                               \
                    scales += sizeof(word), biases += sizeof(word), of_group = size;                     \
                }                                                                                        \
                const size_t n = of_group < count ? of_group : count;                                    \
                one(codes, n, scale, bias, few, to);                                                     \
                codes += n, to += n, count -= n, of_group -= n;                                          \
            }                                                                                            \
        }                                                                                                \
    }

#define LEVEL_ITSELF(word) (word)
#define LEVEL_SHIFTED(word) kvmnn_float_of((uint32_t)(word) << 16)
LEVEL_GROUPS(f16, uint16_t, LEVEL_HALF, LEVEL(run_f16))
LEVEL_GROUPS(bf16, uint16_t, LEVEL_SHIFTED, LEVEL(run_bf16))
LEVEL_GROUPS(f32, float, LEVEL_ITSELF, LEVEL(run_f32))
#undef LEVEL_HALF
#undef LEVEL_ITSELF
#undef LEVEL_SHIFTED
#undef LEVEL_GROUPS

static const kvmnn_groups_table LEVEL(table) = {KVMNN_LEVEL_NAME, {LEVEL(f16), LEVEL(bf16), LEVEL(f32)}};
