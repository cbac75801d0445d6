/* Self-test of packing.c without Python: every function against loops over single words that compute each place from
 * the layout's formulas, over random geometries, ranges and alignments, with guard bytes around what is written.
 * Prints one line; exits 1 at a mismatch. */
#include "kvmnn/packed/packing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 64, ROUNDS = 3000 };

static unsigned long checks;
static uint64_t state = 0x9e3779b97f4a7c15u;

static size_t below(size_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (size_t)(state >> 33) % n;
}

static size_t up(size_t a, size_t b) { return (a + b - 1) / b; }

/* The two formulas of docs/layout.md, in words. */
static size_t key_place(const kvmnn_pack *p, size_t t, size_t d) {
    return t / p->hP * up(p->dims, p->lP) * p->lP * p->hP + d / p->lP * p->hP * p->lP + t % p->hP * p->lP + d % p->lP;
}
static size_t value_place(const kvmnn_pack *p, size_t t, size_t d) {
    size_t s2 = p->hP * p->lP, s1 = up(p->block, p->lP) * s2, s0 = s1 * up(p->dims, p->hP), r = t % p->block;
    return t / p->block * s0 + d / p->hP * s1 + r / p->lP * s2 + d % p->hP * p->lP + r % p->lP;
}

typedef struct {
    kvmnn_pack p;
    int values;
    size_t capacity, bytes, row, stride, scratch_bytes;
    uint8_t *head, *expected, *rows, *wanted, *scratch;
} test;

static const kvmnn_packing *of(const test *x) { return x->values ? &kvmnn_values : &kvmnn_keys; }

static size_t place(const test *x, size_t t, size_t d) {
    return (x->values ? value_place(&x->p, t, d) : key_place(&x->p, t, d)) * x->p.word;
}

static uint8_t *fresh(size_t n) {
    uint8_t *block = malloc(n + 2 * GUARD + 16);
    if (block == NULL) exit(2);
    for (size_t i = 0; i < n + 2 * GUARD + 16; ++i) block[i] = (uint8_t)below(256);
    return block;
}

static void require(const test *x, const char *what, size_t a, size_t b, size_t c) {
    const size_t all = x->capacity * x->stride;
    ++checks;
    if (memcmp(x->head - GUARD, x->expected - GUARD, x->bytes + 2 * GUARD) == 0 &&
        memcmp(x->rows - GUARD, x->wanted - GUARD, all + 2 * GUARD) == 0)
        return;
    printf("selftest_packing: %s of %s fails: word %zu dims %zu lP %zu hP %zu block %zu, %zu %zu %zu\n", what,
           x->values ? "values" : "keys", x->p.word, x->p.dims, x->p.lP, x->p.hP, x->p.block, a, b, c);
    exit(1);
}

static void check_ranges(test *x) {
    size_t start = below(x->capacity), count = 1 + below(x->capacity - start), word = x->p.word;
    int far = below(2) == 1;
    for (size_t t = start; t < start + count; ++t)
        for (size_t d = 0; d < x->p.dims; ++d)
            memcpy(x->wanted + (t - start) * x->stride + d * word, x->expected + place(x, t, d), word);
    if (far) of(x)->gather_far(&x->p, x->head, start, count, x->rows, x->stride, x->scratch, x->scratch_bytes);
    else of(x)->gather(&x->p, x->head, start, count, x->rows, x->stride);
    require(x, far ? "gather_far" : "gather", start, count, x->stride);

    start = below(x->capacity);
    count = 1 + below(x->capacity - start);
    for (size_t t = start; t < start + count; ++t)
        for (size_t d = 0; d < x->p.dims; ++d)
            memcpy(x->expected + place(x, t, d), x->wanted + (t - start) * x->stride + d * word, word);
    if (far) of(x)->scatter_far(&x->p, x->head, start, count, x->rows, x->stride, x->scratch, x->scratch_bytes);
    else of(x)->scatter(&x->p, x->head, start, count, x->rows, x->stride);
    require(x, far ? "scatter_far" : "scatter", start, count, x->stride);
}

