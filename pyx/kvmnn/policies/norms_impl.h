/* The kernels of norms.h, included once per SIMD level: ISA_FN(name) gives each function its own name, ISA_VECTOR_FLOATS
 * is how many floats a vector of the level has. */

enum { ISA_FN(NUM_VECTORS) = 16 / ISA_VECTOR_FLOATS };

typedef struct {
    kvmnn_floats(ISA_VECTOR_FLOATS) part[16 / ISA_VECTOR_FLOATS];
} ISA_FN(floats16);

static inline void ISA_FN(add_squares)(ISA_FN(floats16) * sums, const ISA_FN(floats16) * x) {
    for (int i = 0; i < ISA_FN(NUM_VECTORS); ++i) sums->part[i] += x->part[i] * x->part[i];
}

static inline ISA_FN(floats16) ISA_FN(load_fp32)(const uint8_t *p) {
    ISA_FN(floats16) x;
    for (int i = 0; i < ISA_FN(NUM_VECTORS); ++i) {
        kvmnn_floats(ISA_VECTOR_FLOATS) part;
        memcpy(&part, p + 4 * ISA_VECTOR_FLOATS * i, sizeof part);
        x.part[i] = part;
    }
    return x;
}

static inline ISA_FN(floats16) ISA_FN(load_bf16)(const uint8_t *p) {
    ISA_FN(floats16) x;
    for (int i = 0; i < ISA_FN(NUM_VECTORS); ++i) {
        kvmnn_words(ISA_VECTOR_FLOATS) words;
        memcpy(&words, p + 2 * ISA_VECTOR_FLOATS * i, sizeof words);
        x.part[i] =
            (kvmnn_floats(ISA_VECTOR_FLOATS))(__builtin_convertvector(words, kvmnn_bits(ISA_VECTOR_FLOATS)) << 16);
    }
    return x;
}

#ifdef ISA_F16C
static inline ISA_FN(floats16) ISA_FN(load_fp16)(const uint8_t *p) {
    ISA_FN(floats16) x;
    for (int i = 0; i < ISA_FN(NUM_VECTORS); ++i)
        x.part[i] = (kvmnn_floats(8))_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i)));
    return x;
}
#else
/* Magnitudes only: signs do not survive squaring. Exponent and fraction move to their places in a float whose exponent
 * bias is larger by 112; the exponents 0 (subnormal: an implied 0 instead of 1 before the point) and 31 (infinity, NaN)
 * are put right by what is added and subtracted. */
static inline ISA_FN(floats16) ISA_FN(load_fp16)(const uint8_t *p) {
    ISA_FN(floats16) x;
    for (int i = 0; i < ISA_FN(NUM_VECTORS); ++i) {
        kvmnn_words(ISA_VECTOR_FLOATS) words;
        memcpy(&words, p + 2 * ISA_VECTOR_FLOATS * i, sizeof words);
        kvmnn_ints(ISA_VECTOR_FLOATS) bits = __builtin_convertvector(words, kvmnn_ints(ISA_VECTOR_FLOATS));
        bits = (bits & 0x7fff) << 13;
        kvmnn_ints(ISA_VECTOR_FLOATS) subnormal = bits < (1 << 23), special = bits >= (31 << 23);
        bits += (112 << 23) + (subnormal & (1 << 23)) + (special & (112 << 23));
        x.part[i] = (kvmnn_floats(ISA_VECTOR_FLOATS))bits - (kvmnn_floats(ISA_VECTOR_FLOATS))(subnormal & (113 << 23));
    }
    return x;
}

/* The same for normal numbers, which is nearly all there are; *abnormal becomes non-zero where there is another. */
static inline ISA_FN(floats16) ISA_FN(load_normal_fp16)(const uint8_t *p, kvmnn_words8 *abnormal) {
    ISA_FN(floats16) x;
    const kvmnn_words8 zero = {0};
    for (int i = 0; i < 2; ++i) {
        kvmnn_words8 words;
        memcpy(&words, p + 16 * i, sizeof words);
        words &= 0x7fff;
        *abnormal |= (kvmnn_words8)((kvmnn_shorts8)(words + 0x7c00) >= -0x800); /* below 0x400 or from 0x7c00 on */
        kvmnn_ints4 low = (kvmnn_ints4)__builtin_shufflevector(words, zero, KVMNN_WIDEN(0));
        kvmnn_ints4 high = (kvmnn_ints4)__builtin_shufflevector(words, zero, KVMNN_WIDEN(4));
        x.part[2 * i] = (kvmnn_floats4)((low << 13) + (112 << 23));
        x.part[2 * i + 1] = (kvmnn_floats4)((high << 13) + (112 << 23));
    }
    return x;
}
#endif

