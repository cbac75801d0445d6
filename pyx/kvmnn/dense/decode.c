/* From a dense stream to rows of words (docs/format-v2.md). Nothing of the stream is believed. */
#include "coding.h"

typedef struct {
    const dense_stream *in;
    const dense_loops *loops;
    const dense_model *model;
    const uint32_t (*entries)[SCALE], (*low_entries)[SCALE];
    dense_rotary rotary;
    dense_rows rows;
    uint8_t *words; /* of the own rows */
    /* parts of the room */
    uint8_t *buckets;
    uint32_t *references, *positions;
    uint64_t *frequencies;
    dense_model *own_model;
    uint32_t (*own_entries)[SCALE], (*own_low_entries)[SCALE];
    uint8_t *history; /* with pairs as halves */
    uint8_t *row;     /* a row of words, turned */
    uint8_t *predicted, *predicted_low, *folded, *symbols, *low, *coded;
    int32_t *angles;
    float *cosines, *sines;
    uint8_t *unpacked, *differences[BUCKETS];
    const uint32_t *tables[BUCKETS][256]; /* entries of a context's table, by the predicted symbol */
    dense_flat flats[BUCKETS];
    dense_beside beside;
    size_t ahead; /* the own row whose reference is turned meanwhile, behind the last one for none */
    /* what is left of the sections */
    uint32_t states[STATES];
    const uint8_t *units, *units_end, *escape, *escapes_end, *exponent, *exponents_end;
    const uint8_t *low_rest, *low_rest_end, *tails, *next[BUCKETS];
} decoder;

static size_t lay_out(decoder *d, const dense_stream *in, dense_arena a) {
    size_t words = in->shape.words, all = in->rows + in->history;
    int rotary = in->flags & 1, set = in->flags & 2;
    memset(d, 0, sizeof *d);
    d->in = in;
    d->buckets = dense_take(&a, in->rows);
    d->references = dense_take(&a, in->rows * 4);
    if (!set) {
        d->own_model = dense_take(&a, sizeof(dense_model));
        d->own_entries = dense_take(&a, sizeof(uint32_t[MOST_TABLES][SCALE]));
        d->own_low_entries = dense_take(&a, sizeof(uint32_t[BUCKETS][SCALE]));
    }
    if (rotary) {
        size_t pairs = in->shape.dim / 2;
        d->positions = dense_take(&a, all * 4);
        d->frequencies = dense_take(&a, pairs * 8);
        d->angles = dense_take(&a, pairs * 4);
        d->cosines = dense_take(&a, pairs * 4);
        d->sines = dense_take(&a, pairs * 4);
        d->history = dense_take(&a, in->history * words * in->shape.word_bytes);
        d->row = dense_take(&a, words * in->shape.word_bytes);
    }
    uint8_t **rows[] = {&d->predicted, &d->predicted_low, &d->folded, &d->symbols, &d->low, &d->coded};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) *rows[i] = dense_take(&a, words);
    if (in->shape.dtype != KVMNN_FP16) d->unpacked = dense_take(&a, in->rest_bytes / 5 * 8 + 64);
    for (int b = 0; b < BUCKETS; ++b)
        if (in->low_mask >> b & 1) d->differences[b] = dense_take(&a, in->low_count[b]);
    return a.used;
}

size_t dense_decode_room(const dense_stream *s) {
    decoder d;
    return lay_out(&d, s, (dense_arena){0});
}

/* -- before the first row ------------------------------------------------------------------------------------------ */

/* Whether the set is the one that the stream was made with, and fits its rows. */
static int fits(const dense_stream *in, const dense_table_set *set) {
    if (!(in->flags & 2)) return set == NULL;
    return set && set->id == in->set_id && set->dtype == in->shape.dtype && set->base == in->shape.base &&
           (set->rotary.dims != 0) == (in->flags & 1) && set->rotary.dims <= in->shape.dim;
}

