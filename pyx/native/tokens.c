#include "tokens.h"

#include <string.h>

#if defined(_MSC_VER)
#define restrict __restrict
#endif

#define KVMNN_STRING_(x) #x
#define KVMNN_STRING(x) KVMNN_STRING_(x)

#define LEVEL_NAME baseline
#define LEVEL(name) baseline_##name
#include "tokens_impl.h"
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
#include "tokens_impl.h"
#undef LEVEL
#undef LEVEL_NAME
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

/* Levels come from lanes.h, which gives no level that the processor does not run. */
const kvmnn_tokens *kvmnn_tokens_for(const char *level) {
#ifdef KVMNN_HAS_AVX2
    if (strcmp(level, "avx2") == 0) return &avx2_table;
#endif
    (void)level;
    return &baseline_table;
}
