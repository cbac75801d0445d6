/* The loops of norms.h, included once per SIMD level: LEVEL(name) gives each function its own name, LEVEL_FLOATS is how
 * many floats a vector of the level has. */

enum { LEVEL(PARTS) = 16 / LEVEL_FLOATS };

typedef struct {
    kvmnn_floats(LEVEL_FLOATS) part[16 / LEVEL_FLOATS];
} LEVEL(sixteen);

static inline void LEVEL(add_squares)(LEVEL(sixteen) * sums, const LEVEL(sixteen) * x) {
    for (int i = 0; i < LEVEL(PARTS); ++i) sums->part[i] += x->part[i] * x->part[i];
}

static inline LEVEL(sixteen) LEVEL(load_fp32)(const uint8_t *p) {
    LEVEL(sixteen) x;
    for (int i = 0; i < LEVEL(PARTS); ++i) {
        kvmnn_floats(LEVEL_FLOATS) part;
        memcpy(&part, p + 4 * LEVEL_FLOATS * i, sizeof part);
        x.part[i] = part;
    }
    return x;
}

static inline LEVEL(sixteen) LEVEL(load_bf16)(const uint8_t *p) {
    LEVEL(sixteen) x;
    for (int i = 0; i < LEVEL(PARTS); ++i) {
        kvmnn_words(LEVEL_FLOATS) words;
        memcpy(&words, p + 2 * LEVEL_FLOATS * i, sizeof words);
        x.part[i] = (kvmnn_floats(LEVEL_FLOATS))(__builtin_convertvector(words, kvmnn_bits(LEVEL_FLOATS)) << 16);
    }
    return x;
}

#ifdef LEVEL_F16C
static inline LEVEL(sixteen) LEVEL(load_fp16)(const uint8_t *p) {
    LEVEL(sixteen) x;
    for (int i = 0; i < LEVEL(PARTS); ++i)
        x.part[i] = (kvmnn_floats(8))_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i)));
    return x;
}
#else
/* Magnitudes only: signs do not survive squaring. Exponent and fraction move to their places in a float whose exponent
 * bias is larger by 112; the exponents 0 (subnormal: an implied 0 instead of 1 before the point) and 31 (infinity, NaN)
 * are put right by what is added and subtracted. */
static inline LEVEL(sixteen) LEVEL(load_fp16)(const uint8_t *p) {
    LEVEL(sixteen) x;
    for (int i = 0; i < LEVEL(PARTS); ++i) {
        kvmnn_words(LEVEL_FLOATS) words;
        memcpy(&words, p + 2 * LEVEL_FLOATS * i, sizeof words);
        kvmnn_ints(LEVEL_FLOATS) bits = __builtin_convertvector(words, kvmnn_ints(LEVEL_FLOATS));
        bits = (bits & 0x7fff) << 13;
        kvmnn_ints(LEVEL_FLOATS) subnormal = bits < (1 << 23), special = bits >= (31 << 23);
        bits += (112 << 23) + (subnormal & (1 << 23)) + (special & (112 << 23));
        x.part[i] = (kvmnn_floats(LEVEL_FLOATS))bits - (kvmnn_floats(LEVEL_FLOATS))(subnormal & (113 << 23));
    }
    return x;
}

/* The same for normal numbers, which is nearly all there are; *others becomes non-zero where there is another. */
static inline LEVEL(sixteen) LEVEL(load_normal_fp16)(const uint8_t *p, kvmnn_words8 *others) {
    LEVEL(sixteen) x;
    const kvmnn_words8 zero = {0};
    for (int i = 0; i < 2; ++i) {
        kvmnn_words8 words;
        memcpy(&words, p + 16 * i, sizeof words);
        words &= 0x7fff;
        *others |= (kvmnn_words8)((kvmnn_shorts8)(words + 0x7c00) >= -0x800); /* below 0x400 or from 0x7c00 on */
        kvmnn_ints4 low = (kvmnn_ints4)__builtin_shufflevector(words, zero, KVMNN_WIDEN(0));
        kvmnn_ints4 high = (kvmnn_ints4)__builtin_shufflevector(words, zero, KVMNN_WIDEN(4));
        x.part[2 * i] = (kvmnn_floats4)((low << 13) + (112 << 23));
        x.part[2 * i + 1] = (kvmnn_floats4)((high << 13) + (112 << 23));
    }
    return x;
}
#endif

