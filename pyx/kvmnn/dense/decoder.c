/* From a dense stream to rows of words (docs/format-v2.md). Nothing of the stream is believed. */
#include "codec.h"

typedef struct {
    const dense_stream *in;
    const dense_kernels *kernels;
    const dense_model *model;
    const uint32_t (*entries)[SCALE], (*low_entries)[SCALE];
    dense_rotary rotary;
    dense_rows rows;
    uint8_t *words; /* of the own rows */
    /* parts of the scratch memory */
    uint8_t *similarity_classes;
    uint32_t *references, *positions;
    uint64_t *frequencies;
    dense_model *own_model;
    uint32_t (*own_entries)[SCALE], (*own_low_entries)[SCALE];
    uint8_t *history;       /* with pairs as halves */
    uint8_t *rotated_bytes; /* a row of words, rotated */
    uint8_t *predicted, *predicted_low, *folded, *symbols, *low, *low_scratch;
    int32_t *angles;
    float *cosines, *sines;
    uint8_t *unpacked, *differences[SIMILARITY_CLASSES];
    const uint32_t *tables[SIMILARITY_CLASSES][256]; /* entries of a context's table, by the predicted symbol */
    dense_low_decoder low_decoders[SIMILARITY_CLASSES];
    dense_interleaved_work interleaved;
    size_t rotated_row; /* the own row whose reference is rotated meanwhile, after the last one for none */
    /* what is left of the sections */
    uint32_t states[NUM_STATES];
    const uint8_t *units, *units_end, *escape, *escapes_end, *exponent, *exponents_end;
    const uint8_t *low_rest, *low_rest_end, *tails, *next_low[SIMILARITY_CLASSES];
} decoder;

static size_t allocate_parts(decoder *d, const dense_stream *in, dense_arena a) {
    size_t words = in->shape.words, num_rows = in->rows + in->history;
    int rotary = in->flags & 1, has_table_set = in->flags & 2;
    memset(d, 0, sizeof *d);
    d->in = in;
    d->similarity_classes = arena_alloc(&a, in->rows);
    d->references = arena_alloc(&a, in->rows * 4);
    if (!has_table_set) {
        d->own_model = arena_alloc(&a, sizeof(dense_model));
        d->own_entries = arena_alloc(&a, sizeof(uint32_t[MAX_TABLES][SCALE]));
        d->own_low_entries = arena_alloc(&a, sizeof(uint32_t[SIMILARITY_CLASSES][SCALE]));
    }
    if (rotary) {
        size_t pairs = in->shape.dim / 2;
        d->positions = arena_alloc(&a, num_rows * 4);
        d->frequencies = arena_alloc(&a, pairs * 8);
        d->angles = arena_alloc(&a, pairs * 4);
        d->cosines = arena_alloc(&a, pairs * 4);
        d->sines = arena_alloc(&a, pairs * 4);
        d->history = arena_alloc(&a, in->history * words * in->shape.word_bytes);
        d->rotated_bytes = arena_alloc(&a, words * in->shape.word_bytes);
    }
    uint8_t **rows[] = {&d->predicted, &d->predicted_low, &d->folded, &d->symbols, &d->low, &d->low_scratch};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) *rows[i] = arena_alloc(&a, words);
    if (in->shape.dtype != KVMNN_FP16) d->unpacked = arena_alloc(&a, in->uncoded_low_bytes / 5 * 8 + 64);
    for (int b = 0; b < SIMILARITY_CLASSES; ++b)
        if (in->low_mask >> b & 1) d->differences[b] = arena_alloc(&a, in->low_count[b]);
    return a.used_bytes;
}

size_t dense_decode_scratch_bytes(const dense_stream *s) {
    decoder d;
    return allocate_parts(&d, s, (dense_arena){0});
}

/* -- before the first row ------------------------------------------------------------------------------------------ */

