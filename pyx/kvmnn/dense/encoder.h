/* An encoder's memory, and what is known of the rows before anything is coded. */
#ifndef KVMNN_DENSE_ENCODER_H
#define KVMNN_DENSE_ENCODER_H

#include "coding.h"

enum { LOW_FROM = 3 }; /* buckets whose low parts may be coded: below, low parts of equal symbols do not repeat */

typedef struct {
    const dense_input *in;
    size_t words, own, all; /* words of a row; own rows; with history */
    uint8_t *symbols;       /* [all][words] */
    /* With rotary: [all][words] symbols at position 0; when references are found [own][words] predicted ones. */
    uint8_t *turned;
    uint8_t *nothing;     /* a row of zeros */
    uint8_t *outside;     /* [all]: the row has exponents that its symbols do not hold */
    uint8_t *buckets;     /* [own] */
    uint32_t *references; /* [own] */
    uint32_t (*counts)[256]; /* [CONTEXTS] */
    uint16_t (*few_counts)[256]; /* [MAGNITUDES], of a bucket: small counters stay in the nearest cache */
    uint8_t *seen;           /* [CONTEXTS] */
    void *cluster;
    uint8_t *search;
    dense_model *model;
    dense_code (*codes)[256], (*low_codes)[256];
    uint8_t *row, *row_symbols, *row_low, *row_predicted_low, *row_differences;
    uint16_t *folded; /* a row */
    int32_t *angles;
    float *cosines, *sines;
    uint8_t *head;
    /* Differences of low parts under equal symbols, of the rows of a bucket; none are kept where it is NULL. */
    uint8_t *differences[BUCKETS];
    size_t difference_count[BUCKETS];
    uint32_t low_counts[BUCKETS][256];
} dense_encoder;

/* Takes all parts; with an arena that only counts, the sum of their sizes. `keep`: a bucket's differences, too. */
size_t dense_lay_out(dense_encoder *e, const dense_input *in, int keep, dense_arena a);
/* Symbols, references, predictions and buckets of all rows; differences of low parts and how often each is. */
void dense_find_rows(dense_encoder *e);
/* How often each symbol follows each context, in the rows that are no copies. */
void dense_count_contexts(dense_encoder *e);

static inline const uint8_t *predicted(const dense_encoder *e, size_t i) {
    if (i + e->in->rows.history_rows == 0) return e->nothing;
    return e->turned ? e->turned + i * e->words : e->symbols + e->references[i] * e->words;
}

static inline const uint8_t *own_symbols(const dense_encoder *e, size_t i) {
    return e->symbols + (e->in->rows.history_rows + i) * e->words;
}

#endif
