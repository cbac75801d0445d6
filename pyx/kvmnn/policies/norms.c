#include "norms.h"

#include <math.h>
#include <string.h>

/* KVMNN_PLAIN is for tests: it leaves the vector types out where there are some. */
#if !defined(KVMNN_PLAIN) && defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 12)
#define KVMNN_TYPE_(name, n) kvmnn_##name##n
#define KVMNN_TYPE(name, n) KVMNN_TYPE_(name, n)
#define kvmnn_floats(n) KVMNN_TYPE(floats, n)
#define kvmnn_ints(n) KVMNN_TYPE(ints, n)
#define kvmnn_bits(n) KVMNN_TYPE(bits, n)
#define kvmnn_words(n) KVMNN_TYPE(words, n)

typedef float kvmnn_floats4 __attribute__((vector_size(16)));
typedef int32_t kvmnn_ints4 __attribute__((vector_size(16)));
typedef uint32_t kvmnn_bits4 __attribute__((vector_size(16)));
typedef uint16_t kvmnn_words4 __attribute__((vector_size(8)));
typedef uint16_t kvmnn_words8 __attribute__((vector_size(16)));
typedef int16_t kvmnn_shorts8 __attribute__((vector_size(16)));
typedef uint64_t kvmnn_u64x2 __attribute__((vector_size(16)));
#if defined(__x86_64__) || defined(__i386__)
typedef float kvmnn_floats8 __attribute__((vector_size(32)));
typedef int32_t kvmnn_ints8 __attribute__((vector_size(32)));
typedef uint32_t kvmnn_bits8 __attribute__((vector_size(32)));
#endif

/* Lanes that put four words, from lane i on, next to four zeros: words widened to 32 bits. */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define KVMNN_WIDEN(i) i + 8, i, i + 9, i + 1, i + 10, i + 2, i + 11, i + 3
#else
#define KVMNN_WIDEN(i) i, i + 8, i + 1, i + 9, i + 2, i + 10, i + 3, i + 11
#endif

#define KVMNN_SIMD_KERNELS "policies/norms_impl.h"
#define KVMNN_KERNEL_TABLE kvmnn_norm_kernels
#include "../simd.h"

const kvmnn_norm_kernels *kvmnn_norm_kernels_at(int level) { return isa_tables[level]; }
#else
/* Compilers without vector types. */
#define ISA_NAME "baseline"
#include "norms_plain.h"

const kvmnn_norm_kernels *kvmnn_norm_kernels_at(int level) {
    (void)level;
    return &baseline_table;
}
#endif

/* -- the lowest ranks ---------------------------------------------------------------------------------------------- */

enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

/* How many of the ranks that agree with `prefix` above shift + bits have which `bits` there. Neighbours are counted in
 * different tables, because a store to a counter that is loaded again at once would stall. */
static void count_digits(const uint32_t *ranks, size_t n, uint32_t prefix, int shift, int bits,
                         uint32_t counts[4][DIGITS]) {
    const uint32_t mask = ((uint32_t)1 << bits) - 1;
    size_t i = 0;
    memset(counts, 0, 4 * sizeof counts[0]);
    if (shift + bits == 32) {
        for (; i + 4 <= n; i += 4)
            for (int j = 0; j < 4; ++j) counts[j][ranks[i + j] >> shift & mask]++;
        for (; i < n; ++i) counts[0][ranks[i] >> shift & mask]++;
        return;
    }
    for (; i < n; ++i)
        if (ranks[i] >> (shift + bits) == prefix) counts[i & 3][ranks[i] >> shift & mask]++;
}

/* The m-th lowest rank, found digit by digit from the top; *num_equal = how many of that rank belong to the m lowest. */
static uint32_t find_threshold(const uint32_t *ranks, size_t n, size_t m, size_t *num_equal) {
    static const int sizes[] = {DIGIT_BITS, DIGIT_BITS, 32 - 2 * DIGIT_BITS};
    uint32_t counts[4][DIGITS], prefix = 0;
    int shift = 32;
    for (int pass = 0; pass < 3; ++pass) {
        shift -= sizes[pass];
        count_digits(ranks, n, prefix, shift, sizes[pass], counts);
        for (uint32_t digit = 0;; ++digit) {
            size_t num_in_digit = (size_t)counts[0][digit] + counts[1][digit] + counts[2][digit] + counts[3][digit];
            if (m <= num_in_digit) {
                prefix = prefix << sizes[pass] | digit;
                break;
            }
            m -= num_in_digit;
        }
    }
    *num_equal = m;
    return prefix;
}

enum { MAX_EXCLUDED = 8 };

/* The case of a full cache that takes a few tokens: all but the `num_excluded` worst; of equal ranks the last are the
 * worst. */
static void select_all_but(const uint32_t *ranks, size_t n, size_t num_excluded, int64_t *out) {
    size_t worst[MAX_EXCLUDED], count = 0, i = n, next = 0;
    /* from the end, so that an equal rank never displaces one that is there; best of the worst last */
    while (num_excluded > 0 && i-- > 0) {
        size_t slot;
        if (count == num_excluded && ranks[i] <= ranks[worst[count - 1]]) continue;
        slot = count < num_excluded ? count++ : count - 1;
        for (; slot > 0 && ranks[worst[slot - 1]] < ranks[i]; --slot) worst[slot] = worst[slot - 1];
        worst[slot] = i;
    }
    for (size_t gap = 0; gap <= num_excluded; ++gap) { /* the indices between one that goes and the next */
        size_t end = n;
        for (i = 0; i < count; ++i)
            if (worst[i] >= next && worst[i] < end) end = worst[i];
        for (; next < end; ++next) *out++ = (int64_t)next;
        ++next;
    }
}

void kvmnn_select_lowest(const uint32_t *ranks, size_t n, size_t m, int64_t *out) {
    size_t equal, count = 0, i = 0;
    uint32_t limit;
    if (n - m <= MAX_EXCLUDED) {
        select_all_but(ranks, n, n - m, out);
        return;
    }
    limit = find_threshold(ranks, n, m, &equal);
    for (; count < m && i + 1 < n; ++i) {
        int is_equal = ranks[i] == limit && equal > 0;
        out[count] = (int64_t)i;
        count += (size_t)(ranks[i] < limit) + (size_t)is_equal;
        equal -= (size_t)is_equal;
    }
    if (count < m) out[count] = (int64_t)i;
}
