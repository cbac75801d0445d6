/* Copies that go past the caches: for large outputs this spares reading every line that is about to be overwritten.
 *
 * kvmnn_nt_fence() ends a series of copies; only after it may another thread look at what they wrote.
 */
#ifndef KVMNN_NONTEMPORAL_H
#define KVMNN_NONTEMPORAL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && defined(__SSE2__)
#include <emmintrin.h>
typedef __m128i kvmnn_nt_vector;
static inline void kvmnn_nt_store(uint8_t *p, kvmnn_nt_vector v) { _mm_stream_si128((__m128i *)(void *)p, v); }
static inline void kvmnn_nt_fence(void) { _mm_sfence(); }
#define KVMNN_HAS_NT_STORE 1
#elif defined(__clang__)
typedef long long kvmnn_nt_vector __attribute__((vector_size(16)));
static inline void kvmnn_nt_store(uint8_t *p, kvmnn_nt_vector v) {
    __builtin_nontemporal_store(v, (kvmnn_nt_vector *)(void *)p);
}
static inline void kvmnn_nt_fence(void) { __sync_synchronize(); }
#define KVMNN_HAS_NT_STORE 1
#else
static inline void kvmnn_nt_fence(void) {}
#endif

/* memcpy; the two do not overlap. As many bytes are fetched meanwhile from `next`, which may lie anywhere. */
static inline void kvmnn_nt_copy(uint8_t *dst, const uint8_t *src, size_t n, const uint8_t *next) {
#ifdef KVMNN_HAS_NT_STORE
    size_t num_unaligned = (size_t)(-(uintptr_t)dst % 64);
    if (num_unaligned > n) num_unaligned = n;
    memcpy(dst, src, num_unaligned);
    dst += num_unaligned, src += num_unaligned, n -= num_unaligned;
    for (; n >= 64; n -= 64, dst += 64, src += 64, next += 64) {
        __builtin_prefetch(next);
        for (size_t i = 0; i < 64; i += 16) {
            kvmnn_nt_vector v;
            memcpy(&v, src + i, sizeof v);
            kvmnn_nt_store(dst + i, v);
        }
    }
#else
    (void)next;
#endif
    memcpy(dst, src, n);
}

#endif