static void check_shift(test *x) {
    size_t src = below(x->capacity), dst = below(x->capacity), longest = x->capacity - (src > dst ? src : dst);
    size_t count = 1 + below(longest);
    for (size_t i = 0; i < count; ++i)
        for (size_t d = 0; d < x->p.dims; ++d)
            memmove(x->expected + place(x, dst + i, d), x->expected + place(x, src + i, d), x->p.word);
    of(x)->shift(&x->p, x->head, src, dst, count, x->scratch, x->scratch_bytes);
    require(x, "shift", src, dst, count);
}

static void check_zeroes(test *x) {
    size_t start = below(x->capacity), count = 1 + below(x->capacity - start), live = below(x->capacity + 1);
    for (size_t t = start; t < start + count; ++t)
        for (size_t d = 0; d < x->p.dims; ++d) memset(x->expected + place(x, t, d), 0, x->p.word);
    of(x)->zero(&x->p, x->head, start, count);
    require(x, "zero", start, count, 0);

    uint8_t *padded = calloc(x->bytes, 1);
    if (padded == NULL) exit(2);
    for (size_t t = 0; t < live; ++t)
        for (size_t d = 0; d < x->p.dims; ++d)
            memcpy(padded + place(x, t, d), x->expected + place(x, t, d), x->p.word);
    memcpy(x->expected, padded, x->bytes);
    free(padded);
    of(x)->pad(&x->p, x->head, live, x->bytes);
    require(x, "pad", live, x->bytes, 0);
}

static void check_geometry(size_t number) {
    static const size_t lPs[] = {1, 1, 1, 2, 2, 3, 4, 8}, hPs[] = {4, 8, 16, 64, 32, 5, 1, 3};
    test x;
    memset(&x, 0, sizeof x);
    x.values = number % 2 == 1;
    x.p.word = below(2) ? 2 : 4;
    x.p.lP = lPs[below(8)];
    x.p.hP = hPs[below(8)];
    x.p.dims = below(3) ? 8 * (1 + below(17)) : 1 + below(70);
    x.capacity = 1 + below(200);
    x.p.block = below(4) ? 64 : below(2) ? x.capacity : 1 + below(40);
    x.row = x.p.dims * x.p.word;
    x.stride = x.row + (below(2) ? 0 : below(50));
    x.bytes = x.values ? up(x.capacity, x.p.block) * up(x.p.dims, x.p.hP) * x.p.hP * up(x.p.block, x.p.lP) * x.p.lP
                       : up(x.capacity, x.p.hP) * x.p.hP * up(x.p.dims, x.p.lP) * x.p.lP;
    x.bytes *= x.p.word;
    x.scratch_bytes = x.row + below(80000);
    const size_t skew = below(16), all = x.capacity * x.stride;
    uint8_t *blocks[5] = {fresh(x.bytes), fresh(x.bytes), fresh(all), fresh(all), fresh(x.scratch_bytes)};
    x.head = blocks[0] + GUARD + skew;
    x.expected = blocks[1] + GUARD + skew;
    x.rows = blocks[2] + GUARD + below(16);
    x.wanted = blocks[3] + GUARD + below(16);
    x.scratch = blocks[4] + GUARD;
    memcpy(x.expected - GUARD, x.head - GUARD, x.bytes + 2 * GUARD);
    memcpy(x.wanted - GUARD, x.rows - GUARD, all + 2 * GUARD);
    check_ranges(&x);
    for (int i = 0; i < 3; ++i) check_shift(&x);
    check_zeroes(&x);
    for (int i = 0; i < 5; ++i) free(blocks[i]);
}

int main(void) {
    for (size_t i = 0; i < ROUNDS; ++i) check_geometry(i);
    printf("selftest_packing: ok, %lu checks\n", checks);
    return 0;
}
