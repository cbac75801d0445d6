/* What an encoder finds out about rows: symbols, references, predictions, counts. */
#include "encoder.h"

size_t dense_lay_out(dense_encoder *e, const dense_input *in, dense_arena a) {
    size_t words = in->shape.words, own = in->rows.rows, all = own + in->rows.history_rows, n = own * words;
    memset(e, 0, sizeof *e);
    e->in = in, e->words = words, e->own = own, e->all = all;
    e->symbols = dense_take(&a, all * words);
    e->low = dense_take(&a, all * words);
    if (in->rotary.dims) {
        e->turned_back = dense_take(&a, all * words);
        e->predicted = dense_take(&a, n);
        e->predicted_low = dense_take(&a, n);
        e->angles = dense_take(&a, in->rotary.dims / 2 * 4);
        e->cosines = dense_take(&a, in->rotary.dims / 2 * 4);
        e->sines = dense_take(&a, in->rotary.dims / 2 * 4);
    }
    e->nothing = dense_take(&a, words);
    e->outside = dense_take(&a, all);
    e->buckets = dense_take(&a, own);
    e->references = dense_take(&a, own * 4);
    e->counts = dense_take(&a, sizeof(uint32_t[CONTEXTS][256]));
    e->seen = dense_take(&a, CONTEXTS);
    e->cluster = dense_take(&a, dense_cluster_room());
    e->search = dense_take(&a, dense_search_room(all));
    e->model = dense_take(&a, sizeof(dense_model));
    e->codes = dense_take(&a, sizeof(dense_code[MOST_TABLES][256]));
    e->low_codes = dense_take(&a, sizeof(dense_code[BUCKETS][256]));
    e->row = dense_take(&a, in->rows.row_bytes);
    e->head = dense_take(&a, MODEL_BYTES + in->rotary.dims * 4 + own * 5 + all * 10);
    e->exponents = dense_take(&a, in->shape.dtype == KVMNN_FP16 ? 0 : n);
    e->escapes = dense_take(&a, n);
    e->low_rest = dense_take(&a, n);
    e->packed = in->shape.dtype == KVMNN_FP16 ? e->low_rest : dense_take(&a, n);
    e->units = dense_take(&a, n * 2);
    for (int b = LOW_FROM; b < BUCKETS; ++b) {
        e->differences[b] = dense_take(&a, n);
        e->low_units[b] = dense_take(&a, n * 2);
    }
    return a.used;
}

size_t dense_encode_room(const dense_input *in) {
    dense_encoder e;
    return dense_lay_out(&e, in, (dense_arena){0});
}

int dense_choose_base(const dense_input *in) {
    uint32_t counts[256] = {0}, sum = 0, most = 0;
    if (in->shape.dtype == KVMNN_FP16) return 0;
    size_t n = in->rows.rows * in->shape.words, step = n > 65536 ? 7 : 1, bytes = in->shape.word_bytes;
    for (size_t i = 0; i < n; i += step) ++counts[dense_load16(in->rows.own + (i + 1) * bytes - 2) >> 7 & 255];
    int last = WINDOW; /* of the window with most words, the uppermost of equal ones */
    for (int e = 1; e < 256; ++e) {
        sum += counts[e];
        if (e > WINDOW) sum -= counts[e - WINDOW];
        if (e >= WINDOW && e <= MOST_BASE + WINDOW && sum >= most) most = sum, last = e;
    }
    return last - WINDOW;
}

/* -- symbols, references, predictions ------------------------------------------------------------------------------ */

static void split_rows(dense_encoder *e) {
    const dense_input *in = e->in;
    for (size_t i = 0; i < e->all; ++i)
        e->outside[i] = (uint8_t)in->loops->split(dense_row(&in->rows, i), e->words, in->shape.dtype, in->shape.base,
                                                  e->symbols + i * e->words, e->low + i * e->words);
    memset(e->nothing, 0, e->words);
}

/* A row turned by `by` positions, as symbols and low parts. */
static void turn_row(dense_encoder *e, size_t row, uint64_t by, uint8_t *symbols, uint8_t *low) {
    const dense_input *in = e->in;
    size_t pairs = in->rotary.dims / 2;
    in->loops->angles(in->rotary.frequencies, pairs, by, e->angles, e->cosines, e->sines);
    in->loops->turn(dense_row(&in->rows, row), in->shape.dtype, in->shape.heads, in->shape.dim, pairs, e->cosines,
                    e->sines, e->row);
    in->loops->split(e->row, e->words, in->shape.dtype, in->shape.base, symbols, low);
}

