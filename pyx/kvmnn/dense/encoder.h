/* An encoder's memory, and what is known of the rows before anything is coded. */
#ifndef KVMNN_DENSE_ENCODER_H
#define KVMNN_DENSE_ENCODER_H

#include "codec.h"

/* From this similarity class on low parts may be coded: below, low parts of equal symbols do not repeat. */
enum { FIRST_LOW_CLASS = 3 };

typedef struct {
    const dense_input *in;
    size_t words, num_own, num_rows; /* words of a row; own rows; with history */
    uint8_t *symbols;                /* [num_rows][words] */
    /* With rotary: [num_rows][words] symbols at position 0; when references are found [num_own][words] predicted ones. */
    uint8_t *rotated_symbols;
    uint8_t *zero_row;           /* a row of zeros */
    uint8_t *has_outside;        /* [num_rows]: the row has exponents that its symbols do not contain */
    uint8_t *similarity_classes; /* [num_own] */
    uint32_t *references;        /* [num_own] */
    uint32_t (*counts)[256]; /* [CONTEXTS] */
    uint16_t (*small_counts)[256]; /* [MAGNITUDES], of a similarity class: small counters stay in the nearest cache */
    uint8_t *is_seen; /* [CONTEXTS] */
    void *cluster_scratch;
    uint8_t *search_scratch;
    dense_model *model;
    dense_code (*codes)[256], (*low_codes)[256];
    uint8_t *row, *row_symbols, *row_low, *row_predicted_low, *row_differences;
    uint16_t *folded; /* a row */
    int32_t *angles;
    float *cosines, *sines;
    uint8_t *head;
    /* Differences of low parts under equal symbols, of the rows of a similarity class; none are kept where it is NULL. */
    uint8_t *differences[SIMILARITY_CLASSES];
    size_t difference_count[SIMILARITY_CLASSES];
    uint32_t low_counts[SIMILARITY_CLASSES][256];
} dense_encoder;

/* Takes all parts; with an arena that only counts, the sum of their sizes. `keep_differences`: the
 * differences of a similarity class, too. */
size_t dense_allocate_parts(dense_encoder *e, const dense_input *in, int keep_differences, dense_arena a);
/* Symbols, references, predictions and similarity classes of all rows; differences of low parts and how often each is. */
void dense_match_rows(dense_encoder *e);
/* How often each symbol follows each context, in the rows that are no copies. */
void dense_count_contexts(dense_encoder *e);

static inline const uint8_t *predicted_symbols(const dense_encoder *e, size_t i) {
    if (i + e->in->rows.history_rows == 0) return e->zero_row;
    return e->rotated_symbols ? e->rotated_symbols + i * e->words : e->symbols + e->references[i] * e->words;
}

static inline const uint8_t *own_symbols(const dense_encoder *e, size_t i) {
    return e->symbols + (e->in->rows.history_rows + i) * e->words;
}

#endif
