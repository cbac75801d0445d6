/* The kernels of groups.h, included once per SIMD level: ISA_FN(name) gives each function its own name. */

#ifdef ISA_AVX512
/* Sixty-four codes: of eight at a time the bytes that have them, and of these the bits of each. */
static inline void ISA_FN(unpack_64)(const uint8_t *restrict src, int bits, uint8_t *restrict out) {
    const __m512i bytes = _mm512_set1_epi64(0x0706050403020100), eights = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i begins = _mm512_mullo_epi64(eights, _mm512_set1_epi64(bits * INT64_C(0x0101010101010101)));
    const __m512i shifts = _mm512_set1_epi64(bits * INT64_C(0x0706050403020100));
    const __m512i packed_bits = _mm512_maskz_loadu_epi8((UINT64_C(1) << 8 * bits) - 1, src);
    const __m512i codes =
        _mm512_multishift_epi64_epi8(shifts, _mm512_permutexvar_epi8(_mm512_add_epi8(begins, bytes), packed_bits));
    _mm512_storeu_si512(out, _mm512_and_si512(codes, _mm512_set1_epi8((char)((1 << bits) - 1))));
}
#endif

/* Codes, one a byte; a multiple of 8 of them. `bits` is a constant where this is called. */
static inline void ISA_FN(unpack_codes)(const uint8_t *restrict src, size_t count, int bits, uint8_t *restrict out) {
    const uint8_t mask = (uint8_t)((1 << bits) - 1);
    const size_t size = count / 8 * (size_t)bits;
    size_t i = 0, pos = 0;
#ifdef ISA_AVX512
    for (; i + 64 <= count; i += 64, pos += 8 * (size_t)bits) {
        _mm_prefetch((const char *)(const void *)(src + pos + 1024), _MM_HINT_T0);
        ISA_FN(unpack_64)(src + pos, bits, out + i);
    }
#endif
    for (; i < count; i += 8, pos += (size_t)bits) {
        uint64_t packed_bits = 0;
        if (pos + 8 <= size) /* more than is needed, and masked away */
            packed_bits = kvmnn_load64_le(src + pos);
        else
            for (int k = 0; k < bits; ++k) packed_bits |= (uint64_t)src[pos + (size_t)k] << 8 * k;
#if defined(ISA_F16C) && defined(__x86_64__)
        packed_bits = _pdep_u64(packed_bits, mask * UINT64_C(0x0101010101010101));
        memcpy(out + i, &packed_bits, 8);
#else
        for (int k = 0; k < 8; ++k) out[i + k] = (uint8_t)(packed_bits >> bits * k) & mask;
#endif
    }
}

static inline void ISA_FN(unpack_nibbles)(const uint8_t *restrict src, size_t count, uint8_t *restrict out) {
    for (size_t i = 0; i < count / 2; ++i) {
        out[2 * i] = src[i] & 15;
        out[2 * i + 1] = src[i] >> 4;
    }
}

static const uint8_t *ISA_FN(get_codes)(const uint8_t *src, size_t count, int bits, uint8_t *scratch) {
    switch (bits) {
        case 2: ISA_FN(unpack_codes)(src, count, 2, scratch); return scratch;
        case 3: ISA_FN(unpack_codes)(src, count, 3, scratch); return scratch;
        case 4: ISA_FN(unpack_nibbles)(src, count, scratch); return scratch;
        case 5: ISA_FN(unpack_codes)(src, count, 5, scratch); return scratch;
        case 6: ISA_FN(unpack_codes)(src, count, 6, scratch); return scratch;
        default: return src;
    }
}

static inline void ISA_FN(dequantize_f32)(const uint8_t *restrict codes, size_t n, float scale, float bias,
                                          float *restrict out) {
    for (size_t i = 0; i < n; ++i) out[i] = (float)codes[i] * scale + bias;
}

static inline uint32_t ISA_FN(to_bf16)(float value) {
    const uint32_t bits = kvmnn_float_bits(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#ifdef ISA_F16C
/* The bits of float32 so that those above the lowest 16 are those of the nearest bf16, ties to even. */
static inline __m256i ISA_FN(round_to_bf16)(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}

/* Eight numbers as bf16 in 32 bits each. */
static inline __m256i ISA_FN(dequantize_8_bf16)(const uint8_t *codes, __m256 scales, __m256 biases) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)codes);
    const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), scales);
    const __m256i product_bf16 = _mm256_and_si256(ISA_FN(round_to_bf16)(product), _mm256_set1_epi32(~0xffff));
    return _mm256_srli_epi32(ISA_FN(round_to_bf16)(_mm256_add_ps(_mm256_castsi256_ps(product_bf16), biases)), 16);
}
#endif

