/* What an encoder finds out about rows: symbols, references, predictions, counts. */
#include "encoder.h"

enum {
    MIN_SEARCH_WORDS = 128,   /* words of a row, in search of a reference */
    UNCHECKED_WORDS = 1 << 15 /* words that are counted without asking whether counters run over */
};

size_t dense_allocate_parts(dense_encoder *e, const dense_input *in, int keep_differences, dense_arena a) {
    size_t words = in->shape.words, num_own = in->rows.rows, num_rows = num_own + in->rows.history_rows;
    memset(e, 0, sizeof *e);
    e->in = in, e->words = words, e->num_own = num_own, e->num_rows = num_rows;
    e->symbols = arena_alloc(&a, num_rows * words);
    if (in->rotary.dims) {
        e->rotated_symbols = arena_alloc(&a, num_rows * words);
        e->angles = arena_alloc(&a, in->rotary.dims / 2 * 4);
        e->cosines = arena_alloc(&a, in->rotary.dims / 2 * 4);
        e->sines = arena_alloc(&a, in->rotary.dims / 2 * 4);
    }
    e->zero_row = arena_alloc(&a, words);
    e->has_outside = arena_alloc(&a, num_rows);
    e->similarity_classes = arena_alloc(&a, num_own);
    e->references = arena_alloc(&a, num_own * 4);
    e->counts = arena_alloc(&a, sizeof(uint32_t[CONTEXTS][256]));
    e->small_counts = arena_alloc(&a, sizeof(uint16_t[MAGNITUDES][256]));
    e->is_seen = arena_alloc(&a, CONTEXTS);
    e->cluster_scratch = arena_alloc(&a, dense_cluster_scratch_bytes());
    e->search_scratch = arena_alloc(&a, dense_search_scratch_bytes(num_rows));
    e->model = arena_alloc(&a, sizeof(dense_model));
    e->codes = arena_alloc(&a, sizeof(dense_code[MAX_TABLES][256]));
    e->low_codes = arena_alloc(&a, sizeof(dense_code[SIMILARITY_CLASSES][256]));
    e->row = arena_alloc(&a, in->rows.row_bytes);
    uint8_t **rows[] = {&e->row_symbols, &e->row_low, &e->row_predicted_low, &e->row_differences};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) *rows[i] = arena_alloc(&a, words);
    e->folded = arena_alloc(&a, words * 2);
    e->head = arena_alloc(&a, MAX_MODEL_BYTES + in->rotary.dims * 4 + num_own * 5 + num_rows * 10);
    if (keep_differences) e->differences[FIRST_LOW_CLASS] = arena_alloc(&a, num_own * words);
    return a.used_bytes;
}

size_t dense_encode_scratch_bytes(const dense_input *in) {
    dense_encoder e;
    return dense_allocate_parts(&e, in, 1, (dense_arena){0});
}

int dense_choose_base(const dense_input *in) {
    uint32_t counts[256] = {0}, sum = 0, max_count = 0;
    if (in->shape.dtype == KVMNN_FP16) return 0;
    size_t n = in->rows.rows * in->shape.words, step = n / 8192 | 1, bytes = in->shape.word_bytes;
    for (size_t i = 0; i < n; i += step) ++counts[dense_load16(in->rows.own + (i + 1) * bytes - 2) >> 7 & 255];
    int window_end = EXPONENT_WINDOW; /* of the window with most words, the uppermost of equal ones */
    for (int e = 1; e < 256; ++e) {
        sum += counts[e];
        if (e > EXPONENT_WINDOW) sum -= counts[e - EXPONENT_WINDOW];
        if (e >= EXPONENT_WINDOW && e <= MAX_BASE + EXPONENT_WINDOW && sum >= max_count)
            max_count = sum, window_end = e;
    }
    return window_end - EXPONENT_WINDOW;
}

/* -- symbols, references, predictions ------------------------------------------------------------------------------ */

/* The first heads of a row rotated by `distance` positions, as symbols and low parts. */
static void rotate_row(dense_encoder *e, size_t row, uint64_t distance, size_t heads, uint8_t *symbols, uint8_t *low) {
    const dense_input *in = e->in;
    size_t pairs = in->rotary.dims / 2;
    in->kernels->angles(in->rotary.frequencies, pairs, distance, e->angles, e->cosines, e->sines);
    dense_rotation_job job = {dense_row(&in->rows, row), e->row, e->cosines, e->sines, in->shape.dtype, heads, 0,
                              in->shape.dim, pairs};
    in->kernels->rotate(&job, SIZE_MAX);
    in->kernels->split(e->row, heads * in->shape.dim, in->shape.dtype, in->shape.base, symbols, low);
}

/* Symbols of all rows, and references of the own ones. Of rotated rows half of the heads tell nearly as much as all, in
 * half the time. */
static void find_references(dense_encoder *e) {
    const dense_input *in = e->in;
    size_t min_heads = (MIN_SEARCH_WORDS + in->shape.dim - 1) / in->shape.dim, heads = (in->shape.heads + 1) / 2;
    if (heads < min_heads) heads = min_heads < in->shape.heads ? min_heads : in->shape.heads;
    size_t words = e->rotated_symbols ? heads * in->shape.dim : e->words;
    memset(e->zero_row, 0, e->words);
    for (size_t i = 0; i < e->num_rows; ++i) {
        e->has_outside[i] = (uint8_t)in->kernels->split(dense_row(&in->rows, i), e->words, in->shape.dtype,
                                                        in->shape.base, e->symbols + i * e->words, NULL);
        if (e->rotated_symbols)
            rotate_row(e, i, 0 - (uint64_t)in->positions[i], heads, e->rotated_symbols + i * words, NULL);
    }
    dense_search_references(in->kernels, e->rotated_symbols ? e->rotated_symbols : e->symbols, words,
                            in->rows.history_rows, e->num_own, in->reference_hints, e->search_scratch, e->references);
}

