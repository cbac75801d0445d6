/* The kernels of transform.h, compiled once per SIMD level (../simd.h). */

#include <string.h>

/* -- sums of products ---------------------------------------------------------------------------------------------- */

/* No compiler makes the broadcast of a pair and the multiplication of pairs of 16 bits of plain C. */
#if defined(__GNUC__)
#define ISA_INLINE inline __attribute__((always_inline))
#else
#define ISA_INLINE inline
#endif

#if defined(ISA_AVX512)

/* `count` rows, at most 8, by `blocks` times 16 columns, at most 2: all sums stay in registers. */
static ISA_INLINE void ISA_FN(multiply_tile)(const int16_t *in, size_t in_stride, size_t count, size_t depth,
                                             const int16_t *packed, size_t blocks, int32_t *out, size_t out_stride) {
    __m512i sums[8][2];
    for (size_t t = 0; t < count; ++t) sums[t][0] = sums[t][1] = _mm512_setzero_si512();
    for (size_t k = 0; k < depth; k += 2, packed += 2 * TRANSFORM_LANES) {
        const __m512i first = _mm512_loadu_si512(packed);
        const __m512i second = blocks == 2 ? _mm512_loadu_si512(packed + depth * TRANSFORM_LANES) : first;
        for (size_t t = 0; t < count; ++t) {
            int32_t pair;
            memcpy(&pair, in + t * in_stride + k, sizeof pair);
            const __m512i pairs = _mm512_set1_epi32(pair);
            sums[t][0] = _mm512_dpwssd_epi32(sums[t][0], pairs, first);
            if (blocks == 2) sums[t][1] = _mm512_dpwssd_epi32(sums[t][1], pairs, second);
        }
    }
    for (size_t t = 0; t < count; ++t)
        for (size_t b = 0; b < blocks; ++b)
            _mm512_storeu_si512(out + t * out_stride + b * TRANSFORM_LANES, sums[t][b]);
}

static void ISA_FN(multiply)(const int16_t *in, size_t in_stride, size_t rows, size_t depth, const int16_t *packed,
                             size_t columns, int32_t *out, size_t out_stride) {
    for (size_t j = 0; j < columns;) {
        const size_t blocks = columns - j >= 2 * TRANSFORM_LANES ? 2 : 1;
        size_t t = 0;
        if (blocks == 2) {
            for (; t + 8 <= rows; t += 8)
                ISA_FN(multiply_tile)(in + t * in_stride, in_stride, 8, depth, packed, 2, out + t * out_stride + j,
                                      out_stride);
            for (; t < rows; ++t)
                ISA_FN(multiply_tile)(in + t * in_stride, in_stride, 1, depth, packed, 2, out + t * out_stride + j,
                                      out_stride);
        } else {
            for (; t + 8 <= rows; t += 8)
                ISA_FN(multiply_tile)(in + t * in_stride, in_stride, 8, depth, packed, 1, out + t * out_stride + j,
                                      out_stride);
            for (; t < rows; ++t)
                ISA_FN(multiply_tile)(in + t * in_stride, in_stride, 1, depth, packed, 1, out + t * out_stride + j,
                                      out_stride);
        }
        j += blocks * TRANSFORM_LANES;
        packed += blocks * depth * TRANSFORM_LANES;
    }
}

#elif defined(ISA_F16C)

