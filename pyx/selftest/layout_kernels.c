/* Self-test of layout_kernels.c without Python: every function against loops over single words that compute each place from
 * the layout's formulas, over random geometries, ranges and alignments, with guard bytes around what is written.
 * Prints one line; exits 1 at a mismatch. */
#include "kvmnn/packed/layout_kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 64, ROUNDS = 3000 };

static unsigned long num_checks;
static uint64_t random_state = 0x9e3779b97f4a7c15u;

static size_t random_below(size_t n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (size_t)(random_state >> 33) % n;
}

static size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

/* The two formulas of docs/layout.md, in words. */
static size_t key_place(const kvmnn_layout *p, size_t t, size_t d) {
    return t / p->hP * ceil_div(p->dims, p->lP) * p->lP * p->hP + d / p->lP * p->hP * p->lP + t % p->hP * p->lP +
           d % p->lP;
}
static size_t value_place(const kvmnn_layout *p, size_t t, size_t d) {
    size_t s2 = p->hP * p->lP, s1 = ceil_div(p->block_tokens, p->lP) * s2, s0 = s1 * ceil_div(p->dims, p->hP),
           r = t % p->block_tokens;
    return t / p->block_tokens * s0 + d / p->hP * s1 + r / p->lP * s2 + d % p->hP * p->lP + r % p->lP;
}

typedef struct {
    kvmnn_layout p;
    int is_values;
    size_t capacity, head_bytes, row_bytes, stride, scratch_bytes;
    uint8_t *head, *expected, *rows, *expected_rows, *scratch;
} test_case;

static const kvmnn_layout_kernels *kernels_of(const test_case *x) {
    return x->is_values ? &kvmnn_value_kernels : &kvmnn_key_kernels;
}

static size_t word_offset(const test_case *x, size_t t, size_t d) {
    return (x->is_values ? value_place(&x->p, t, d) : key_place(&x->p, t, d)) * x->p.word_bytes;
}

static uint8_t *allocate_random(size_t n) {
    uint8_t *block = malloc(n + 2 * GUARD + 16);
    if (block == NULL) exit(2);
    for (size_t i = 0; i < n + 2 * GUARD + 16; ++i) block[i] = (uint8_t)random_below(256);
    return block;
}

static void require(const test_case *x, const char *what, size_t a, size_t b, size_t c) {
    const size_t rows_bytes = x->capacity * x->stride;
    ++num_checks;
    if (memcmp(x->head - GUARD, x->expected - GUARD, x->head_bytes + 2 * GUARD) == 0 &&
        memcmp(x->rows - GUARD, x->expected_rows - GUARD, rows_bytes + 2 * GUARD) == 0)
        return;
    printf("selftest_layout_kernels: %s of %s fails: word %zu dims %zu lP %zu hP %zu block %zu, %zu %zu %zu\n", what,
           x->is_values ? "values" : "keys", x->p.word_bytes, x->p.dims, x->p.lP, x->p.hP, x->p.block_tokens, a, b, c);
    exit(1);
}

static void check_ranges(test_case *x) {
    size_t start = random_below(x->capacity), count = 1 + random_below(x->capacity - start), word = x->p.word_bytes;
    int is_nontemporal = random_below(2) == 1;
    for (size_t t = start; t < start + count; ++t)
        for (size_t d = 0; d < x->p.dims; ++d)
            memcpy(x->expected_rows + (t - start) * x->stride + d * word, x->expected + word_offset(x, t, d), word);
    if (is_nontemporal)
        kernels_of(x)->gather_nontemporal(&x->p, x->head, start, count, x->rows, x->stride, x->scratch,
                                          x->scratch_bytes);
    else kernels_of(x)->gather(&x->p, x->head, start, count, x->rows, x->stride);
    require(x, is_nontemporal ? "gather_far" : "gather", start, count, x->stride);

    start = random_below(x->capacity);
    count = 1 + random_below(x->capacity - start);
    for (size_t t = start; t < start + count; ++t)
        for (size_t d = 0; d < x->p.dims; ++d)
            memcpy(x->expected + word_offset(x, t, d), x->expected_rows + (t - start) * x->stride + d * word, word);
    if (is_nontemporal)
        kernels_of(x)->scatter_nontemporal(&x->p, x->head, start, count, x->rows, x->stride, x->scratch,
                                           x->scratch_bytes);
    else kernels_of(x)->scatter(&x->p, x->head, start, count, x->rows, x->stride);
    require(x, is_nontemporal ? "scatter_far" : "scatter", start, count, x->stride);
}