/* Whether the set is the one that the stream was made with, and fits its rows. */
static int is_matching_set(const dense_stream *in, const dense_table_set *table_set) {
    if (!(in->flags & 2)) return table_set == NULL;
    return table_set && table_set->id == in->set_id && table_set->dtype == in->shape.dtype &&
           table_set->base == in->shape.base && (table_set->rotary.dims != 0) == (in->flags & 1) &&
           table_set->rotary.dims <= in->shape.dim;
}

static dense_error read_head(decoder *d, const dense_table_set *table_set) {
    const dense_stream *in = d->in;
    if (!is_matching_set(in, table_set)) return DENSE_MODEL;
    bitreader r = {.cursor = in->head, .end = in->head + in->head_bytes};
    dense_error error = DENSE_OK;
    if (in->flags & 1) {
        if (table_set)
            d->rotary = table_set->rotary;
        else
            error = dense_read_rotary(&r, in->shape.dim, d->frequencies, &d->rotary);
        if (!error) error = dense_read_positions(&r, d->positions, in->rows + in->history);
    }
    if (error) return error;
    if (table_set) {
        if (in->low_mask & ~table_set->model.low_mask) return DENSE_MODEL;
        d->model = &table_set->model;
        d->entries = (const uint32_t(*)[SCALE])table_set->entries;
        d->low_entries = (const uint32_t(*)[SCALE])table_set->low_entries;
    } else {
        error = dense_read_model(&r, d->own_model);
        if (error) return error;
        if (in->low_mask & ~d->own_model->low_mask) return DENSE_MODEL;
        dense_prepare_entries(d->own_model, d->own_entries, d->own_low_entries);
        d->model = d->own_model;
        d->entries = (const uint32_t(*)[SCALE])d->own_entries;
        d->low_entries = (const uint32_t(*)[SCALE])d->own_low_entries;
    }
    error = dense_read_row_references(&r, in->history, in->rows, d->similarity_classes, d->references);
    if (error) return error;
    if (!bitreader_is_exhausted(&r)) return DENSE_HEAD;
    for (int b = 0; b < SIMILARITY_CLASSES; ++b)
        for (int s = 0; s < 256; ++s)
            d->tables[b][s] = d->entries[d->model->context_tables[b * MAGNITUDES + (s & 127)]];
    return DENSE_OK;
}

static dense_error open_sections(decoder *d) {
    const dense_stream *in = d->in;
    size_t words = 0, num_coded = 0;
    for (size_t i = 0; i < in->rows; ++i) words += d->similarity_classes[i] == COPY_CLASS ? 0 : in->shape.words;
    for (int b = 0; b < SIMILARITY_CLASSES; ++b) num_coded += in->low_count[b];
    if (num_coded > words) return DENSE_LOW;
    size_t low = words - num_coded, packed_bytes = in->shape.dtype == KVMNN_FP16 ? low : (5 * low + 7) / 8;
    if (in->uncoded_low_bytes != packed_bytes + (in->shape.dtype == KVMNN_FP32 ? 2 * words : 0)) return DENSE_SIZES;
    d->low_rest = in->uncoded_low;
    d->tails = in->uncoded_low + packed_bytes;
    if (in->shape.dtype != KVMNN_FP16) {
        if (5 * low % 8 && in->uncoded_low[packed_bytes - 1] >> 5 * low % 8) return DENSE_LOW;
        /* the last bytes are unpacked from a copy: what explains them may not be read */
        size_t num_bulk = packed_bytes > 16 ? (packed_bytes - 16) / 5 * 8 : 0;
        uint8_t tail[64] = {0};
        d->kernels->unpack5(in->uncoded_low, num_bulk, d->unpacked);
        memcpy(tail, in->uncoded_low + num_bulk / 8 * 5, packed_bytes - num_bulk / 8 * 5);
        d->kernels->unpack5(tail, low - num_bulk, d->unpacked + num_bulk);
        d->low_rest = d->unpacked;
    }
    d->low_rest_end = d->low_rest + low;
    if (!dense_load_states(in->symbols, d->states)) return DENSE_STATE;
    d->units = in->symbols + 4 * NUM_STATES, d->units_end = d->units + 2 * in->num_units;
    d->escape = in->escapes, d->escapes_end = in->escapes + in->escape_count;
    d->exponent = in->exponents, d->exponents_end = in->exponents + in->exponent_count;
    for (int b = 0; b < SIMILARITY_CLASSES; ++b) {
        if (!(in->low_mask >> b & 1)) continue;
        dense_low_decoder *f = &d->low_decoders[b];
        if (!dense_load_states(in->low[b], f->states)) return DENSE_STATE;
        f->cursor = in->low[b] + 4 * NUM_STATES, f->end = f->cursor + 2 * in->num_low_units[b];
        f->entries = d->low_entries[b];
        d->next_low[b] = f->out = d->differences[b], f->out_end = f->out + in->low_count[b];
    }
    return DENSE_OK;
}

