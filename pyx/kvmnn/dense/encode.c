/* From rows of words to the payload of a dense stream (docs/format-v2.md). */
#include "coding.h"

typedef struct {
    const dense_input *in;
    size_t words, own, all;           /* words of a row; own rows; with history */
    uint8_t *symbols, *low;           /* [all][words] */
    uint8_t *turned_back;             /* [all][words]: symbols at position 0, with rotary */
    uint8_t *predicted, *predicted_low; /* [own][words], with rotary */
    uint8_t *nothing;                 /* a row of zeros */
    uint8_t *outside;                 /* [all]: the row has exponents that its symbols do not hold */
    uint8_t *buckets;                 /* [own] */
    uint32_t *references;             /* [own] */
    uint32_t (*counts)[256];          /* [CONTEXTS] */
    uint8_t *seen;                    /* [CONTEXTS] */
    void *cluster;
    uint8_t *search;
    dense_model *model;
    dense_code (*codes)[256], (*low_codes)[256];
    uint8_t *row;                     /* a row of words */
    int32_t *angles;
    float *cosines, *sines;
    uint16_t *indexes;                /* of a row's codes */
    uint8_t *head, *exponents, *escapes, *low_rest, *packed;
    uint16_t *units;
    uint8_t *differences[BUCKETS];
    uint16_t *low_units[BUCKETS];
} encoder;

enum { LOW_FROM = 3 }; /* buckets whose low parts may be coded: below, low parts of equal symbols do not repeat */

