/* What the dense encoder and decoder take and give (docs/format-v2.md). */
#ifndef KVMNN_DENSE_CODEC_H
#define KVMNN_DENSE_CODEC_H

#include "rans.h"
#include "residuals.h"

enum {
    SET_HEADER_BYTES = 8,
    MAX_SHARED_TABLES = 24,
    MAX_OWN_TABLES = 48,
    MAX_ROTARY_PAIRS = 32768,
    HEADER_BYTES = 28,
    CHECKSUM_OFFSET = 20,
    MAX_MODEL_BYTES = 40 << 10,
    NUM_CANDIDATES = 3
};

/* A model that several streams share. */
typedef struct {
    uint64_t id;
    int dtype, base;
    dense_rotary rotary;
    uint64_t frequencies[MAX_ROTARY_PAIRS];
    dense_model model;
    dense_code codes[MAX_TABLES][256];
    dense_code low_codes[SIMILARITY_CLASSES][256];
    uint32_t entries[MAX_TABLES][SCALE];
    uint32_t low_entries[SIMILARITY_CLASSES][SCALE];
} dense_table_set;

void dense_prepare_codes(const dense_model *m, dense_code codes[][256], dense_code low_codes[][256]);
void dense_prepare_entries(const dense_model *m, uint32_t entries[][SCALE], uint32_t low_entries[][SCALE]);

/* -- reference_search.c -------------------------------------------------------------------------------------------- */

size_t dense_search_scratch_bytes(size_t rows);
/* For each own row the most similar row before it. symbols: [history + rows][words]; reference_hints: rows to try, or
 * NULL. */
void dense_search_references(const dense_kernels *kernels, const uint8_t *symbols, size_t words, size_t history,
                             size_t rows, const int32_t *reference_hints, uint8_t *scratch, uint32_t *references);

/* -- encoder.c ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const dense_kernels *kernels;
    dense_shape shape;
    dense_rows rows;              /* pairs lie as halves */
    const uint8_t *original_rows; /* own rows as they are given back, for the checksum */
    dense_rotary rotary;
    const uint32_t *positions;        /* history + rows, with rotary */
    const int32_t *reference_hints;   /* rows */
    const dense_table_set *table_set; /* or NULL */
} dense_input;

size_t dense_encode_scratch_bytes(const dense_input *input);
int dense_choose_base(const dense_input *input);
/* How many words of the own rows have the symbol that is predicted for them: the more, the better the rotation. */
size_t dense_count_predicted(const dense_input *input, uint8_t *scratch);
/* Bytes at `out`, PAD_BYTES not counted: what is coded lies after what is still to be coded there. */
size_t dense_encode_capacity(const dense_input *input);
/* The stream at `out`; its size, or 0 where that would not be below `limit`, or below the raw bytes + HEADER_BYTES. */
size_t dense_encode(const dense_input *input, uint8_t *scratch, uint8_t *out, size_t limit, uint32_t *references);

/* -- shared_tables.c ----------------------------------------------------------------------------------------------- */

/* What is counted for a table set; all zeros before the first array. */
typedef struct {
    uint32_t contexts[CONTEXTS][256], low[SIMILARITY_CLASSES][256];
    uint8_t is_seen[CONTEXTS];
} dense_counts;

/* Adds the own rows of the input, which has no table set. */
void dense_count_symbols(const dense_input *input, uint8_t *scratch, dense_counts *counts);
/* The set of what was counted, of which nothing is left, to `out` (SET_HEADER_BYTES + MAX_MODEL_BYTES + 8 for each
 * pair); its size. */
size_t dense_write_table_set(const dense_kernels *kernels, dense_counts *counts, int dtype, int base,
                             const dense_rotary *rotary, void *cluster_scratch, uint8_t *out);
/* The bytes after a set's magic and version, which the caller has checked. */
dense_error dense_read_table_set(const uint8_t *data, size_t n, dense_table_set *table_set);

/* -- stream.c ------------------------------------------------------------------------------------------------------ */

/* All of the header but the checksum. */
void dense_write_header(uint8_t *header, const dense_shape *shape, int method, int flags, size_t rows, size_t payload);
/* Of a stream whose payload's first `control` bytes count; the seed of the words' hash, and that of n bytes of them. */
uint64_t dense_checksum_seed(const uint8_t *header, size_t control);
uint64_t dense_checksum(const uint8_t *header, size_t control, const uint8_t *words, size_t n);
/* Words of pairs side by side to halves (`to_halves`), or back; `row` has room for `dims` words. */
void dense_reorder_pairs(uint8_t *words, size_t rows, const dense_shape *shape, size_t dims, int to_halves,
                         uint8_t *row);
/* -- decoder.c ----------------------------------------------------------------------------------------------------- */

typedef struct {
    dense_shape shape;
    size_t rows, history;
    int flags;
    const uint8_t *header, *payload;
    size_t payload_bytes;
    /* by dense_parse */
    const uint8_t *head, *exponents, *escapes, *symbols, *low[SIMILARITY_CLASSES], *uncoded_low;
    size_t head_bytes, exponent_count, escape_count, num_units, low_count[SIMILARITY_CLASSES],
        num_low_units[SIMILARITY_CLASSES], uncoded_low_bytes;
    uint64_t set_id;
    int low_mask;
} dense_stream;

/* Where the sections lie; nothing of the head is read. */
dense_error dense_parse(dense_stream *s);
size_t dense_decode_scratch_bytes(const dense_stream *s);
/* All own rows to `words`, which may hold anything after an error. */
dense_error dense_decode(const dense_stream *s, const dense_kernels *kernels, const uint8_t *history,
                         const dense_table_set *table_set, uint8_t *scratch, uint8_t *words);

#endif