static inline float ISA_FN(reduce_and_root)(const ISA_FN(floats16) * sums) {
    float s[16];
    memcpy(s, sums, sizeof s);
    for (int width = 8; width > 0; width /= 2)
        for (int k = 0; k < width; ++k) s[k] += s[k + width];
    return sqrtf(s[0]);
}

/* The sums of one row. What is left after the last sixteen words is filled up with zeros, which
 * change no sum. */
#define KVMNN_DEFINE_NORMS(type, bytes)                                                                      \
    static inline void ISA_FN(sum_##type)(const uint8_t *row, size_t dims, ISA_FN(floats16) * sums) {        \
        ISA_FN(floats16) x;                                                                                  \
        size_t num_full = dims / 16 * 16, tail_bytes = (dims - num_full) * (bytes);                          \
        for (size_t j = 0; j < num_full; j += 16) {                                                          \
            x = ISA_FN(load_##type)(row + j * (bytes));                                                      \
            ISA_FN(add_squares)(sums, &x);                                                                   \
        }                                                                                                    \
        if (tail_bytes) {                                                                                    \
            uint8_t tail[16 * (bytes)] = {0};                                                                \
            memcpy(tail, row + num_full * (bytes), tail_bytes);                                              \
            x = ISA_FN(load_##type)(tail);                                                                   \
            ISA_FN(add_squares)(sums, &x);                                                                   \
        }                                                                                                    \
    }                                                                                                        \
    static void ISA_FN(type)(const uint8_t *rows, ptrdiff_t stride, size_t count, size_t dims, float *out) { \
        for (size_t i = 0; i < count; ++i, rows += stride) {                                                 \
            ISA_FN(floats16) sums = {{{0}}};                                                                 \
            KVMNN_ROW_FAST_PATH(type)                                                                        \
            ISA_FN(sum_##type)(rows, dims, &sums);                                                           \
            out[i] = ISA_FN(reduce_and_root)(&sums);                                                         \
        }                                                                                                    \
    }

#define KVMNN_ROW_FAST_PATH(type)
KVMNN_DEFINE_NORMS(bf16, 2)
KVMNN_DEFINE_NORMS(fp32, 4)

#ifndef ISA_F16C
/* The norm of a row of normal numbers, or a negative number for any other row. */
static inline float ISA_FN(normal_norm)(const uint8_t *row, size_t dims) {
    kvmnn_words8 abnormal = {0};
    ISA_FN(floats16) sums = {{{0}}};
    if (dims % 16) return -1;
    for (size_t j = 0; j < dims; j += 16) {
        ISA_FN(floats16) x = ISA_FN(load_normal_fp16)(row + 2 * j, &abnormal);
        ISA_FN(add_squares)(&sums, &x);
    }
    kvmnn_u64x2 abnormal_bits = (kvmnn_u64x2)abnormal;
    return (abnormal_bits[0] | abnormal_bits[1]) == 0 ? ISA_FN(reduce_and_root)(&sums) : -1;
}

#undef KVMNN_ROW_FAST_PATH
#define KVMNN_ROW_FAST_PATH(type)             \
    out[i] = ISA_FN(normal_norm)(rows, dims); \
    if (out[i] >= 0) continue;
#endif
KVMNN_DEFINE_NORMS(fp16, 2)
#undef KVMNN_ROW_FAST_PATH
#undef KVMNN_DEFINE_NORMS

/* The bits of a float, less the sign of a zero, in the order of the values; complemented for the highest first. */
static void ISA_FN(rank)(const float *restrict values, size_t n, int highest, uint32_t *restrict ranks) {
    uint32_t flip_mask = highest ? 0xffffffffu : 0;
    for (size_t i = 0; i < n; ++i) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        uint32_t magnitude = bits & 0x7fffffffu, sign = magnitude ? bits >> 31 : 0;
        uint32_t rank = ((sign ? ~magnitude & 0x7fffffffu : magnitude | 0x80000000u)) ^ flip_mask;
        ranks[i] = magnitude > 0x7f800000u ? 0xffffffffu : rank;
    }
}

static const kvmnn_norm_kernels ISA_FN(table) = {
    ISA_NAME, ISA_FN(fp16), ISA_FN(bf16), ISA_FN(fp32), ISA_FN(rank),
};
