#include "residuals.h"

#include "rans.h"

/* Coefficients of sine and cosine of a quarter turn (docs/format-v2.md); the literals are exact. */
#define S0 0x1.921fb6p+0f
#define S1 -0x1.4abbcep-1f
#define S2 0x1.466bc6p-4f
#define S3 -0x1.32d2ccp-8f
#define C1 -0x1.3bd3ccp+0f
#define C2 0x1.03c1f0p-2f
#define C3 -0x1.55d3c8p-6f
#define C4 0x1.e1f506p-11f

static inline float dense_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t dense_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

#define KVMNN_SIMD_KERNELS "dense/residuals_impl.h"
#define KVMNN_KERNEL_TABLE dense_kernels
#if defined(__x86_64__)
#define KVMNN_USE_AVX512
#endif
#include "../simd.h"

const dense_kernels *kvmnn_dense_kernels_at(int level) { return isa_tables[level]; }
