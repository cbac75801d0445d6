/* SIMD levels: kernels in plain C, compiled once per level, one table of functions for each; the level is chosen at run
 * time by kvmnn._simd, and every level gives the same bytes.
 *
 * A C file with kernels sets KVMNN_SIMD_KERNELS to a header and KVMNN_KERNEL_TABLE to the type of its table, then
 * includes this file. The header is included once per level, with ISA_FN(name) for the names of its functions, ISA_NAME
 * for a string and ISA_VECTOR_FLOATS for the number of floats in a vector; it must end by defining `static const
 * KVMNN_KERNEL_TABLE ISA_FN(table)`. `isa_tables[level]` is what comes out. A file that gains by AVX-512 sets
 * KVMNN_USE_AVX512 as well; elsewhere that level has the table of AVX2.
 */

/* No intrinsics in leaf loops: compilers vectorise them for SSE2, AVX2 and NEON alike, and the same C compiles and
 * tests itself on aarch64 without Python. The exceptions are loops that no compiler vectorises: half floats (F16C),
 * four states of the entropy coder in one step (dense/entropy_encoder_impl.h), the branchless refill of its decoder
 * (dense/rans.h), byte shuffles that split words into lanes, and nontemporal stores. The plain form of each is that
 * of the baseline and of other processors. AVX-512 (Ice Lake, Zen 4) is there for files that gain by it: dense
 * streams, MLX's groups, the Huffman codes of effort "fast", 64 at a time, and linear and transform streams. */
#ifndef KVMNN_SIMD_H
#define KVMNN_SIMD_H

#include <stddef.h>

#if defined(_MSC_VER)
#define restrict __restrict
#endif

enum { KVMNN_BASELINE, KVMNN_AVX2, KVMNN_AVX512, KVMNN_NUM_ISAS };

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define KVMNN_HAS_AVX2 1
#include <cpuid.h>

/* Whether the processor has F16C: clang before 19 cannot be asked by name. */
static inline int kvmnn_has_f16c(void) {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

/* Whether this build has `level` and this processor runs it. */
static inline int kvmnn_simd_is_supported(int level) {
    if (level == KVMNN_BASELINE) return 1;
#ifdef KVMNN_HAS_AVX2
    if (level == KVMNN_AVX2) {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx2") && kvmnn_has_f16c() && __builtin_cpu_supports("bmi") &&
               __builtin_cpu_supports("bmi2");
    }
    if (level == KVMNN_AVX512) {
        return kvmnn_simd_is_supported(KVMNN_AVX2) && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
               __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512ifma") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
    }
#endif
    return 0;
}

#endif

#ifdef KVMNN_SIMD_KERNELS

#define ISA_VECTOR_FLOATS 4
#define ISA_FN(name) baseline_##name
#define ISA_NAME "baseline"
#include KVMNN_SIMD_KERNELS
#undef ISA_NAME
#undef ISA_FN
#undef ISA_VECTOR_FLOATS

#ifdef KVMNN_HAS_AVX2
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi,bmi2")
#endif
#define ISA_VECTOR_FLOATS 8
#define ISA_F16C 1
#define ISA_FN(name) avx2_##name
#define ISA_NAME "avx2"
#include KVMNN_SIMD_KERNELS
#undef ISA_NAME
#undef ISA_FN
#undef ISA_F16C
#undef ISA_VECTOR_FLOATS
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#ifdef KVMNN_USE_AVX512
#if defined(__clang__)
#pragma clang attribute push(                                                                             \
    __attribute__((target("avx2,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2," \
                          "avx512ifma,avx512cd,avx512vnni"))),                                            \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512ifma,avx512cd,avx512vnni")
#pragma GCC target("prefer-vector-width=512")
#endif
#define ISA_VECTOR_FLOATS 16
#define ISA_F16C 1
#define ISA_AVX512 1
#define ISA_FN(name) avx512_##name
#define ISA_NAME "avx512"
#include KVMNN_SIMD_KERNELS
#undef ISA_NAME
#undef ISA_FN
#undef ISA_AVX512
#undef ISA_F16C
#undef ISA_VECTOR_FLOATS
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
#endif

static const KVMNN_KERNEL_TABLE *const isa_tables[KVMNN_NUM_ISAS] = {
    &baseline_table,
#ifdef KVMNN_HAS_AVX2
    &avx2_table,
#ifdef KVMNN_USE_AVX512
    &avx512_table,
#else
    &avx2_table,
#endif
#endif
};

#endif
