/* An encoder's memory, and what is known of the rows before anything is coded. */
#ifndef KVMNN_DENSE_ENCODER_H
#define KVMNN_DENSE_ENCODER_H

#include "coding.h"

enum { LOW_FROM = 3 }; /* buckets whose low parts may be coded: below, low parts of equal symbols do not repeat */

typedef struct {
    const dense_input *in;
    size_t words, own, all;             /* words of a row; own rows; with history */
    uint8_t *symbols, *low;             /* [all][words] */
    uint8_t *turned_back;               /* [all][words]: symbols at position 0, with rotary */
    uint8_t *predicted, *predicted_low; /* [own][words], with rotary */
    uint8_t *nothing;                   /* a row of zeros */
    uint8_t *outside;                   /* [all]: the row has exponents that its symbols do not hold */
    uint8_t *buckets;                   /* [own] */
    uint32_t *references;               /* [own] */
    uint32_t (*counts)[256];            /* [CONTEXTS] */
    uint8_t *seen;                      /* [CONTEXTS] */
    void *cluster;
    uint8_t *search;
    dense_model *model;
    dense_code (*codes)[256], (*low_codes)[256];
    uint8_t *row; /* a row of words */
    int32_t *angles;
    float *cosines, *sines;
    uint8_t *head, *exponents, *escapes, *low_rest, *packed;
    uint16_t *units;
    uint8_t *differences[BUCKETS];
    uint16_t *low_units[BUCKETS];
} dense_encoder;

/* Takes all parts; with an arena that only counts, the sum of their sizes. */
size_t dense_lay_out(dense_encoder *e, const dense_input *in, dense_arena a);
/* Symbols, references, predictions and buckets of all rows. */
void dense_find_rows(dense_encoder *e);
/* How often each symbol follows each context, in the rows that are no copies. */
void dense_count_contexts(dense_encoder *e);
/* Differences of low parts under equal symbols in the rows of a bucket, to differences[bucket]; how many. */
size_t dense_collect_differences(dense_encoder *e, int bucket, uint32_t counts[256]);

static inline const uint8_t *predicted(const dense_encoder *e, size_t i) {
    if (i + e->in->rows.history_rows == 0) return e->nothing;
    return e->predicted ? e->predicted + i * e->words : e->symbols + e->references[i] * e->words;
}

static inline const uint8_t *predicted_low(const dense_encoder *e, size_t i) {
    if (i + e->in->rows.history_rows == 0) return e->nothing;
    return e->predicted ? e->predicted_low + i * e->words : e->low + e->references[i] * e->words;
}

static inline const uint8_t *own_symbols(const dense_encoder *e, size_t i) {
    return e->symbols + (e->in->rows.history_rows + i) * e->words;
}

static inline const uint8_t *own_low(const dense_encoder *e, size_t i) {
    return e->low + (e->in->rows.history_rows + i) * e->words;
}

#endif