/* `count` rows, at most 6, by 16 columns: all sums stay in registers. */
static ISA_INLINE void ISA_FN(multiply_tile)(const int16_t *in, size_t in_stride, size_t count, size_t depth,
                                             const int16_t *packed, int32_t *out, size_t out_stride) {
    __m256i sums[6][2];
    for (size_t t = 0; t < count; ++t) sums[t][0] = sums[t][1] = _mm256_setzero_si256();
    for (size_t k = 0; k < depth; k += 2, packed += 2 * TRANSFORM_LANES) {
        __m256i first = _mm256_loadu_si256((const __m256i *)(const void *)packed);
        __m256i second = _mm256_loadu_si256((const __m256i *)(const void *)(packed + TRANSFORM_LANES));
        for (size_t t = 0; t < count; ++t) {
            int32_t pair;
            memcpy(&pair, in + t * in_stride + k, sizeof pair);
            __m256i pairs = _mm256_set1_epi32(pair);
            sums[t][0] = _mm256_add_epi32(sums[t][0], _mm256_madd_epi16(pairs, first));
            sums[t][1] = _mm256_add_epi32(sums[t][1], _mm256_madd_epi16(pairs, second));
        }
    }
    for (size_t t = 0; t < count; ++t) {
        _mm256_storeu_si256((__m256i *)(void *)(out + t * out_stride), sums[t][0]);
        _mm256_storeu_si256((__m256i *)(void *)(out + t * out_stride + 8), sums[t][1]);
    }
}

static void ISA_FN(multiply)(const int16_t *in, size_t in_stride, size_t rows, size_t depth, const int16_t *packed,
                             size_t columns, int32_t *out, size_t out_stride) {
    for (size_t j = 0; j < columns; j += TRANSFORM_LANES, packed += depth * TRANSFORM_LANES) {
        size_t t = 0;
        for (; t + 6 <= rows; t += 6)
            ISA_FN(multiply_tile)(in + t * in_stride, in_stride, 6, depth, packed, out + t * out_stride + j, out_stride);
        for (; t < rows; ++t)
            ISA_FN(multiply_tile)(in + t * in_stride, in_stride, 1, depth, packed, out + t * out_stride + j, out_stride);
    }
}

#else

static void ISA_FN(multiply)(const int16_t *in, size_t in_stride, size_t rows, size_t depth, const int16_t *packed,
                             size_t columns, int32_t *out, size_t out_stride) {
    for (size_t j = 0; j < columns; j += TRANSFORM_LANES, packed += depth * TRANSFORM_LANES) {
        for (size_t t = 0; t < rows; ++t) {
            const int16_t *row = in + t * in_stride, *pairs = packed;
            uint32_t sums[TRANSFORM_LANES] = {0};
            for (size_t k = 0; k < depth; k += 2, pairs += 2 * TRANSFORM_LANES) {
                int32_t a = row[k], b = row[k + 1];
                for (size_t i = 0; i < TRANSFORM_LANES; ++i)
                    sums[i] += (uint32_t)(a * pairs[2 * i]) + (uint32_t)(b * pairs[2 * i + 1]);
            }
            memcpy(out + t * out_stride + j, sums, sizeof sums);
        }
    }
}

#endif
#undef ISA_INLINE

/* -- words --------------------------------------------------------------------------------------------------------- */