static void find_references(dense_encoder *e) {
    const dense_input *in = e->in;
    const uint8_t *symbols = e->symbols;
    if (in->rotary.dims) {
        for (size_t i = 0; i < e->all; ++i) /* low parts are not looked at: they go where predictions will stand */
            turn_row(e, i, 0 - (uint64_t)in->positions[i], e->turned_back + i * e->words, e->predicted_low);
        symbols = e->turned_back;
    }
    dense_search(in->loops, symbols, e->words, in->rows.history_rows, e->own, in->known, e->search, e->references);
}

static uint8_t bucket_of(size_t equal, size_t words) {
    return equal * 8 < words ? 0 : equal * 4 < words ? 1 : equal * 2 < words ? 2 : equal * 4 < words * 3 ? 3 : 4;
}

static void predict(dense_encoder *e) {
    const dense_input *in = e->in;
    size_t history = in->rows.history_rows;
    for (size_t i = 0; i < e->own; ++i) {
        size_t n = history + i, reference = e->references[i];
        e->buckets[i] = 0;
        if (n == 0) continue;
        if (memcmp(dense_row(&in->rows, n), dense_row(&in->rows, reference), in->rows.row_bytes) == 0) {
            e->buckets[i] = COPY;
            continue;
        }
        if (e->predicted)
            turn_row(e, reference, (uint64_t)in->positions[n] - in->positions[reference], e->predicted + i * e->words,
                     e->predicted_low + i * e->words);
        e->buckets[i] = bucket_of(in->loops->equal(predicted(e, i), e->symbols + n * e->words, e->words), e->words);
    }
}

void dense_find_rows(dense_encoder *e) {
    split_rows(e);
    find_references(e);
    predict(e);
}

size_t dense_alike(const dense_input *in, uint8_t *room) {
    dense_encoder all, *e = &all;
    size_t sum = 0;
    dense_lay_out(e, in, (dense_arena){.at = room});
    dense_find_rows(e);
    for (size_t i = 0; i < e->own; ++i)
        sum += e->buckets[i] == COPY ? e->words : in->loops->equal(predicted(e, i), own_symbols(e, i), e->words);
    return sum;
}

void dense_count_contexts(dense_encoder *e) {
    memset(e->seen, 0, CONTEXTS);
    for (size_t i = 0; i < e->own; ++i) {
        if (e->buckets[i] == COPY) continue;
        const uint8_t *p = predicted(e, i);
        uint8_t *seen = e->seen + e->buckets[i] * MAGNITUDES;
        for (size_t j = 0; j < e->words; ++j) seen[p[j] & 127] = 1;
    }
    for (int c = 0; c < CONTEXTS; ++c) /* clearing all would be most of the work for short arrays */
        if (e->seen[c]) memset(e->counts[c], 0, sizeof e->counts[c]);
    for (size_t i = 0; i < e->own; ++i) {
        if (e->buckets[i] == COPY) continue;
        const uint8_t *p = predicted(e, i), *s = own_symbols(e, i);
        uint32_t(*counts)[256] = e->counts + e->buckets[i] * MAGNITUDES;
        for (size_t j = 0; j < e->words; ++j) ++counts[p[j] & 127][s[j] ^ (p[j] & 128)];
    }
}

size_t dense_collect_differences(dense_encoder *e, int bucket, uint32_t counts[256]) {
    uint8_t mask = e->in->shape.dtype == KVMNN_FP16 ? 255 : 31, *to = e->differences[bucket];
    size_t n = 0;
    memset(counts, 0, 256 * sizeof counts[0]);
    for (size_t i = 0; i < e->own; ++i) {
        if (e->buckets[i] != bucket) continue;
        const uint8_t *p = predicted(e, i), *s = own_symbols(e, i), *l = own_low(e, i), *pl = predicted_low(e, i);
        for (size_t j = 0; j < e->words; ++j) {
            to[n] = (uint8_t)(l[j] - pl[j]) & mask;
            uint32_t same = s[j] == p[j];
            counts[to[n]] += same;
            n += same;
        }
    }
    return n;
}
