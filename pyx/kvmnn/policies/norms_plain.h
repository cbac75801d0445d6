/* The kernels of norms.h without vector types, for compilers that have none; the same operations in the same order. */

static float plain_float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static float plain_load_fp32(const uint8_t *p) {
    float x;
    memcpy(&x, p, 4);
    return x;
}

static float plain_load_bf16(const uint8_t *p) {
    uint16_t word;
    memcpy(&word, p, 2);
    return plain_float_from_bits((uint32_t)word << 16);
}

static float plain_load_fp16(const uint8_t *p) {
    uint16_t word;
    memcpy(&word, p, 2);
    uint32_t bits = (uint32_t)(word & 0x7fff) << 13;
    if (bits >= 31u << 23) return plain_float_from_bits(bits + (224u << 23));
    if (bits < 1u << 23) return plain_float_from_bits(bits + (113u << 23)) - plain_float_from_bits(113u << 23);
    return plain_float_from_bits(bits + (112u << 23));
}

#define KVMNN_DEFINE_NORMS(type, bytes)                                                                         \
    static void baseline_##type(const uint8_t *rows, ptrdiff_t stride, size_t count, size_t dims, float *out) { \
        for (size_t i = 0; i < count; ++i, rows += stride) {                                                    \
            float sums[16] = {0};                                                                               \
            for (size_t j = 0; j < dims; ++j) {                                                                 \
                float x = plain_load_##type(rows + j * (bytes)), square = x * x;                                \
                sums[j % 16] += square;                                                                         \
            }                                                                                                   \
            for (int width = 8; width > 0; width /= 2)                                                          \
                for (int k = 0; k < width; ++k) sums[k] += sums[k + width];                                     \
            out[i] = sqrtf(sums[0]);                                                                            \
        }                                                                                                       \
    }

KVMNN_DEFINE_NORMS(fp16, 2)
KVMNN_DEFINE_NORMS(bf16, 2)
KVMNN_DEFINE_NORMS(fp32, 4)
#undef KVMNN_DEFINE_NORMS

static void baseline_rank(const float *values, size_t n, int highest, uint32_t *ranks) {
    for (size_t i = 0; i < n; ++i) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        uint32_t magnitude = bits & 0x7fffffffu, sign = magnitude ? bits >> 31 : 0;
        uint32_t rank = (sign ? ~magnitude & 0x7fffffffu : magnitude | 0x80000000u) ^ (highest ? 0xffffffffu : 0);
        ranks[i] = magnitude > 0x7f800000u ? 0xffffffffu : rank;
    }
}

static const kvmnn_norm_kernels baseline_table = {"baseline", baseline_fp16, baseline_bf16, baseline_fp32,
                                                  baseline_rank};