static uint8_t select_similarity_class(size_t equal, size_t words) {
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
static void collect_differences(dense_encoder *e, size_t i, const uint8_t *symbols, const uint8_t *low) {
    const dense_input *in = e->in;
    const uint8_t mask = in->shape.dtype == KVMNN_FP16 ? 255 : 31, *own_row = own_symbols(e, i);
    int similarity_class = e->similarity_classes[i];
    uint8_t *out = e->differences[similarity_class]
                       ? e->differences[similarity_class] + e->difference_count[similarity_class]
                       : e->row_differences;
    in->kernels->split(dense_row(&in->rows, in->rows.history_rows + i), e->words, in->shape.dtype, in->shape.base,
                       NULL, e->row_low);
    in->kernels->subtract(e->row_low, low, mask, e->words, e->row_symbols);
    size_t count = in->kernels->select_equal(e->row_symbols, own_row, symbols, e->words, 1, out);
    e->difference_count[similarity_class] += count;
    if (!e->differences[similarity_class]) count_low(out, count, e->low_counts[similarity_class]);
}

static void predict_rows(dense_encoder *e) {
    const dense_input *in = e->in;
    size_t history = in->rows.history_rows;
    for (size_t i = 0; i < e->num_own; ++i) {
        size_t n = history + i, reference = e->references[i];
        e->similarity_classes[i] = 0;
        if (n == 0) continue;
        const uint8_t *row = dense_row(&in->rows, reference);
        if (memcmp(dense_row(&in->rows, n), row, in->rows.row_bytes) == 0) {
            e->similarity_classes[i] = COPY_CLASS;
            continue;
        }
        if (e->rotated_symbols)
            rotate_row(e, reference, (uint64_t)in->positions[n] - in->positions[reference], in->shape.heads,
                       e->rotated_symbols + i * e->words, e->row_predicted_low);
        e->similarity_classes[i] = select_similarity_class(
            in->kernels->count_equal(predicted_symbols(e, i), own_symbols(e, i), e->words), e->words);
        if (e->similarity_classes[i] < FIRST_LOW_CLASS) continue;
        if (!e->rotated_symbols)
            in->kernels->split(row, e->words, in->shape.dtype, in->shape.base, NULL, e->row_predicted_low);
        collect_differences(e, i, predicted_symbols(e, i), e->row_predicted_low);
    }
    for (int b = FIRST_LOW_CLASS; b < SIMILARITY_CLASSES; ++b)
        if (e->differences[b]) count_low(e->differences[b], e->difference_count[b], e->low_counts[b]);
}

void dense_match_rows(dense_encoder *e) {
    find_references(e);
    predict_rows(e);
}

size_t dense_count_predicted(const dense_input *in, uint8_t *scratch) {
    dense_encoder storage, *e = &storage;
    size_t sum = 0;
    dense_allocate_parts(e, in, 0, (dense_arena){.cursor = scratch});
    dense_match_rows(e);
    for (size_t i = 0; i < e->num_own; ++i)
        sum += e->similarity_classes[i] == COPY_CLASS
                   ? e->words
                   : in->kernels->count_equal(predicted_symbols(e, i), own_symbols(e, i), e->words);
    return sum;
}

/* Moves what was counted of a similarity class to its counts. */
static void flush_counts(dense_encoder *e, int similarity_class) {
    for (int m = 0; m < MAGNITUDES; ++m) {
        uint32_t *restrict target = e->counts[similarity_class * MAGNITUDES + m];
        uint16_t *restrict source = e->small_counts[m], any_count = 0;
        uint8_t *is_seen = &e->is_seen[similarity_class * MAGNITUDES + m];
        for (int s = 0; s < 256; ++s) any_count |= source[s];
        if (!any_count) continue;
        if (*is_seen)
            for (int s = 0; s < 256; ++s) target[s] += source[s];
        else
            for (int s = 0; s < 256; ++s) target[s] = source[s];
        *is_seen = 1;
        memset(source, 0, sizeof e->small_counts[m]);
    }
}

void dense_count_contexts(dense_encoder *e) {
    memset(e->is_seen, 0, CONTEXTS);
    memset(e->small_counts, 0, sizeof(uint16_t[MAGNITUDES][256]));
    for (int b = 0; b < SIMILARITY_CLASSES; ++b) { /* one after the other: their counts stay in the nearest cache */
        uint16_t *restrict small_counts = e->small_counts[0];
        const uint16_t *folded = e->folded;
        size_t num_counted = 0;
        for (size_t i = 0; i < e->num_own; ++i) {
            if (e->similarity_classes[i] != b) continue;
            e->in->kernels->fold(predicted_symbols(e, i), own_symbols(e, i), e->words, e->folded);
            for (size_t j = 0, end; j < e->words; j = end) {
                end = e->words - j > UNCHECKED_WORDS ? j + UNCHECKED_WORDS : e->words;
                num_counted += end - j;
                if (num_counted > UINT16_MAX) {
                    flush_counts(e, b);
                    num_counted = end - j;
                }
                for (size_t k = j; k < end; ++k) ++small_counts[folded[k]];
            }
        }
        if (num_counted) flush_counts(e, b);
    }
}