static dense_error read_head(decoder *d, const dense_table_set *set) {
    const dense_stream *in = d->in;
    if (!fits(in, set)) return DENSE_MODEL;
    dense_reader r = {.at = in->head, .end = in->head + in->head_bytes};
    dense_error error = DENSE_OK;
    if (in->flags & 1) {
        if (set)
            d->rotary = set->rotary;
        else
            error = dense_get_rotary(&r, in->shape.dim, d->frequencies, &d->rotary);
        if (!error) error = dense_get_positions(&r, d->positions, in->rows + in->history);
    }
    if (error) return error;
    if (set) {
        if (in->low_mask & ~set->model.low_mask) return DENSE_MODEL;
        d->model = &set->model;
        d->entries = (const uint32_t(*)[SCALE])set->entries;
        d->low_entries = (const uint32_t(*)[SCALE])set->low_entries;
    } else {
        error = dense_get_model(&r, d->own_model);
        if (error) return error;
        if (in->low_mask & ~d->own_model->low_mask) return DENSE_MODEL;
        dense_prepare_entries(d->own_model, d->own_entries, d->own_low_entries);
        d->model = d->own_model;
        d->entries = (const uint32_t(*)[SCALE])d->own_entries;
        d->low_entries = (const uint32_t(*)[SCALE])d->own_low_entries;
    }
    error = dense_get_rows(&r, in->history, in->rows, d->buckets, d->references);
    if (error) return error;
    if (!dense_got_all(&r)) return DENSE_HEAD;
    for (int b = 0; b < BUCKETS; ++b)
        for (int s = 0; s < 256; ++s) d->tables[b][s] = d->entries[d->model->map[b * MAGNITUDES + (s & 127)]];
    return DENSE_OK;
}

static dense_error open_sections(decoder *d) {
    const dense_stream *in = d->in;
    size_t words = 0, coded = 0;
    for (size_t i = 0; i < in->rows; ++i) words += d->buckets[i] == COPY ? 0 : in->shape.words;
    for (int b = 0; b < BUCKETS; ++b) coded += in->low_count[b];
    if (coded > words) return DENSE_LOW;
    size_t low = words - coded, packed = in->shape.dtype == KVMNN_FP16 ? low : (5 * low + 7) / 8;
    if (in->rest_bytes != packed + (in->shape.dtype == KVMNN_FP32 ? 2 * words : 0)) return DENSE_SIZES;
    d->low_rest = in->rest;
    d->tails = in->rest + packed;
    if (in->shape.dtype != KVMNN_FP16) {
        if (5 * low % 8 && in->rest[packed - 1] >> 5 * low % 8) return DENSE_LOW;
        /* the last bytes are unpacked from a copy: what is behind them may not be read */
        size_t whole = packed > 16 ? (packed - 16) / 5 * 8 : 0;
        uint8_t last[64] = {0};
        d->loops->unpack5(in->rest, whole, d->unpacked);
        memcpy(last, in->rest + whole / 8 * 5, packed - whole / 8 * 5);
        d->loops->unpack5(last, low - whole, d->unpacked + whole);
        d->low_rest = d->unpacked;
    }
    d->low_rest_end = d->low_rest + low;
    if (!dense_load_states(in->symbols, d->states)) return DENSE_STATE;
    d->units = in->symbols + 4 * STATES, d->units_end = d->units + 2 * in->units;
    d->escape = in->escapes, d->escapes_end = in->escapes + in->escape_count;
    d->exponent = in->exponents, d->exponents_end = in->exponents + in->exponent_count;
    for (int b = 0; b < BUCKETS; ++b) {
        if (!(in->low_mask >> b & 1)) continue;
        dense_flat *f = &d->flats[b];
        if (!dense_load_states(in->low[b], f->states)) return DENSE_STATE;
        f->at = in->low[b] + 4 * STATES, f->end = f->at + 2 * in->low_units[b];
        f->entries = d->low_entries[b];
        d->next[b] = f->to = d->differences[b], f->to_end = f->to + in->low_count[b];
    }
    return DENSE_OK;
}

/* -- one row ------------------------------------------------------------------------------------------------------- */

/* Has row n turned to where row i is: now, or a little after every few symbols of the row before. */
static void begin_turning(decoder *d, size_t i, size_t n) {
    const dense_shape *shape = &d->in->shape;
    size_t pairs = d->rotary.dims / 2;
    d->loops->angles(d->rotary.frequencies, pairs, (uint64_t)d->positions[i] - d->positions[n], d->angles, d->cosines,
                     d->sines);
    d->beside.turning = (dense_turning){dense_row(&d->rows, n), d->row,        d->cosines, d->sines, shape->dtype,
                                        shape->heads,           0,             shape->dim, pairs};
}

