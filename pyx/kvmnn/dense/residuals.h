/* Leaf kernels of the dense stream, one table per SIMD level; every level gives the same bytes. */
#ifndef KVMNN_DENSE_RESIDUALS_H
#define KVMNN_DENSE_RESIDUALS_H

#include "dense.h"
#include "xxh64.h"

enum {
    NUM_COLUMNS = 32,      /* columns of a row that are looked at in search of a reference */
    VOTE_BLOCK_ROWS = 512, /* of a block */
    MAX_VOTE_BLOCKS = 5,   /* at most: references are to be found in four full ones and one that is not */
    VOTE_PLANES = 6,       /* bits of a number of votes */
    ROTATION_STEP_PAIRS = 16,
    SYMBOL_STEP = 64, /* symbols between two pieces of interleaved work */
};

/* Coded low parts of a similarity class, which are decoded as they are needed, or before. */
typedef struct {
    uint32_t states[NUM_STATES];
    const uint8_t *cursor, *end; /* units */
    const uint32_t *entries;
    uint8_t *out, *out_end;
} dense_low_decoder;

/* Votes of rows, a plane of bits for each bit of the number. */
typedef struct {
    uint64_t planes[VOTE_PLANES][MAX_VOTE_BLOCKS * VOTE_BLOCK_ROWS / 64];
} dense_votes;

/* A row that is rotated piece by piece: pair i of a head is its words i and i + pairs. */
typedef struct {
    const uint8_t *row; /* from the next head on, as `out` */
    uint8_t *out;
    const float *cosines, *sines;
    int dtype;
    size_t heads, next_pair; /* those that are left; the next one of the head */
    size_t dim, pairs;
} dense_rotation_job;

/* What may be done between the symbols of a row. */
typedef struct {
    dense_low_decoder *low_decoder; /* or NULL */
    dense_rotation_job rotation;
    dense_hash hash;
    const uint8_t *hash_end; /* whole stripes up to here */
    size_t stripes;          /* of as many bytes as the words of a step */
} dense_interleaved_work;

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
    int (*has_outside_exponent)(const uint8_t *symbols, size_t n);

    /* Cosine and sine of distance * frequency for `pairs` frequencies; `scratch` has room for as many numbers. */
    void (*angles)(const uint64_t *frequencies, size_t pairs, uint64_t distance, int32_t *scratch, float *cosines,
                   float *sines);

    /* The next `steps` pieces, of ROTATION_STEP_PAIRS pairs at most; no more than there are. */
    void (*rotate)(dense_rotation_job *t, size_t steps);

    /* Number of i with a[i] == b[i]. */
    size_t (*count_equal)(const uint8_t *a, const uint8_t *b, size_t n);

    /* Votes of the rows of some blocks: in how many of the first `num_columns` bitmaps the row's bit is set. All
     * NUM_COLUMNS of them can be read; those after the first `num_columns` are 0. */
    void (*vote)(const uint8_t *const bitmaps[NUM_COLUMNS], size_t blocks, size_t num_columns, dense_votes *votes);

    /* Moves the rows of `candidates` with most votes to `top`; which words of `top` are not 0: no word where none of the
     * rows has a vote. */
    uint64_t (*select_top)(const dense_votes *votes, size_t blocks, uint64_t *candidates, uint64_t *top);

    /* src[i] for each i where (a[i] == b[i]) == `equal`; how many. Up to PAD_BYTES after them are
     * touched. */
    size_t (*select_equal)(const uint8_t *src, const uint8_t *a, const uint8_t *b, size_t n, int equal, uint8_t *out);

    /* The other way: the next of `equal` where a[i] == b[i], else the next of `unequal`. PAD_BYTES after the last
     * one of either are read. */
    void (*merge)(const uint8_t *equal, const uint8_t *unequal, const uint8_t *a, const uint8_t *b, size_t n,
                  uint8_t *out);

    /* out[i] = (x[i] - y[i]) & mask, and out[i] = (out[i] + y[i]) & mask where a[i] == b[i]. */
    void (*subtract)(const uint8_t *x, const uint8_t *y, uint8_t mask, size_t n, uint8_t *out);
    void (*add_equal)(const uint8_t *y, const uint8_t *a, const uint8_t *b, uint8_t mask, size_t n, uint8_t *out);

    /* Sum of x * log2(x) of the sums of two counts, n of them, a multiple of 8; how many sums are not 0. */
    float (*log_sum)(const uint32_t *a, const uint32_t *b, int n, uint32_t *num_nonzero);

    /* Magnitudes of predicted symbols and, below them, the folded symbols. */
    void (*fold)(const uint8_t *p, const uint8_t *s, size_t n, uint16_t *out);

    /* Codes n symbols backwards by 4 states to units that end at `end`; where they begin. The code of each is that of
     * codes[tables[predicted] / CODE_BYTES ^ symbol], or codes[symbol] without `tables`. Up to 4 units before are
     * touched. `marks`: for each four symbols whether the code of any is that of an escape. */
    uint16_t *(*encode)(const uint8_t *p, const uint8_t *s, size_t n, const uint32_t *tables,
                        const dense_code *codes, uint32_t states[NUM_STATES], uint16_t *end, uint8_t *marks);

    /* Folded symbols of n words that are predicted, n a multiple of 4, by the tables of the predicted ones; there are
     * n units or more. Does the share of `interleaved` work that n words are of the whole. */
    void (*decode)(const uint8_t *p, size_t n, const uint32_t *const tables[256], uint32_t states[NUM_STATES],
                   const uint8_t **section, uint8_t *folded, dense_interleaved_work *interleaved);

    /* The next n low parts, a multiple of 4, or as many as there are units for in any case. */
    void (*decode_low)(dense_low_decoder *f, size_t n);

    /* n low parts of 5 bits to ceil(5n / 8) bytes, and back; PAD_BYTES after both are touched. */
    void (*pack5)(const uint8_t *low, size_t n, uint8_t *packed);
    void (*unpack5)(const uint8_t *packed, size_t n, uint8_t *low);
} dense_kernels;

const dense_kernels *kvmnn_dense_kernels_at(int level);

/* context_clusters.c: contexts to tables. `counts` is [CONTEXTS][256], of which rows with is_seen[] are defined; nothing is left of
 * them. Of a set that others share, tables cost nothing, and each has the escape. */
size_t dense_cluster_scratch_bytes(void);
void dense_cluster_contexts(const dense_kernels *kernels, uint32_t (*counts)[256], const uint8_t *is_seen,
                            int max_tables, int is_shared, void *scratch, dense_model *m);
float dense_order0_bits(const dense_kernels *kernels, const uint32_t counts[256]);
/* Huge where a symbol has no frequency. */
float dense_cross_bits(const dense_kernels *kernels, const dense_table *t, const uint32_t counts[256]);

#endif
