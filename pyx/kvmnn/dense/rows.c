/* What an encoder finds out about rows: symbols, references, predictions, counts. */
#include "encoder.h"

enum {
    LEAST_TURNED = 128, /* words of a row, in search of a reference */
    FEW = 1 << 15       /* words that are counted without asking whether counters run over */
};

size_t dense_lay_out(dense_encoder *e, const dense_input *in, int keep, dense_arena a) {
    size_t words = in->shape.words, own = in->rows.rows, all = own + in->rows.history_rows;
    memset(e, 0, sizeof *e);
    e->in = in, e->words = words, e->own = own, e->all = all;
    e->symbols = dense_take(&a, all * words);
    if (in->rotary.dims) {
        e->turned = dense_take(&a, all * words);
        e->angles = dense_take(&a, in->rotary.dims / 2 * 4);
        e->cosines = dense_take(&a, in->rotary.dims / 2 * 4);
        e->sines = dense_take(&a, in->rotary.dims / 2 * 4);
    }
    e->nothing = dense_take(&a, words);
    e->outside = dense_take(&a, all);
    e->buckets = dense_take(&a, own);
    e->references = dense_take(&a, own * 4);
    e->counts = dense_take(&a, sizeof(uint32_t[CONTEXTS][256]));
    e->few_counts = dense_take(&a, sizeof(uint16_t[MAGNITUDES][256]));
    e->seen = dense_take(&a, CONTEXTS);
    e->cluster = dense_take(&a, dense_cluster_room());
    e->search = dense_take(&a, dense_search_room(all));
    e->model = dense_take(&a, sizeof(dense_model));
    e->codes = dense_take(&a, sizeof(dense_code[MOST_TABLES][256]));
    e->low_codes = dense_take(&a, sizeof(dense_code[BUCKETS][256]));
    e->row = dense_take(&a, in->rows.row_bytes);
    uint8_t **rows[] = {&e->row_symbols, &e->row_low, &e->row_predicted_low, &e->row_differences};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) *rows[i] = dense_take(&a, words);
    e->folded = dense_take(&a, words * 2);
    e->head = dense_take(&a, MODEL_BYTES + in->rotary.dims * 4 + own * 5 + all * 10);
    if (keep) e->differences[LOW_FROM] = dense_take(&a, own * words);
    return a.used;
}

size_t dense_encode_room(const dense_input *in) {
    dense_encoder e;
    return dense_lay_out(&e, in, 1, (dense_arena){0});
}

int dense_choose_base(const dense_input *in) {
    uint32_t counts[256] = {0}, sum = 0, most = 0;
    if (in->shape.dtype == KVMNN_FP16) return 0;
    size_t n = in->rows.rows * in->shape.words, step = n / 8192 | 1, bytes = in->shape.word_bytes;
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

/* The first heads of a row turned by `by` positions, as symbols and low parts. */
static void turn_row(dense_encoder *e, size_t row, uint64_t by, size_t heads, uint8_t *symbols, uint8_t *low) {
    const dense_input *in = e->in;
    size_t pairs = in->rotary.dims / 2;
    in->loops->angles(in->rotary.frequencies, pairs, by, e->angles, e->cosines, e->sines);
    dense_turning t = {dense_row(&in->rows, row), e->row, e->cosines, e->sines,      in->shape.dtype,
                       heads,                     0,      in->shape.dim, pairs};
    in->loops->turn(&t, SIZE_MAX);
    in->loops->split(e->row, heads * in->shape.dim, in->shape.dtype, in->shape.base, symbols, low);
}

/* Symbols of all rows, and references of the own ones. Of turned rows half of the heads tell nearly as much as all, in
 * half the time. */
static void find_references(dense_encoder *e) {
    const dense_input *in = e->in;
    size_t least = (LEAST_TURNED + in->shape.dim - 1) / in->shape.dim, heads = (in->shape.heads + 1) / 2;
    if (heads < least) heads = least < in->shape.heads ? least : in->shape.heads;
    size_t words = e->turned ? heads * in->shape.dim : e->words;
    memset(e->nothing, 0, e->words);
    for (size_t i = 0; i < e->all; ++i) {
        e->outside[i] = (uint8_t)in->loops->split(dense_row(&in->rows, i), e->words, in->shape.dtype, in->shape.base,
                                                  e->symbols + i * e->words, NULL);
        if (e->turned) turn_row(e, i, 0 - (uint64_t)in->positions[i], heads, e->turned + i * words, NULL);
    }
    dense_search(in->loops, e->turned ? e->turned : e->symbols, words, in->rows.history_rows, e->own, in->known,
                 e->search, e->references);
}

static uint8_t bucket_of(size_t equal, size_t words) {
    return equal * 8 < words ? 0 : equal * 4 < words ? 1 : equal * 2 < words ? 2 : equal * 4 < words * 3 ? 3 : 4;
}

/* Counters side by side: one would have to wait for itself where low parts come again and again. */
static void count_low(const uint8_t *low, size_t n, uint32_t counts[256]) {
    uint32_t parts[4][256] = {{0}};
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int k = 0; k < 4; ++k) ++parts[k][low[i + k]];
    for (; i < n; ++i) ++parts[0][low[i]];
    for (int s = 0; s < 256; ++s) counts[s] += parts[0][s] + parts[1][s] + parts[2][s] + parts[3][s];
}