static void predict(decoder *d, size_t i) {
    const dense_shape *shape = &d->in->shape;
    size_t n = d->references[i];
    const uint8_t *row = dense_row(&d->rows, n);
    if (d->rotary.dims) {
        if (d->ahead != i) begin_turning(d, d->in->history + i, n);
        d->loops->turn(&d->beside.turning, SIZE_MAX);
        row = d->row;
    }
    d->loops->split(row, shape->words, shape->dtype, shape->base, d->predicted, d->predicted_low);
}

/* What can be done while the symbols of own row i are decoded. */
static void choose_beside(decoder *d, size_t i) {
    size_t least = SIZE_MAX;
    d->beside.flat = NULL;
    for (int b = 0; b < BUCKETS; ++b) {
        const dense_flat *f = &d->flats[b];
        if (f->to == f->to_end || (size_t)(f->to - d->next[b]) >= least) continue;
        least = (size_t)(f->to - d->next[b]);
        d->beside.flat = &d->flats[b];
    }
    if (d->beside.stripes) d->beside.hash_end = d->words + (i * d->rows.row_bytes & ~(size_t)(STRIPE - 1));
    d->ahead = d->in->rows;
    if (!d->rotary.dims) return;
    size_t next = i + 1;
    while (next < d->in->rows && d->buckets[next] == COPY) ++next;
    if (next == d->in->rows || d->references[next] >= d->in->history + i) return;
    begin_turning(d, d->in->history + next, d->references[next]);
    d->ahead = next;
}

/* The folded symbols of a row; 0 where the units are used up too soon. */
static int take_symbols(decoder *d, const uint32_t *const tables[256]) {
    const uint8_t *p = d->predicted;
    size_t words = d->in->shape.words, j = 0;
    if ((size_t)(d->units_end - d->units) >= 2 * words) { /* a symbol takes one unit at most */
        j = words & ~(size_t)3;
        d->loops->decode(p, j, tables, d->states, &d->units, d->folded, &d->beside);
    }
    for (; j < words; ++j)
        if (!dense_decode_checked(&d->states[j & 3], tables[p[j]], &d->folded[j], &d->units, d->units_end)) return 0;
    return 1;
}

/* Has `count` more coded low parts of a bucket; 0 where the units are used up too soon. */
static int take_flat(decoder *d, int bucket, size_t count) {
    dense_flat *f = &d->flats[bucket];
    const uint8_t *begin = d->differences[bucket], *wanted = d->next[bucket] + count;
    if (wanted <= f->to) return 1;
    size_t left = (size_t)(f->to_end - f->to), n = (size_t)(wanted - f->to + 3) & ~(size_t)3;
    if (n > left) n = left;
    d->loops->flat(f, n & ~(size_t)3);
    for (; f->to < wanted; ++f->to)
        if (!dense_decode_checked(&f->states[(f->to - begin) & 3], f->entries, f->to, &f->at, f->end)) return 0;
    return 1;
}

static int unfold(decoder *d) {
    size_t words = d->in->shape.words;
    const uint8_t *end = d->folded + words, *at = d->folded;
    if (!d->loops->unfold(d->folded, d->predicted, words, d->symbols)) return 1;
    for (; (at = memchr(at, ESCAPE, (size_t)(end - at))) != NULL; ++at) { /* a row has few */
        if (d->escape == d->escapes_end) return 0;
        d->symbols[at - d->folded] = *d->escape++;
    }
    return 1;
}

/* The low parts of a row, or NULL where they are used up too soon. */
static const uint8_t *take_low(decoder *d, int bucket) {
    size_t words = d->in->shape.words, rest = (size_t)(d->low_rest_end - d->low_rest);
    const uint8_t *low = d->low_rest;
    if (!(d->in->low_mask >> bucket & 1)) {
        if (rest < words) return NULL;
        d->low_rest += words;
        return low;
    }
    size_t same = d->loops->equal(d->symbols, d->predicted, words);
    const uint8_t *next = d->next[bucket];
    if (same > (size_t)(d->flats[bucket].to_end - next) || words - same > rest) return NULL;
    if (!take_flat(d, bucket, same)) return NULL;
    const uint8_t mask = d->in->shape.dtype == KVMNN_FP16 ? 255 : 31;
    if (rest - (words - same) < PAD) { /* there may be no bytes behind the last ones */
        memcpy(d->coded, low, rest);
        low = d->coded;
    }
    d->loops->merge(next, low, d->symbols, d->predicted, words, d->low);
    d->loops->add_equal(d->predicted_low, d->symbols, d->predicted, mask, words, d->low);
    d->next[bucket] = next + same;
    d->low_rest += words - same;
    return d->low;
}