/* -- one row ------------------------------------------------------------------------------------------------------- */

/* Rotates row n to the position of row i: now, or a little after every few symbols of the row before. */
static void start_rotation(decoder *d, size_t i, size_t n) {
    const dense_shape *shape = &d->in->shape;
    size_t pairs = d->rotary.dims / 2;
    d->kernels->angles(d->rotary.frequencies, pairs, (uint64_t)d->positions[i] - d->positions[n], d->angles, d->cosines,
                       d->sines);
    d->interleaved.rotation = (dense_rotation_job){dense_row(&d->rows, n), d->rotated_bytes, d->cosines, d->sines,
                                                   shape->dtype, shape->heads, 0, shape->dim, pairs};
}

static void predict_row(decoder *d, size_t i) {
    const dense_shape *shape = &d->in->shape;
    size_t n = d->references[i];
    const uint8_t *row = dense_row(&d->rows, n);
    if (d->rotary.dims) {
        if (d->rotated_row != i) start_rotation(d, d->in->history + i, n);
        d->kernels->rotate(&d->interleaved.rotation, SIZE_MAX);
        row = d->rotated_bytes;
    }
    d->kernels->split(row, shape->words, shape->dtype, shape->base, d->predicted, d->predicted_low);
}

/* What can be done while the symbols of own row i are decoded. */
static void schedule_interleaved(decoder *d, size_t i) {
    size_t min_remaining = SIZE_MAX;
    d->interleaved.low_decoder = NULL;
    for (int b = 0; b < SIMILARITY_CLASSES; ++b) {
        const dense_low_decoder *f = &d->low_decoders[b];
        if (f->out == f->out_end || (size_t)(f->out - d->next_low[b]) >= min_remaining) continue;
        min_remaining = (size_t)(f->out - d->next_low[b]);
        d->interleaved.low_decoder = &d->low_decoders[b];
    }
    if (d->interleaved.stripes) d->interleaved.hash_end = d->words + (i * d->rows.row_bytes & ~(size_t)(STRIPE - 1));
    d->rotated_row = d->in->rows;
    if (!d->rotary.dims) return;
    size_t next_row = i + 1;
    while (next_row < d->in->rows && d->similarity_classes[next_row] == COPY_CLASS) ++next_row;
    if (next_row == d->in->rows || d->references[next_row] >= d->in->history + i) return;
    start_rotation(d, d->in->history + next_row, d->references[next_row]);
    d->rotated_row = next_row;
}

/* The folded symbols of a row; 0 where the units are used up too soon. */
static int decode_symbols(decoder *d, const uint32_t *const tables[256]) {
    const uint8_t *p = d->predicted;
    size_t words = d->in->shape.words, j = 0;
    if ((size_t)(d->units_end - d->units) >= 2 * words) { /* a symbol takes one unit at most */
        j = words & ~(size_t)3;
        d->kernels->decode(p, j, tables, d->states, &d->units, d->folded, &d->interleaved);
    }
    for (; j < words; ++j)
        if (!dense_decode_bounded(&d->states[j & 3], tables[p[j]], &d->folded[j], &d->units, d->units_end)) return 0;
    return 1;
}