/* Takes all parts; with an arena that only counts, the sum of their sizes. */
static size_t lay_out(encoder *e, const dense_input *in, dense_arena a) {
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
    e->indexes = dense_take(&a, words * 2);
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
    encoder e;
    return lay_out(&e, in, (dense_arena){0});
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

/* -- symbols, references, predictions --------------------------------------------------------------------------------- */

static void split_rows(encoder *e) {
    const dense_input *in = e->in;
    for (size_t i = 0; i < e->all; ++i)
        e->outside[i] = (uint8_t)in->loops->split(dense_row(&in->rows, i), e->words, in->shape.dtype, in->shape.base,
                                                  e->symbols + i * e->words, e->low + i * e->words);
    memset(e->nothing, 0, e->words);
}

/* A row turned by `by` positions, as symbols and low parts. */
static void turn_row(encoder *e, size_t row, uint64_t by, uint8_t *symbols, uint8_t *low) {
    const dense_input *in = e->in;
    size_t pairs = in->rotary.dims / 2;
    in->loops->angles(in->rotary.frequencies, pairs, by, e->angles, e->cosines, e->sines);
    in->loops->turn(dense_row(&in->rows, row), in->shape.dtype, in->shape.heads, in->shape.dim, pairs, e->cosines,
                    e->sines, e->row);
    in->loops->split(e->row, e->words, in->shape.dtype, in->shape.base, symbols, low);
}

static void find_references(encoder *e) {
    const dense_input *in = e->in;
    const uint8_t *symbols = e->symbols;
    if (in->given) {
        memcpy(e->references, in->given, e->own * 4);
        return;
    }
    if (in->rotary.dims) {
        for (size_t i = 0; i < e->all; ++i) /* low parts are not looked at: they go where predictions will stand */
            turn_row(e, i, 0 - (uint64_t)in->positions[i], e->turned_back + i * e->words, e->predicted_low);
        symbols = e->turned_back;
    }
    dense_search(in->loops, symbols, e->words, in->rows.history_rows, e->own, in->known, e->search, e->references);
}

static const uint8_t *predicted(const encoder *e, size_t i) {
    if (i + e->in->rows.history_rows == 0) return e->nothing;
    return e->predicted ? e->predicted + i * e->words : e->symbols + e->references[i] * e->words;
}

static const uint8_t *predicted_low(const encoder *e, size_t i) {
    if (i + e->in->rows.history_rows == 0) return e->nothing;
    return e->predicted ? e->predicted_low + i * e->words : e->low + e->references[i] * e->words;
}

static uint8_t bucket_of(size_t equal, size_t words) {
    return equal * 8 < words ? 0 : equal * 4 < words ? 1 : equal * 2 < words ? 2 : equal * 4 < words * 3 ? 3 : 4;
}

static void predict(encoder *e) {
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

static const uint8_t *own_symbols(const encoder *e, size_t i) {
    return e->symbols + (e->in->rows.history_rows + i) * e->words;
}

static const uint8_t *own_low(const encoder *e, size_t i) {
    return e->low + (e->in->rows.history_rows + i) * e->words;
}

static void count_contexts(encoder *e) {
    memset(e->counts, 0, sizeof(uint32_t[CONTEXTS][256]));
    memset(e->seen, 0, CONTEXTS);
    for (size_t i = 0; i < e->own; ++i) {
        if (e->buckets[i] == COPY) continue;
        const uint8_t *p = predicted(e, i), *s = own_symbols(e, i);
        uint32_t(*counts)[256] = e->counts + e->buckets[i] * MAGNITUDES;
        uint8_t *seen = e->seen + e->buckets[i] * MAGNITUDES;
        for (size_t j = 0; j < e->words; ++j) {
            ++counts[p[j] & 127][s[j] ^ (p[j] & 128)];
            seen[p[j] & 127] = 1;
        }
    }
}

/* -- sections ------------------------------------------------------------------------------------------------------------ */

/* The escapes are written from the end back: `escapes_end` and how many there are. */
static uint16_t *code_symbols(encoder *e, const uint8_t *map, const dense_code *codes, uint32_t states[STATES],
                              uint8_t *escapes_end, size_t *escape_count) {
    size_t words = e->words;
    uint16_t *end = e->units + e->own * words;
    uint8_t *escape = escapes_end;
    uint32_t a = STATE_LOW, b = STATE_LOW, c = STATE_LOW, d = STATE_LOW;
    for (size_t i = e->own; i-- > 0;) {
        if (e->buckets[i] == COPY) continue;
        const uint8_t *p = predicted(e, i), *s = own_symbols(e, i), *tables = map + e->buckets[i] * MAGNITUDES;
        uint16_t *index = e->indexes;
        uint32_t escaped = 0;
        for (size_t j = 0; j < words; ++j) {
            uint32_t folded = s[j] ^ (p[j] & 128u);
            index[j] = (uint16_t)(tables[p[j] & 127] << 8 | folded);
            escaped |= (codes[index[j]].f_shift == 0) | (folded == ESCAPE);
        }
        if (escaped)
            for (size_t j = words; j-- > 0;) {
                if (codes[index[j]].f_shift && (index[j] & 255) != ESCAPE) continue;
                index[j] = (uint16_t)((index[j] & 0xff00) | ESCAPE);
                *--escape = s[j];
            }
        size_t whole = words & ~(size_t)3;
        if (words - whole > 2) ENCODE(c, codes[index[whole + 2]]);
        if (words - whole > 1) ENCODE(b, codes[index[whole + 1]]);
        if (words - whole > 0) ENCODE(a, codes[index[whole]]);
        for (size_t j = whole; j > 0; j -= 4) {
            ENCODE(d, codes[index[j - 1]]);
            ENCODE(c, codes[index[j - 2]]);
            ENCODE(b, codes[index[j - 3]]);
            ENCODE(a, codes[index[j - 4]]);
        }
    }
    states[0] = a, states[1] = b, states[2] = c, states[3] = d;
    *escape_count = (size_t)(escapes_end - escape);
    return end;
}

static size_t collect_exponents(encoder *e) {
    const dense_input *in = e->in;
    size_t count = 0, bytes = in->shape.word_bytes;
    if (in->shape.dtype == KVMNN_FP16) return 0;
    for (size_t i = 0; i < e->own; ++i) {
        const uint8_t *s = own_symbols(e, i), *words = dense_row(&in->rows, in->rows.history_rows + i) + bytes - 2;
        if (e->buckets[i] == COPY || !e->outside[in->rows.history_rows + i]) continue;
        for (size_t j = 0; j < e->words; ++j)
            if ((s[j] & 124) == 0) e->exponents[count++] = (uint8_t)(dense_load16(words + j * bytes) >> 7);
    }
    return count;
}

/* Differences of low parts under equal symbols in the rows of a bucket. */
static size_t collect_differences(encoder *e, int bucket, uint32_t counts[256]) {
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

/* Which buckets' low parts are coded. Their tables go into the model where it is the stream's own. */
static int choose_low(encoder *e, size_t counts[BUCKETS]) {
    float plain = e->in->shape.dtype == KVMNN_FP16 ? 8 : 5, least = 0.005f * plain * (float)(e->own * e->words);
    const dense_table_set *set = e->in->set;
    int mask = 0;
    for (int b = LOW_FROM; b < BUCKETS; ++b) {
        uint32_t of[256];
        counts[b] = collect_differences(e, b, of);
        if (counts[b] == 0 || (set && !(set->model.low_mask >> b & 1))) continue;
        float bits = 160 + (set ? dense_cross_bits(&set->model.low[b], of) : dense_order0_bits(of) + 3 * (plain == 8 ? 256 : 32));
        if (bits + (set ? 0 : least) >= plain * (float)counts[b]) continue;
        mask |= 1 << b;
        if (!set) dense_quantise(of, &e->model->low[b]);
    }
    return mask;
}

static size_t collect_low(encoder *e, int mask) {
    uint8_t *to = e->low_rest;
    for (size_t i = 0; i < e->own; ++i) {
        const uint8_t *l = own_low(e, i);
        if (e->buckets[i] == COPY) continue;
        if (!(mask >> e->buckets[i] & 1)) {
            memcpy(to, l, e->words);
            to += e->words;
            continue;
        }
        const uint8_t *p = predicted(e, i), *s = own_symbols(e, i);
        for (size_t j = 0; j < e->words; ++j) {
            *to = l[j];
            to += s[j] != p[j];
        }
    }
    return (size_t)(to - e->low_rest);
}

/* -- the payload ----------------------------------------------------------------------------------------------------------- */

static uint8_t *put_varint(uint8_t *at, size_t value) {
    for (; value >= 128; value >>= 7) *at++ = (uint8_t)(value | 128);
    *at++ = (uint8_t)value;
    return at;
}

static uint8_t *put_bytes(uint8_t *at, const void *from, size_t n) {
    memcpy(at, from, n);
    return at + n;
}

static uint8_t *put_tails(encoder *e, uint8_t *at) {
    if (e->in->shape.dtype != KVMNN_FP32) return at;
    for (size_t i = 0; i < e->own; ++i) {
        if (e->buckets[i] == COPY) continue;
        const uint8_t *words = dense_row(&e->in->rows, e->in->rows.history_rows + i);
        for (size_t j = 0; j < e->words; ++j, at += 2) memcpy(at, words + 4 * j, 2);
    }
    return at;
}

static size_t put_head(encoder *e) {
    const dense_input *in = e->in;
    dense_writer w = {.at = e->head};
    if (in->rotary.dims && !in->set) dense_put_rotary(&w, &in->rotary);
    if (in->rotary.dims) dense_put_positions(&w, in->positions, e->all);
    if (!in->set) dense_put_model(&w, e->model);
    dense_put_rows(&w, in->rows.history_rows, e->own, e->buckets, e->references);
    return (size_t)(dense_put_end(&w) - e->head);
}

static void find_rows(encoder *e) {
    split_rows(e);
    find_references(e);
    predict(e);
}

size_t dense_encode(const dense_input *in, uint8_t *room, uint8_t *out, size_t limit, uint32_t *references) {
    encoder all, *e = &all;
    size_t counts[BUCKETS] = {0}, words = 0, exponents, escapes, coded = 0, low, packed;
    lay_out(e, in, (dense_arena){.at = room});
    find_rows(e);
    if (references) memcpy(references, e->references, e->own * 4);
    for (size_t i = 0; i < e->own; ++i) words += e->buckets[i] == COPY ? 0 : e->words;
    const dense_model *model = in->set ? &in->set->model : e->model;
    dense_code(*codes)[256] = in->set ? (dense_code(*)[256])in->set->codes : e->codes;
    dense_code(*low_codes)[256] = in->set ? (dense_code(*)[256])in->set->low_codes : e->low_codes;
    if (!in->set) {
        size_t most = words / 1024;
        count_contexts(e);
        dense_cluster((const uint32_t(*)[256])e->counts, e->seen, most < 8 ? 8 : most > MOST_TABLES ? MOST_TABLES : (int)most, 1,
                      e->cluster, e->model);
    }
    int mask = choose_low(e, counts);
    if (!in->set) e->model->low_mask = (uint8_t)mask;
    size_t head = put_head(e);
    if (!in->set) {
        dense_settle_model(e->model);
        dense_prepare_codes(e->model, e->codes, e->low_codes);
    }

    uint32_t states[STATES], low_states[BUCKETS][STATES];
    uint16_t *units_end = e->units + e->own * e->words, *low_begin[BUCKETS];
    uint8_t *escapes_end = e->escapes + e->own * e->words;
    uint16_t *units = code_symbols(e, model->map, codes[0], states, escapes_end, &escapes);
    exponents = collect_exponents(e);
    size_t size = HEADER_BYTES + 64 + head + exponents + escapes + 2 * (size_t)(units_end - units);
    for (int b = LOW_FROM; b < BUCKETS; ++b) {
        if (!(mask >> b & 1)) continue;
        uint16_t *end = e->low_units[b] + e->own * e->words;
        low_begin[b] = dense_encode_flat(e->differences[b], counts[b], low_codes[b], low_states[b], end);
        size += 16 + 2 * (size_t)(end - low_begin[b]);
        coded += counts[b];
    }
    packed = low = words - coded;
    if (in->shape.dtype != KVMNN_FP16) packed = (5 * low + 7) / 8;
    size += packed + (in->shape.dtype == KVMNN_FP32 ? 2 * words : 0);
    if (size >= limit) return 0;
    collect_low(e, mask);
    if (in->shape.dtype != KVMNN_FP16) in->loops->pack5(e->low_rest, low, e->packed);

    uint8_t *at = out + HEADER_BYTES;
    *at++ = (uint8_t)in->shape.base;
    *at++ = (uint8_t)mask;
    if (in->set) at = put_bytes(at, &in->set->id, 8);
    at = put_varint(at, in->rows.history_rows);
    at = put_varint(at, head);
    at = put_varint(at, exponents);
    at = put_varint(at, escapes);
    at = put_varint(at, (size_t)(units_end - units));
    for (int b = LOW_FROM; b < BUCKETS; ++b) {
        if (!(mask >> b & 1)) continue;
        at = put_varint(at, counts[b]);
        at = put_varint(at, (size_t)(e->low_units[b] + e->own * e->words - low_begin[b]));
    }
    at = put_bytes(at, e->head, head);
    size_t control = (size_t)(at - out) - HEADER_BYTES;
    at = put_bytes(at, e->exponents, exponents);
    at = put_bytes(at, escapes_end - escapes, escapes);
    at = put_bytes(at, states, sizeof states);
    at = put_bytes(at, units, 2 * (size_t)(units_end - units));
    for (int b = LOW_FROM; b < BUCKETS; ++b) {
        if (!(mask >> b & 1)) continue;
        at = put_bytes(at, low_states[b], sizeof low_states[b]);
        at = put_bytes(at, low_begin[b], 2 * (size_t)(e->low_units[b] + e->own * e->words - low_begin[b]));
    }
    at = put_bytes(at, e->packed, packed);
    at = put_tails(e, at);
    dense_put_header(out, &in->shape, 2, (in->rotary.dims ? 1 : 0) | (in->set ? 2 : 0), e->own, (size_t)(at - out) - HEADER_BYTES);
    uint64_t checksum = dense_checksum(out, control, in->own, e->own * in->rows.row_bytes);
    memcpy(out + CHECKSUM_AT, &checksum, 8);
    return (size_t)(at - out);
}
