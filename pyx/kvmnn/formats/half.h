/* fp16 and float32, in plain C without a branch, so that compilers make vectors of loops over them. */
#ifndef KVMNN_HALF_H
#define KVMNN_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t kvmnn_float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float kvmnn_bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The float32 that an fp16 is. */
static inline float kvmnn_half_to_float(uint32_t word) {
    const uint32_t magnitude = word & 0x7fff;
    const uint32_t normal = (magnitude << 13) + ((magnitude >= 0x7c00 ? 224u : 112u) << 23);
    const uint32_t subnormal = kvmnn_float_bits((float)(int32_t)magnitude * 0x1p-24f);
    return kvmnn_bits_to_float((magnitude >= 0x0400 ? normal : subnormal) | (word & 0x8000) << 16);
}

/* The fp16 that is nearest to a float32, ties to even; NaN is NaN. */
static inline uint32_t kvmnn_float_to_half(float value) {
    const uint32_t bits = kvmnn_float_bits(value), magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude + 0x0fff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    /* Added to a half, a float32 has its last bit where a subnormal fp16 has it. */
    const uint32_t subnormal =
        kvmnn_float_bits(kvmnn_bits_to_float(magnitude < 0x38800000 ? magnitude : 0) + 0.5f) - 0x3f000000;
    uint32_t word = magnitude >= 0x38800000 ? normal : subnormal;
    word = word >= 0x7c00 || magnitude >= 0x47800000 ? 0x7c00 : word;
    word = magnitude > 0x7f800000 ? 0x7e00 : word;
    return word | (bits >> 16 & 0x8000);
}

#endif