#ifdef ISA_AVX512
static inline __m512i ISA_FN(round_to_bf16_16)(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}

static inline __m512 ISA_FN(load_16)(const uint8_t *codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes)));
}
#endif

static inline void ISA_FN(dequantize_bf16)(const uint8_t *restrict codes, size_t n, float scale, float bias,
                                           uint16_t *restrict out) {
    size_t i = 0;
#if defined(ISA_AVX512)
    for (; i + 16 <= n; i += 16) {
        const __m512i product =
            ISA_FN(round_to_bf16_16)(_mm512_mul_ps(ISA_FN(load_16)(codes + i), _mm512_set1_ps(scale)));
        const __m512 product_bf16 = _mm512_castsi512_ps(_mm512_and_si512(product, _mm512_set1_epi32(~0xffff)));
        const __m512i sum = ISA_FN(round_to_bf16_16)(_mm512_add_ps(product_bf16, _mm512_set1_ps(bias)));
        _mm256_storeu_si256((__m256i *)(void *)(out + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
    }
#elif defined(ISA_F16C)
    const __m256 scales = _mm256_set1_ps(scale), biases = _mm256_set1_ps(bias);
    for (; i + 16 <= n; i += 16) {
        const __m256i first = ISA_FN(dequantize_8_bf16)(codes + i, scales, biases);
        const __m256i second = ISA_FN(dequantize_8_bf16)(codes + i + 8, scales, biases);
        const __m256i result = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
        _mm256_storeu_si256((__m256i *)(void *)(out + i), result);
    }
#endif
    for (; i < n; ++i) {
        const float product = kvmnn_bits_to_float(ISA_FN(to_bf16)((float)codes[i] * scale) << 16);
        out[i] = (uint16_t)ISA_FN(to_bf16)(product + bias);
    }
}

static inline void ISA_FN(dequantize_f16)(const uint8_t *restrict codes, size_t n, float scale, float bias,
                                          uint16_t *restrict out) {
    size_t i = 0;
#ifdef ISA_AVX512
    for (; i + 16 <= n; i += 16) {
        const __m512 product = _mm512_mul_ps(ISA_FN(load_16)(codes + i), _mm512_set1_ps(scale));
        const __m512 product_f16 = _mm512_cvtph_ps(_mm512_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT));
        const __m512 sum = _mm512_add_ps(product_f16, _mm512_set1_ps(bias));
        _mm256_storeu_si256((__m256i *)(void *)(out + i), _mm512_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
#ifdef ISA_F16C
    const __m256 scales = _mm256_set1_ps(scale), biases = _mm256_set1_ps(bias);
    for (; i + 8 <= n; i += 8) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(codes + i));
        const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), scales);
        const __m256 product_f16 = _mm256_cvtph_ps(_mm256_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT));
        const __m128i result = _mm256_cvtps_ph(_mm256_add_ps(product_f16, biases), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(void *)(out + i), result);
    }
#endif
    for (; i < n; ++i)
        out[i] =
            (uint16_t)kvmnn_float_to_half(kvmnn_half_to_float(kvmnn_float_to_half((float)codes[i] * scale)) + bias);
}

/* Numbers of codes below 16, looked up in those of all 16 codes. */
static inline void ISA_FN(lookup_values)(const uint8_t *restrict codes, size_t n, const uint16_t *restrict table,
                                         uint16_t *restrict out) {
    size_t i = 0;
#ifdef ISA_F16C
    const __m128i first = _mm_loadu_si128((const __m128i *)(const void *)table), bytes = _mm_set1_epi16(255);
    const __m128i second = _mm_loadu_si128((const __m128i *)(const void *)(table + 8));
    const __m128i low = _mm_packus_epi16(_mm_and_si128(first, bytes), _mm_and_si128(second, bytes));
    const __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    for (; i + 16 <= n; i += 16) {
        const __m128i indices = _mm_loadu_si128((const __m128i *)(const void *)(codes + i));
        const __m128i lows = _mm_shuffle_epi8(low, indices), highs = _mm_shuffle_epi8(high, indices);
        _mm_storeu_si128((__m128i *)(void *)(out + i), _mm_unpacklo_epi8(lows, highs));
        _mm_storeu_si128((__m128i *)(void *)(out + i + 8), _mm_unpackhi_epi8(lows, highs));
    }
#endif
    for (; i < n; ++i) out[i] = table[codes[i]];
}