/* Differences of low parts in a row of which `low` is predicted. */
static void take_differences(dense_encoder *e, size_t i, const uint8_t *symbols, const uint8_t *low) {
    const dense_input *in = e->in;
    const uint8_t mask = in->shape.dtype == KVMNN_FP16 ? 255 : 31, *own = own_symbols(e, i);
    int bucket = e->buckets[i];
    uint8_t *to = e->differences[bucket] ? e->differences[bucket] + e->difference_count[bucket] : e->row_differences;
    in->loops->split(dense_row(&in->rows, in->rows.history_rows + i), e->words, in->shape.dtype, in->shape.base,
                     NULL, e->row_low);
    in->loops->subtract(e->row_low, low, mask, e->words, e->row_symbols);
    size_t count = in->loops->pick(e->row_symbols, own, symbols, e->words, 1, to);
    e->difference_count[bucket] += count;
    if (!e->differences[bucket]) count_low(to, count, e->low_counts[bucket]);
}

static void predict(dense_encoder *e) {
    const dense_input *in = e->in;
    size_t history = in->rows.history_rows;
    for (size_t i = 0; i < e->own; ++i) {
        size_t n = history + i, reference = e->references[i];
        e->buckets[i] = 0;
        if (n == 0) continue;
        const uint8_t *row = dense_row(&in->rows, reference);
        if (memcmp(dense_row(&in->rows, n), row, in->rows.row_bytes) == 0) {
            e->buckets[i] = COPY;
            continue;
        }
        if (e->turned)
            turn_row(e, reference, (uint64_t)in->positions[n] - in->positions[reference], in->shape.heads,
                     e->turned + i * e->words, e->row_predicted_low);
        e->buckets[i] = bucket_of(in->loops->equal(predicted(e, i), own_symbols(e, i), e->words), e->words);
        if (e->buckets[i] < LOW_FROM) continue;
        if (!e->turned)
            in->loops->split(row, e->words, in->shape.dtype, in->shape.base, NULL, e->row_predicted_low);
        take_differences(e, i, predicted(e, i), e->row_predicted_low);
    }
    for (int b = LOW_FROM; b < BUCKETS; ++b)
        if (e->differences[b]) count_low(e->differences[b], e->difference_count[b], e->low_counts[b]);
}

void dense_find_rows(dense_encoder *e) {
    find_references(e);
    predict(e);
}

size_t dense_alike(const dense_input *in, uint8_t *room) {
    dense_encoder all, *e = &all;
    size_t sum = 0;
    dense_lay_out(e, in, 0, (dense_arena){.at = room});
    dense_find_rows(e);
    for (size_t i = 0; i < e->own; ++i)
        sum += e->buckets[i] == COPY ? e->words : in->loops->equal(predicted(e, i), own_symbols(e, i), e->words);
    return sum;
}

/* Moves what was counted of a bucket to its counts. */
static void move_counts(dense_encoder *e, int bucket) {
    for (int m = 0; m < MAGNITUDES; ++m) {
        uint32_t *restrict to = e->counts[bucket * MAGNITUDES + m];
        uint16_t *restrict from = e->few_counts[m], any = 0;
        uint8_t *seen = &e->seen[bucket * MAGNITUDES + m];
        for (int s = 0; s < 256; ++s) any |= from[s];
        if (!any) continue;
        if (*seen)
            for (int s = 0; s < 256; ++s) to[s] += from[s];
        else
            for (int s = 0; s < 256; ++s) to[s] = from[s];
        *seen = 1;
        memset(from, 0, sizeof e->few_counts[m]);
    }
}

void dense_count_contexts(dense_encoder *e) {
    memset(e->seen, 0, CONTEXTS);
    memset(e->few_counts, 0, sizeof(uint16_t[MAGNITUDES][256]));
    for (int b = 0; b < BUCKETS; ++b) { /* one after the other: their counts stay in the nearest cache */
        uint16_t *restrict few = e->few_counts[0];
        const uint16_t *folded = e->folded;
        size_t counted = 0;
        for (size_t i = 0; i < e->own; ++i) {
            if (e->buckets[i] != b) continue;
            e->in->loops->fold(predicted(e, i), own_symbols(e, i), e->words, e->folded);
            for (size_t j = 0, end; j < e->words; j = end) {
                end = e->words - j > FEW ? j + FEW : e->words;
                counted += end - j;
                if (counted > UINT16_MAX) {
                    move_counts(e, b);
                    counted = end - j;
                }
                for (size_t k = j; k < end; ++k) ++few[folded[k]];
            }
        }
        if (counted) move_counts(e, b);
    }
}