/* Decodes `count` more coded low parts of a similarity class; 0 where the units are used up too soon. */
static int decode_low_parts(decoder *d, int similarity_class, size_t count) {
    dense_low_decoder *f = &d->low_decoders[similarity_class];
    const uint8_t *start = d->differences[similarity_class], *target_end = d->next_low[similarity_class] + count;
    if (target_end <= f->out) return 1;
    size_t remaining = (size_t)(f->out_end - f->out), n = (size_t)(target_end - f->out + 3) & ~(size_t)3;
    if (n > remaining) n = remaining;
    d->kernels->decode_low(f, n & ~(size_t)3);
    for (; f->out < target_end; ++f->out)
        if (!dense_decode_bounded(&f->states[(f->out - start) & 3], f->entries, f->out, &f->cursor, f->end)) return 0;
    return 1;
}

static int unfold_symbols(decoder *d) {
    size_t words = d->in->shape.words;
    const uint8_t *end = d->folded + words, *escape_pos = d->folded;
    if (!d->kernels->unfold(d->folded, d->predicted, words, d->symbols)) return 1;
    for (; (escape_pos = memchr(escape_pos, ESCAPE_SYMBOL, (size_t)(end - escape_pos))) != NULL;
         ++escape_pos) { /* a row has few */
        if (d->escape == d->escapes_end) return 0;
        d->symbols[escape_pos - d->folded] = *d->escape++;
    }
    return 1;
}

/* The low parts of a row, or NULL where they are used up too soon. */
static const uint8_t *read_low(decoder *d, int similarity_class) {
    size_t words = d->in->shape.words, num_remaining = (size_t)(d->low_rest_end - d->low_rest);
    const uint8_t *low = d->low_rest;
    if (!(d->in->low_mask >> similarity_class & 1)) {
        if (num_remaining < words) return NULL;
        d->low_rest += words;
        return low;
    }
    size_t num_equal = d->kernels->count_equal(d->symbols, d->predicted, words);
    const uint8_t *next_difference = d->next_low[similarity_class];
    if (num_equal > (size_t)(d->low_decoders[similarity_class].out_end - next_difference) ||
        words - num_equal > num_remaining)
        return NULL;
    if (!decode_low_parts(d, similarity_class, num_equal)) return NULL;
    const uint8_t mask = d->in->shape.dtype == KVMNN_FP16 ? 255 : 31;
    if (num_remaining - (words - num_equal) < PAD_BYTES) { /* there may be no bytes after the last ones */
        memcpy(d->low_scratch, low, num_remaining);
        low = d->low_scratch;
    }
    d->kernels->merge(next_difference, low, d->symbols, d->predicted, words, d->low);
    d->kernels->add_equal(d->predicted_low, d->symbols, d->predicted, mask, words, d->low);
    d->next_low[similarity_class] = next_difference + num_equal;
    d->low_rest += words - num_equal;
    return d->low;
}

static dense_error restore_exponents(decoder *d, uint8_t *words) {
    const dense_shape *shape = &d->in->shape;
    if (shape->dtype == KVMNN_FP16 || !d->kernels->has_outside_exponent(d->symbols, shape->words)) return DENSE_OK;
    words += shape->word_bytes - 2;
    for (size_t j = 0; j < shape->words; ++j, words += shape->word_bytes) {
        if (d->symbols[j] & 124) continue;
        if (d->exponent == d->exponents_end) return DENSE_ESCAPE;
        uint32_t e = *d->exponent++;
        if (e - (uint32_t)shape->base - 1 < EXPONENT_WINDOW) return DENSE_ESCAPE;
        uint16_t word = (uint16_t)((dense_load16(words) & 0x807f) | e << 7);
        memcpy(words, &word, 2);
    }
    return DENSE_OK;
}

