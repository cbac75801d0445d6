/* A lane is gathered while the next tile is prefetched. What a processor prefetches on its own ends with a page: of
 * 64 MiB "fast" takes 4 % less time, "exact" and "balanced" 2 %. Below 2 MiB words may be in a cache, where
 * prefetching costs 1.5 %. Prefetching only the beginnings of pages gains nothing. */

#include "lanes.h"

#include "little_endian.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Copies n bytes, a multiple of 16 as the place of dst is, past the caches: to write to a line there, it would be read
 * from memory first. */
static void kvmnn_nt_copy_aligned(uint8_t *dst, const uint8_t *src, size_t n) {
#if defined(__SSE2__)
    for (size_t i = 0; i < n; i += 16)
        _mm_stream_si128((__m128i *)(void *)(dst + i), _mm_loadu_si128((const __m128i *)(const void *)(src + i)));
#else
    memcpy(dst, src, n);
#endif
}

/* What was copied so is there for other threads. */
static void kvmnn_nt_fence(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* memcpy past the caches, line by line. */
static void kvmnn_nt_copy(uint8_t *dst, const uint8_t *src, size_t n) {
    size_t head = (size_t)(-(uintptr_t)dst & 63), body;
    if (head > n) head = n;
    body = (n - head) & ~(size_t)63;
    memcpy(dst, src, head);
    kvmnn_nt_copy_aligned(dst + head, src + head, body);
    memcpy(dst + head + body, src + head + body, n - head - body);
    kvmnn_nt_fence();
}

/* Asks memory for the line at p. A macro: GCC takes calls of a function that does nothing else away. */
#if defined(__GNUC__)
#define KVMNN_PREFETCH(p) __builtin_prefetch(p)
#else
#define KVMNN_PREFETCH(p) ((void)(p))
#endif

#define KVMNN_SIMD_KERNELS "frames/lanes_impl.h"
#define KVMNN_KERNEL_TABLE kvmnn_lane_kernels
#include "../simd.h"

const kvmnn_lane_kernels *kvmnn_lane_kernels_at(int level) { return isa_tables[level]; }
