/* Copies that go past the caches: for large outputs this spares reading every line that is about to be overwritten.
 *
 * kvmnn_far_done() ends a series of copies; only after it may another thread look at what they wrote.
 */
#ifndef KVMNN_FAR_H
#define KVMNN_FAR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && defined(__SSE2__)
#include <emmintrin.h>
typedef __m128i kvmnn_far_vector;
static inline void kvmnn_store_far(uint8_t *p, kvmnn_far_vector v) { _mm_stream_si128((__m128i *)(void *)p, v); }
static inline void kvmnn_far_done(void) { _mm_sfence(); }
#define KVMNN_FAR 1
#elif defined(__clang__)
typedef long long kvmnn_far_vector __attribute__((vector_size(16)));
static inline void kvmnn_store_far(uint8_t *p, kvmnn_far_vector v) {
    __builtin_nontemporal_store(v, (kvmnn_far_vector *)(void *)p);
}
static inline void kvmnn_far_done(void) { __sync_synchronize(); }
#define KVMNN_FAR 1
#else
static inline void kvmnn_far_done(void) {}
#endif

/* memcpy; the two do not overlap. As many bytes are fetched meanwhile from `next`, which may lie anywhere. */
static inline void kvmnn_copy_far(uint8_t *to, const uint8_t *from, size_t n, const uint8_t *next) {
#ifdef KVMNN_FAR
    size_t head = (size_t)(-(uintptr_t)to % 64);
    if (head > n) head = n;
    memcpy(to, from, head);
    to += head, from += head, n -= head;
    for (; n >= 64; n -= 64, to += 64, from += 64, next += 64) {
        __builtin_prefetch(next);
        for (size_t i = 0; i < 64; i += 16) {
            kvmnn_far_vector v;
            memcpy(&v, from + i, sizeof v);
            kvmnn_store_far(to + i, v);
        }
    }
#else
    (void)next;
#endif
    memcpy(to, from, n);
}

#endif