/* As those above; of many codes of few bits the 16 numbers that there can be are made first. */
#define ISA_DEFINE_RUN(name, dequantize_run)                                                                \
    static inline void ISA_FN(name)(const uint8_t *codes, size_t n, float scale, float bias, int use_table, \
                                    uint16_t *out) {                                                        \
        if (use_table && n >= 32) {                                                                         \
            uint16_t table[16];                                                                             \
            dequantize_run(kvmnn_all_codes, 16, scale, bias, table);                                        \
            ISA_FN(lookup_values)(codes, n, table, out);                                                    \
        } else                                                                                              \
            dequantize_run(codes, n, scale, bias, out);                                                     \
    }
ISA_DEFINE_RUN(run_f16, ISA_FN(dequantize_f16))
ISA_DEFINE_RUN(run_bf16, ISA_FN(dequantize_bf16))
#undef ISA_DEFINE_RUN

static inline void ISA_FN(run_f32)(const uint8_t *codes, size_t n, float scale, float bias, int use_table, float *out) {
    (void)use_table;
    ISA_FN(dequantize_f32)(codes, n, scale, bias, out);
}

#ifdef ISA_F16C
#define ISA_HALF_TO_FLOAT(word) _cvtsh_ss(word)
#else
#define ISA_HALF_TO_FLOAT(word) kvmnn_half_to_float(word)
#endif

/* All codes of all rows in pieces, and these in runs of one group; `dequantize_run` makes the numbers of a run at
 * `out`. */
#define ISA_DEFINE_GROUPS(name, word, float_of, dequantize_run)                                   \
    static void ISA_FN(name)(const kvmnn_group_rows *groups) {                                    \
        const size_t size = groups->values / groups->groups;                                      \
        const int use_table = groups->bits <= 4;                                                  \
        const uint8_t *src = groups->codes, *scales = groups->scales, *biases = groups->biases;   \
        word *out = (word *)(void *)groups->out;                                                  \
        float scale = 0, bias = 0;                                                                \
        uint8_t scratch[KVMNN_BATCH_CODES];                                                       \
        for (size_t remaining = groups->rows * groups->values, group_remaining = 0; remaining;) { \
            size_t count = remaining < KVMNN_BATCH_CODES ? remaining : KVMNN_BATCH_CODES;         \
            const uint8_t *codes = ISA_FN(get_codes)(src, count, groups->bits, scratch);          \
            src += count * (size_t)groups->bits / 8;                                              \
            for (remaining -= count; count;) {                                                    \
                if (!group_remaining) {                                                           \
                    word words[2];                                                                \
                    memcpy(words, scales, sizeof(word));                                          \
                    memcpy(words + 1, biases, sizeof(word));                                      \
                    scale = float_of(words[0]), bias = float_of(words[1]);                        \
                    scales += sizeof(word), biases += sizeof(word), group_remaining = size;       \
                }                                                                                 \
                const size_t n = group_remaining < count ? group_remaining : count;               \
                dequantize_run(codes, n, scale, bias, use_table, out);                            \
                codes += n, out += n, count -= n, group_remaining -= n;                           \
            }                                                                                     \
        }                                                                                         \
    }

#define ISA_IDENTITY(word) (word)
#define ISA_BF16_TO_FLOAT(word) kvmnn_bits_to_float((uint32_t)(word) << 16)
ISA_DEFINE_GROUPS(f16, uint16_t, ISA_HALF_TO_FLOAT, ISA_FN(run_f16))
ISA_DEFINE_GROUPS(bf16, uint16_t, ISA_BF16_TO_FLOAT, ISA_FN(run_bf16))
ISA_DEFINE_GROUPS(f32, float, ISA_IDENTITY, ISA_FN(run_f32))
#undef ISA_HALF_TO_FLOAT
#undef ISA_IDENTITY
#undef ISA_BF16_TO_FLOAT
#undef ISA_DEFINE_GROUPS

static const kvmnn_group_kernels ISA_FN(table) = {ISA_NAME, {ISA_FN(f16), ISA_FN(bf16), ISA_FN(f32)}};
