/* Leaf loops of the dense stream, one table per SIMD level; every level gives the same bytes. */
#ifndef KVMNN_DENSE_WORDS_H
#define KVMNN_DENSE_WORDS_H

#include "dense.h"
#include "xxh64.h"

enum {
    LOOKS = 32,         /* columns of a row that are looked at in search of a reference */
    VOTED_ROWS = 512,   /* of a block */
    VOTED_BLOCKS = 5,   /* at most: references are to be found in four full ones and one that is not */
    VOTE_PLANES = 6,    /* bits of a number of votes */
    TURNED_PAIRS = 16,
    STEP = 64, /* symbols between two pieces of what is done beside */
};

/* Coded low parts of a bucket, which are decoded as they are needed, or before. */
typedef struct {
    uint32_t states[STATES];
    const uint8_t *at, *end; /* units */
    const uint32_t *entries;
    uint8_t *to, *to_end;
} dense_flat;

/* Votes of rows, a plane of bits for each bit of the number. */
typedef struct {
    uint64_t planes[VOTE_PLANES][VOTED_BLOCKS * VOTED_ROWS / 64];
} dense_votes;

/* A row that is turned piece by piece: pair i of a head is its words i and i + pairs. */
typedef struct {
    const uint8_t *row; /* from the next head on, as `turned` */
    uint8_t *turned;
    const float *cosines, *sines;
    int dtype;
    size_t heads, pair; /* those that are left; the next one of the head */
    size_t dim, pairs;
} dense_turning;

/* What may be done between the symbols of a row. */
typedef struct {
    dense_flat *flat; /* or NULL */
    dense_turning turning;
    dense_hash hash;
    const uint8_t *hash_end; /* whole stripes up to here */
    size_t stripes;          /* of as many bytes as the words of a step */
} dense_beside;

typedef struct {
    const char *name;

    /* Symbols and low parts of n words, or one of both where the other is NULL; whether any word of bf16 or fp32 has an
     * exponent outside of the window. */
    int (*split)(const uint8_t *words, size_t n, int dtype, int base, uint8_t *symbols, uint8_t *low);

    /* The words again; tails: 2 bytes for each word of fp32. Exponents outside of the window are left 0 + base. */
    void (*join)(const uint8_t *symbols, const uint8_t *low, const uint8_t *tails, size_t n, int dtype, int base,
                 uint8_t *words);

    /* Symbols of folded ones; whether any is an escape. */
    int (*unfold)(const uint8_t *folded, const uint8_t *predicted, size_t n, uint8_t *symbols);

    /* Whether any symbol has no exponent in the window. */
    int (*outside)(const uint8_t *symbols, size_t n);

    /* Cosine and sine of distance * frequency for `pairs` frequencies; `scratch` has room for as many numbers. */
    void (*angles)(const uint64_t *frequencies, size_t pairs, uint64_t distance, int32_t *scratch, float *cosines,
                   float *sines);

    /* The next `steps` pieces, of TURNED_PAIRS pairs at most; no more than there are. */
    void (*turn)(dense_turning *t, size_t steps);

    /* Number of i with a[i] == b[i]. */
    size_t (*equal)(const uint8_t *a, const uint8_t *b, size_t n);

    /* Votes of the rows of some blocks: in how many of the first `looks` bitmaps the row's bit is set. All LOOKS of them
     * can be read; those behind `looks` are 0. */
    void (*vote)(const uint8_t *const bitmaps[LOOKS], size_t blocks, size_t looks, dense_votes *votes);

    /* The rows of `left` with most votes, which leave it, and which words of theirs are not 0: no word where none of the
     * rows has a vote. */
    uint64_t (*most)(const dense_votes *votes, size_t blocks, uint64_t *left, uint64_t *most);

    /* from[i] for each i where whether a[i] == b[i] is `equal`; how many. Up to PAD bytes behind them are touched. */
    size_t (*pick)(const uint8_t *from, const uint8_t *a, const uint8_t *b, size_t n, int equal, uint8_t *to);

    /* The other way: the next of `equal` where a[i] == b[i], else the next of `other`. PAD bytes behind the last one of
     * either are read. */
    void (*merge)(const uint8_t *equal, const uint8_t *other, const uint8_t *a, const uint8_t *b, size_t n,
                  uint8_t *to);

    /* to[i] = (x[i] - y[i]) & mask, and to[i] = (to[i] + y[i]) & mask where a[i] == b[i]. */
    void (*subtract)(const uint8_t *x, const uint8_t *y, uint8_t mask, size_t n, uint8_t *to);
    void (*add_equal)(const uint8_t *y, const uint8_t *a, const uint8_t *b, uint8_t mask, size_t n, uint8_t *to);

    /* Sum of x * log2(x) of the sums of two counts, n of them, a multiple of 8; how many sums are not 0. */
    float (*log_sum)(const uint32_t *a, const uint32_t *b, int n, uint32_t *used);

    /* Magnitudes of predicted symbols and, below them, the folded symbols. */
    void (*fold)(const uint8_t *predicted, const uint8_t *symbols, size_t n, uint16_t *to);

    /* Codes n symbols backwards by 4 states to units that end at `end`; where they begin. The code of each is that of
     * codes[tables[predicted] / CODE_BYTES ^ symbol], or codes[symbol] without `tables`. Up to 4 units before are
     * touched. `marks`: for each four symbols whether the code of any is that of an escape. */
    uint16_t *(*code)(const uint8_t *predicted, const uint8_t *symbols, size_t n, const uint32_t *tables,
                      const dense_code *codes, uint32_t states[STATES], uint16_t *end, uint8_t *marks);

    /* Folded symbols of n words that are predicted, n a multiple of 4, by the tables of the predicted ones; there are
     * n units or more. What is `beside` goes on by as much as n words are to the whole. */
    void (*decode)(const uint8_t *predicted, size_t n, const uint32_t *const tables[256], uint32_t states[STATES],
                   const uint8_t **units, uint8_t *folded, dense_beside *beside);

    /* The next n low parts, a multiple of 4, or as many as there are units for in any case. */
    void (*flat)(dense_flat *f, size_t n);

    /* n low parts of 5 bits to ceil(5n / 8) bytes, and back; PAD bytes behind both are touched. */
    void (*pack5)(const uint8_t *low, size_t n, uint8_t *packed);
    void (*unpack5)(const uint8_t *packed, size_t n, uint8_t *low);
} dense_loops;

const dense_loops *kvmnn_dense_loops_at(int level);

/* cluster.c: contexts to tables. `counts` is [CONTEXTS][256], of which rows with seen[] are defined; nothing is left of
 * them. Of a set that others share, tables cost nothing, and each has the escape. */
size_t dense_cluster_room(void);
void dense_cluster(const dense_loops *loops, uint32_t (*counts)[256], const uint8_t *seen, int most, int shared,
                   void *room, dense_model *m);
float dense_order0_bits(const dense_loops *loops, const uint32_t counts[256]);
/* Huge where a symbol has no frequency. */
float dense_cross_bits(const dense_loops *loops, const dense_table *t, const uint32_t counts[256]);

#endif