static void check_shift(test_case *x) {
    size_t src = random_below(x->capacity), dst = random_below(x->capacity),
           max_count = x->capacity - (src > dst ? src : dst);
    size_t count = 1 + random_below(max_count);
    for (size_t i = 0; i < count; ++i)
        for (size_t d = 0; d < x->p.dims; ++d)
            memmove(x->expected + word_offset(x, dst + i, d), x->expected + word_offset(x, src + i, d),
                    x->p.word_bytes);
    kernels_of(x)->shift(&x->p, x->head, src, dst, count, x->scratch, x->scratch_bytes);
    require(x, "shift", src, dst, count);
}

static void check_zeroes(test_case *x) {
    size_t start = random_below(x->capacity), count = 1 + random_below(x->capacity - start),
           num_valid = random_below(x->capacity + 1);
    for (size_t t = start; t < start + count; ++t)
        for (size_t d = 0; d < x->p.dims; ++d) memset(x->expected + word_offset(x, t, d), 0, x->p.word_bytes);
    kernels_of(x)->zero(&x->p, x->head, start, count);
    require(x, "zero", start, count, 0);

    uint8_t *padded = calloc(x->head_bytes, 1);
    if (padded == NULL) exit(2);
    for (size_t t = 0; t < num_valid; ++t)
        for (size_t d = 0; d < x->p.dims; ++d)
            memcpy(padded + word_offset(x, t, d), x->expected + word_offset(x, t, d), x->p.word_bytes);
    memcpy(x->expected, padded, x->head_bytes);
    free(padded);
    kernels_of(x)->pad(&x->p, x->head, num_valid, x->head_bytes);
    require(x, "pad", num_valid, x->head_bytes, 0);
}

static void check_geometry(size_t number) {
    static const size_t lPs[] = {1, 1, 1, 2, 2, 3, 4, 8}, hPs[] = {4, 8, 16, 64, 32, 5, 1, 3};
    test_case x;
    memset(&x, 0, sizeof x);
    x.is_values = number % 2 == 1;
    x.p.word_bytes = random_below(2) ? 2 : 4;
    x.p.lP = lPs[random_below(8)];
    x.p.hP = hPs[random_below(8)];
    x.p.dims = random_below(3) ? 8 * (1 + random_below(17)) : 1 + random_below(70);
    x.capacity = 1 + random_below(200);
    x.p.block_tokens = random_below(4) ? 64 : random_below(2) ? x.capacity : 1 + random_below(40);
    x.row_bytes = x.p.dims * x.p.word_bytes;
    x.stride = x.row_bytes + (random_below(2) ? 0 : random_below(50));
    x.head_bytes = x.is_values ? ceil_div(x.capacity, x.p.block_tokens) * ceil_div(x.p.dims, x.p.hP) * x.p.hP *
                                     ceil_div(x.p.block_tokens, x.p.lP) * x.p.lP
                               : ceil_div(x.capacity, x.p.hP) * x.p.hP * ceil_div(x.p.dims, x.p.lP) * x.p.lP;
    x.head_bytes *= x.p.word_bytes;
    x.scratch_bytes = x.row_bytes + random_below(80000);
    const size_t skew = random_below(16), rows_bytes = x.capacity * x.stride;
    uint8_t *blocks[5] = {allocate_random(x.head_bytes), allocate_random(x.head_bytes), allocate_random(rows_bytes),
                          allocate_random(rows_bytes), allocate_random(x.scratch_bytes)};
    x.head = blocks[0] + GUARD + skew;
    x.expected = blocks[1] + GUARD + skew;
    x.rows = blocks[2] + GUARD + random_below(16);
    x.expected_rows = blocks[3] + GUARD + random_below(16);
    x.scratch = blocks[4] + GUARD;
    memcpy(x.expected - GUARD, x.head - GUARD, x.head_bytes + 2 * GUARD);
    memcpy(x.expected_rows - GUARD, x.rows - GUARD, rows_bytes + 2 * GUARD);
    check_ranges(&x);
    for (int i = 0; i < 3; ++i) check_shift(&x);
    check_zeroes(&x);
    for (int i = 0; i < 5; ++i) free(blocks[i]);
}

int main(void) {
    for (size_t i = 0; i < ROUNDS; ++i) check_geometry(i);
    printf("selftest_layout_kernels: ok, %lu checks\n", num_checks);
    return 0;
}