static inline float ISA_FN(bits_to_float)(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t ISA_FN(float_to_bits)(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static void ISA_FN(load_words)(const uint8_t *source, int dtype, size_t n, float *restrict row) {
    if (dtype == TRANSFORM_FP16) {
        const uint16_t *words = (const uint16_t *)(const void *)source;
        for (size_t i = 0; i < n; ++i) {
            uint32_t w = words[i], normal = (w & 0x7c00) - 0x400 < 0x7800 ? 0xffffffffu : 0;
            row[i] = ISA_FN(bits_to_float)(((w & 0x8000) << 16 | (((w & 0x7fff) << 13) + 0x38000000)) & normal);
        }
    } else {
        for (size_t i = 0; i < n; ++i) {
            uint32_t bits = dtype == TRANSFORM_BF16 ? (uint32_t)((const uint16_t *)(const void *)source)[i] << 16
                                                    : ((const uint32_t *)(const void *)source)[i];
            uint32_t normal = (bits & 0x7f800000) - (64u << 23) < (128u << 23) ? 0xffffffffu : 0;
            row[i] = ISA_FN(bits_to_float)(bits & normal);
        }
    }
}

static void ISA_FN(store_words)(const float *row, int dtype, size_t n, uint8_t *restrict target) {
    if (dtype == TRANSFORM_FP16) {
        uint16_t *words = (uint16_t *)(void *)target;
        for (size_t i = 0; i < n; ++i) {
            uint32_t bits = ISA_FN(float_to_bits)(row[i]);
            int32_t y = (int32_t)(((bits & 0x7fffffff) + 0x1000) >> 13) - (112 << 10);
            y = y < 1024 ? 0 : y;
            y = y > 31743 ? 31743 : y;
            words[i] = (uint16_t)((bits >> 16 & 0x8000) | (uint32_t)y);
        }
    } else if (dtype == TRANSFORM_BF16) {
        uint16_t *words = (uint16_t *)(void *)target;
        for (size_t i = 0; i < n; ++i) words[i] = (uint16_t)((ISA_FN(float_to_bits)(row[i]) + 0x8000) >> 16);
    } else {
        memcpy(target, row, n * sizeof *row);
    }
}

/* -- rotation ------------------------------------------------------------------------------------------------------ */

static void ISA_FN(compute_angles)(const transform_rope *rope, int64_t position, float *restrict cosines,
                                   float *restrict sines) {
    for (size_t i = 0; i < rope->dims / 2; ++i) {
        uint64_t angle = (uint64_t)position * rope->frequencies[i];
        uint32_t b = ((uint32_t)(angle >> 39) + (1u << 22)) & ((1u << 25) - 1), quarter = b >> 23;
        float x = (float)((int32_t)(b & ((1u << 23) - 1)) - (1 << 22)) * 0x1p-23f, z = x * x;
        float s0 = ISA_FN(bits_to_float)(0x3fc90fdb), s1 = ISA_FN(bits_to_float)(0xbf255de7);
        float s2 = ISA_FN(bits_to_float)(0x3da335e3), s3 = ISA_FN(bits_to_float)(0xbb996966);
        float c1 = ISA_FN(bits_to_float)(0xbf9de9e6), c2 = ISA_FN(bits_to_float)(0x3e81e0f8);
        float c3 = ISA_FN(bits_to_float)(0xbcaae9e4), c4 = ISA_FN(bits_to_float)(0x3a70fa83);
        float sine = x * (s0 + z * (s1 + z * (s2 + z * s3)));
        float cosine = 1.0f + z * (c1 + z * (c2 + z * (c3 + z * c4)));
        uint32_t s = ISA_FN(float_to_bits)(sine), c = ISA_FN(float_to_bits)(cosine);
        uint32_t exchange = quarter & 1 ? s ^ c : 0;
        cosines[i] = ISA_FN(bits_to_float)((c ^ exchange) ^ ((quarter + 1) & 2) << 30);
        sines[i] = ISA_FN(bits_to_float)((s ^ exchange) ^ (quarter & 2) << 30);
    }
}

static void ISA_FN(rotate_head)(float *restrict head, const transform_rope *rope, const float *cosines,
                                const float *sines) {
    size_t pairs = rope->dims / 2, step = rope->interleaved ? 2 : 1;
    float *a = head, *b = head + (rope->interleaved ? 1 : pairs);
    if (step == 1) {
        for (size_t i = 0; i < pairs; ++i) {
            float x = a[i], y = b[i], xc = x * cosines[i], ys = y * sines[i], yc = y * cosines[i], xs = x * sines[i];
            a[i] = xc - ys;
            b[i] = yc + xs;
        }
    } else {
        for (size_t i = 0; i < pairs; ++i) {
            float x = a[2 * i], y = b[2 * i], xc = x * cosines[i], ys = y * sines[i];
            float yc = y * cosines[i], xs = x * sines[i];
            a[2 * i] = xc - ys;
            b[2 * i] = yc + xs;
        }
    }
}

static void ISA_FN(load_row)(const uint8_t *source, int dtype, size_t heads, size_t dim, size_t head_stride,
                             const transform_rope *rope, const float *cosines, const float *sines, float *row) {
    const size_t word_bytes = dtype == TRANSFORM_FP32 ? 4 : 2;
    for (size_t h = 0; h < heads; ++h, row += dim) {
        ISA_FN(load_words)(source + h * head_stride * word_bytes, dtype, dim, row);
        if (rope->dims) ISA_FN(rotate_head)(row, rope, cosines, sines);
    }
}

static void ISA_FN(store_row)(float *row, int dtype, size_t heads, size_t dim, size_t head_stride,
                              const transform_rope *rope, const float *cosines, const float *sines, uint8_t *target) {
    const size_t word_bytes = dtype == TRANSFORM_FP32 ? 4 : 2;
    for (size_t h = 0; h < heads; ++h, row += dim) {
        if (rope->dims) ISA_FN(rotate_head)(row, rope, cosines, sines);
        ISA_FN(store_words)(row, dtype, dim, target + h * head_stride * word_bytes);
    }
}

/* -- rows ---------------------------------------------------------------------------------------------------------- */

static void ISA_FN(normalize)(const float *row, const float *mean, const float *reciprocal, size_t n,
                              int16_t *restrict z) {
    const float magic = 12582912.0f; /* 1.5 x 2^23: what is added to it is rounded to an integer */
    for (size_t i = 0; i < n; ++i) {
        float x = (row[i] - mean[i]) * reciprocal[i];
        x = x < 32767.0f ? x : 32767.0f;
        x = x > -32768.0f ? x : -32768.0f;
        float shifted = x + magic;
        z[i] = (int16_t)(ISA_FN(float_to_bits)(shifted) - 0x4b400000u);
    }
}

static void ISA_FN(combine)(const float *mean, const int32_t *prediction, const float *gain, const int32_t *sums,
                            float step, size_t n, float *restrict row) {
    if (prediction == NULL) {
        for (size_t i = 0; i < n; ++i) row[i] = mean[i] + (float)sums[i] * step;
    } else {
        for (size_t i = 0; i < n; ++i) {
            float predicted = (float)prediction[i] * gain[i], residual = (float)sums[i] * step;
            row[i] = mean[i] + (predicted + residual);
        }
    }
}

static void ISA_FN(compare)(const uint8_t *words, const uint8_t *others, int dtype, size_t n, double *power,
                            double *error_power, float *largest) {
    enum { STEP = 512, LANES = 16 };
    const size_t word_bytes = dtype == TRANSFORM_FP32 ? 4 : 2;
    uint32_t maxima[LANES] = {0};
    for (size_t begin = 0; begin < n; begin += STEP) {
        float a[STEP], b[STEP];
        double squares[LANES] = {0}, error_squares[LANES] = {0}; /* squares of fp32 are beyond it */
        size_t count = n - begin < STEP ? n - begin : STEP;
        ISA_FN(load_words)(words + begin * word_bytes, dtype, count, a);
        ISA_FN(load_words)(others + begin * word_bytes, dtype, count, b);
        for (size_t i = count; i < STEP; ++i) a[i] = b[i] = 0;
        for (size_t i = 0; i < STEP; i += LANES)
            for (size_t j = 0; j < LANES; ++j) {
                float x = a[i + j], error = x - b[i + j];
                uint32_t size = ISA_FN(float_to_bits)(error) & 0x7fffffff;
                squares[j] += (double)x * x;
                error_squares[j] += (double)error * error;
                maxima[j] = size > maxima[j] ? size : maxima[j];
            }
        for (size_t j = 0; j < LANES; ++j) *power += squares[j], *error_power += error_squares[j];
    }
    for (size_t j = 0; j < LANES; ++j) {
        float size = ISA_FN(bits_to_float)(maxima[j]);
        *largest = size > *largest ? size : *largest;
    }
}

static const transform_kernels ISA_FN(table) = {
    ISA_NAME,
    ISA_FN(multiply),
    ISA_FN(load_row),
    ISA_FN(store_row),
    ISA_FN(compute_angles),
    ISA_FN(normalize),
    ISA_FN(combine),
    ISA_FN(compare),
};
