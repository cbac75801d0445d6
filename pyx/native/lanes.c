#include "lanes.h"

#include <string.h>

#if defined(_MSC_VER)
#define restrict __restrict
#endif

static uint64_t kvmnn_load_le64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    return x;
}

static void kvmnn_store_le64(uint8_t *p, uint64_t x) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    x = __builtin_bswap64(x);
#endif
    memcpy(p, &x, 8);
}

/* Index of the lowest byte of a little-endian word that is not 0; x is not 0. */
static size_t kvmnn_first_byte(uint64_t x) {
#if defined(__GNUC__)
    return (size_t)__builtin_ctzll(x) / 8;
#else
    size_t i = 0;
    while ((x & 0xff) == 0) {
        x >>= 8;
        ++i;
    }
    return i;
#endif
}

#define KVMNN_STRING_(x) #x
#define KVMNN_STRING(x) KVMNN_STRING_(x)

#define LEVEL_NAME baseline
#define LEVEL(name) baseline_##name
#include "lanes_impl.h"
#undef LEVEL
#undef LEVEL_NAME

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define KVMNN_HAS_AVX2 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2")
#endif
#define LEVEL_NAME avx2
#define LEVEL(name) avx2_##name
#include "lanes_impl.h"
#undef LEVEL
#undef LEVEL_NAME
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#ifdef KVMNN_HAS_AVX2
static int kvmnn_cpu_runs_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
#endif

const kvmnn_lanes *kvmnn_lanes_for(const char *level) {
    if (strcmp(level, "baseline") == 0) return &baseline_table;
#ifdef KVMNN_HAS_AVX2
    if (strcmp(level, "avx2") == 0 && kvmnn_cpu_runs_avx2()) return &avx2_table;
#endif
    return NULL;
}

const kvmnn_lanes *kvmnn_lanes_best(void) {
    const kvmnn_lanes *best = kvmnn_lanes_for("avx2");
    return best != NULL ? best : &baseline_table;
}