static dense_error put_exponents(decoder *d, uint8_t *words) {
    const dense_shape *shape = &d->in->shape;
    if (shape->dtype == KVMNN_FP16 || !d->loops->outside(d->symbols, shape->words)) return DENSE_OK;
    words += shape->word_bytes - 2;
    for (size_t j = 0; j < shape->words; ++j, words += shape->word_bytes) {
        if (d->symbols[j] & 124) continue;
        if (d->exponent == d->exponents_end) return DENSE_ESCAPE;
        uint32_t e = *d->exponent++;
        if (e - (uint32_t)shape->base - 1 < WINDOW) return DENSE_ESCAPE;
        uint16_t word = (uint16_t)((dense_load16(words) & 0x807f) | e << 7);
        memcpy(words, &word, 2);
    }
    return DENSE_OK;
}

static dense_error decode_row(decoder *d, size_t i) {
    const dense_shape *shape = &d->in->shape;
    size_t row_bytes = d->rows.row_bytes, n = d->in->history + i;
    uint8_t *words = d->words + i * row_bytes;
    int bucket = d->buckets[i];
    if (bucket == COPY) {
        memcpy(words, dense_row(&d->rows, d->references[i]), row_bytes);
        return DENSE_OK;
    }
    if (n == 0) {
        memset(d->predicted, 0, shape->words);
        memset(d->predicted_low, 0, shape->words);
    } else {
        predict(d, i);
    }
    choose_beside(d, i);
    if (!take_symbols(d, d->tables[bucket])) return DENSE_STATE;
    if (!unfold(d)) return DENSE_ESCAPE;
    const uint8_t *low = take_low(d, bucket);
    if (!low) return DENSE_LOW;
    d->loops->join(d->symbols, low, d->tails, shape->words, shape->dtype, shape->base, words);
    if (shape->dtype == KVMNN_FP32) d->tails += 2 * shape->words;
    return put_exponents(d, words);
}

static dense_error all_used(const decoder *d) {
    if (d->units != d->units_end || !dense_states_done(d->states)) return DENSE_STATE;
    if (d->escape != d->escapes_end || d->exponent != d->exponents_end) return DENSE_ESCAPE;
    for (int b = 0; b < BUCKETS; ++b) {
        const dense_flat *f = &d->flats[b];
        if (d->next[b] != f->to_end) return DENSE_LOW;
        if (f->to && (f->at != f->end || !dense_states_done(f->states))) return DENSE_STATE;
    }
    return d->low_rest == d->low_rest_end ? DENSE_OK : DENSE_LOW;
}

dense_error dense_decode(const dense_stream *in, const dense_loops *loops, const uint8_t *history,
                         const dense_table_set *set, uint8_t *room, uint8_t *words) {
    decoder all, *d = &all;
    lay_out(d, in, (dense_arena){.at = room});
    d->loops = loops;
    dense_error error = read_head(d, set);
    if (!error) error = open_sections(d);
    if (error) return error;
    size_t row_bytes = in->shape.words * in->shape.word_bytes;
    int apart = d->rotary.dims && d->rotary.interleaved;
    if (apart && in->history) {
        memcpy(d->history, history, in->history * row_bytes);
        dense_part_pairs(d->history, in->history, &in->shape, d->rotary.dims, 1, d->row);
        history = d->history;
    }
    d->words = words;
    d->ahead = in->rows;
    d->rows = (dense_rows){history, words, in->history, in->rows, row_bytes};
    uint64_t seed = dense_seed(in->header, (size_t)(in->head + in->head_bytes - in->payload));
    dense_hash_begin(&d->beside.hash, words, seed);
    d->beside.hash_end = words;
    d->beside.stripes = apart ? 0 : STEP * in->shape.word_bytes / STRIPE;
    for (size_t i = 0; i < in->rows && !error; ++i) error = decode_row(d, i);
    if (!error) error = all_used(d);
    if (error) return error;
    if (apart) dense_part_pairs(words, in->rows, &in->shape, d->rotary.dims, 0, d->row);
    uint64_t expected;
    memcpy(&expected, in->header + CHECKSUM_AT, 8);
    return dense_hash_end(&d->beside.hash, in->rows * row_bytes) == expected ? DENSE_OK : DENSE_CHECKSUM;
}