static inline float LEVEL(root)(const LEVEL(sixteen) * sums) {
    float s[16];
    memcpy(s, sums, sizeof s);
    for (int width = 8; width > 0; width /= 2)
        for (int k = 0; k < width; ++k) s[k] += s[k + width];
    return sqrtf(s[0]);
}

/* The sums of one row. What is left after the last sixteen words is filled up with zeros, which
 * change no sum. */
#define KVMNN_NORMS(type, bytes)                                                                                      \
    static inline void LEVEL(sum_##type)(const uint8_t *row, size_t dims, LEVEL(sixteen) * sums) {                    \
        LEVEL(sixteen) x;                                                                                             \
        size_t whole = dims / 16 * 16, rest = (dims - whole) * (bytes);                                               \
        for (size_t j = 0; j < whole; j += 16) {                                                                      \
            x = LEVEL(load_##type)(row + j * (bytes));                                                                \
            LEVEL(add_squares)(sums, &x);                                                                             \
        }                                                                                                             \
        if (rest) {                                                                                                   \
            uint8_t last[16 * (bytes)] = {0};                                                                         \
            memcpy(last, row + whole * (bytes), rest);                                                                \
            x = LEVEL(load_##type)(last);                                                                             \
            LEVEL(add_squares)(sums, &x);                                                                             \
        }                                                                                                             \
    }                                                                                                                 \
    static void LEVEL(type)(const uint8_t *rows, ptrdiff_t stride, size_t count, size_t dims, float *out) {           \
        for (size_t i = 0; i < count; ++i, rows += stride) {                                                          \
            LEVEL(sixteen) sums = {{{0}}};                                                                            \
            KVMNN_WHOLE_ROW(type)                                                                                     \
            LEVEL(sum_##type)(rows, dims, &sums);                                                                     \
            out[i] = LEVEL(root)(&sums);                                                                              \
        }                                                                                                             \
    }

#define KVMNN_WHOLE_ROW(type)
KVMNN_NORMS(bf16, 2)
KVMNN_NORMS(fp32, 4)

#ifndef LEVEL_F16C
/* The norm of a row of normal numbers, or a negative number for any other row. */
static inline float LEVEL(normal_norm)(const uint8_t *row, size_t dims) {
    kvmnn_words8 others = {0};
    LEVEL(sixteen) sums = {{{0}}};
    if (dims % 16) return -1;
    for (size_t j = 0; j < dims; j += 16) {
        LEVEL(sixteen) x = LEVEL(load_normal_fp16)(row + 2 * j, &others);
        LEVEL(add_squares)(&sums, &x);
    }
    kvmnn_twice64 any = (kvmnn_twice64)others;
    return (any[0] | any[1]) == 0 ? LEVEL(root)(&sums) : -1;
}

#undef KVMNN_WHOLE_ROW
#define KVMNN_WHOLE_ROW(type)                                                                                         \
    out[i] = LEVEL(normal_norm)(rows, dims);                                                                          \
    if (out[i] >= 0) continue;
#endif
KVMNN_NORMS(fp16, 2)
#undef KVMNN_WHOLE_ROW
#undef KVMNN_NORMS

/* The bits of a float, less the sign of a zero, in the order of the values; complemented for the highest first. */
static void LEVEL(rank)(const float *restrict values, size_t n, int highest, uint32_t *restrict ranks) {
    uint32_t turn = highest ? 0xffffffffu : 0;
    for (size_t i = 0; i < n; ++i) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        uint32_t magnitude = bits & 0x7fffffffu, sign = magnitude ? bits >> 31 : 0;
        uint32_t rank = ((sign ? ~magnitude & 0x7fffffffu : magnitude | 0x80000000u)) ^ turn;
        ranks[i] = magnitude > 0x7f800000u ? 0xffffffffu : rank;
    }
}

static const kvmnn_norms LEVEL(table) = {
    KVMNN_LEVEL_NAME, LEVEL(fp16), LEVEL(bf16), LEVEL(fp32), LEVEL(rank),
};