static dense_error decode_row(decoder *d, size_t i) {
    const dense_shape *shape = &d->in->shape;
    size_t row_bytes = d->rows.row_bytes, n = d->in->history + i;
    uint8_t *words = d->words + i * row_bytes;
    int similarity_class = d->similarity_classes[i];
    if (similarity_class == COPY_CLASS) {
        memcpy(words, dense_row(&d->rows, d->references[i]), row_bytes);
        return DENSE_OK;
    }
    if (n == 0) {
        memset(d->predicted, 0, shape->words);
        memset(d->predicted_low, 0, shape->words);
    } else {
        predict_row(d, i);
    }
    schedule_interleaved(d, i);
    if (!decode_symbols(d, d->tables[similarity_class])) return DENSE_STATE;
    if (!unfold_symbols(d)) return DENSE_ESCAPE;
    const uint8_t *low = read_low(d, similarity_class);
    if (!low) return DENSE_LOW;
    d->kernels->join(d->symbols, low, d->tails, shape->words, shape->dtype, shape->base, words);
    if (shape->dtype == KVMNN_FP32) d->tails += 2 * shape->words;
    return restore_exponents(d, words);
}

static dense_error check_exhausted(const decoder *d) {
    if (d->units != d->units_end || !dense_states_are_final(d->states)) return DENSE_STATE;
    if (d->escape != d->escapes_end || d->exponent != d->exponents_end) return DENSE_ESCAPE;
    for (int b = 0; b < SIMILARITY_CLASSES; ++b) {
        const dense_low_decoder *f = &d->low_decoders[b];
        if (d->next_low[b] != f->out_end) return DENSE_LOW;
        if (f->out && (f->cursor != f->end || !dense_states_are_final(f->states))) return DENSE_STATE;
    }
    return d->low_rest == d->low_rest_end ? DENSE_OK : DENSE_LOW;
}

dense_error dense_decode(const dense_stream *in, const dense_kernels *kernels, const uint8_t *history,
                         const dense_table_set *table_set, uint8_t *scratch, uint8_t *words) {
    decoder storage, *d = &storage;
    allocate_parts(d, in, (dense_arena){.cursor = scratch});
    d->kernels = kernels;
    dense_error error = read_head(d, table_set);
    if (!error) error = open_sections(d);
    if (error) return error;
    size_t row_bytes = in->shape.words * in->shape.word_bytes;
    int is_interleaved = d->rotary.dims && d->rotary.interleaved;
    if (is_interleaved && in->history) {
        memcpy(d->history, history, in->history * row_bytes);
        dense_reorder_pairs(d->history, in->history, &in->shape, d->rotary.dims, 1, d->rotated_bytes);
        history = d->history;
    }
    d->words = words;
    d->rotated_row = in->rows;
    d->rows = (dense_rows){history, words, in->history, in->rows, row_bytes};
    uint64_t seed = dense_checksum_seed(in->header, (size_t)(in->head + in->head_bytes - in->payload));
    dense_hash_begin(&d->interleaved.hash, words, seed);
    d->interleaved.hash_end = words;
    d->interleaved.stripes = is_interleaved ? 0 : SYMBOL_STEP * in->shape.word_bytes / STRIPE;
    for (size_t i = 0; i < in->rows && !error; ++i) error = decode_row(d, i);
    if (!error) error = check_exhausted(d);
    if (error) return error;
    if (is_interleaved) dense_reorder_pairs(words, in->rows, &in->shape, d->rotary.dims, 0, d->rotated_bytes);
    uint64_t expected;
    memcpy(&expected, in->header + CHECKSUM_OFFSET, 8);
    return dense_hash_end(&d->interleaved.hash, in->rows * row_bytes) == expected ? DENSE_OK : DENSE_CHECKSUM;
}
