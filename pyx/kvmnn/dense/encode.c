/* From rows of words to a dense stream (docs/format-v2.md). */
#include "encoder.h"

/* -- sections ------------------------------------------------------------------------------------------------------ */

typedef struct {
    uint32_t a, b, c, d;
    uint16_t *end;
} coder;

/* A row's symbols; tables: by predicted symbol, 256 times the number of its table, with the sign to fold. */
static void code_row(coder *state, const uint8_t *p, const uint8_t *s, size_t words, const uint16_t tables[256],
                     const dense_code *codes) {
    uint32_t a = state->a, b = state->b, c = state->c, d = state->d;
    uint16_t *end = state->end;
    size_t whole = words & ~(size_t)3;
    if (words - whole > 2) ENCODE(c, codes[tables[p[whole + 2]] ^ s[whole + 2]]);
    if (words - whole > 1) ENCODE(b, codes[tables[p[whole + 1]] ^ s[whole + 1]]);
    if (words - whole > 0) ENCODE(a, codes[tables[p[whole]] ^ s[whole]]);
    for (size_t j = whole; j > 0; j -= 4) {
        ENCODE(d, codes[tables[p[j - 1]] ^ s[j - 1]]);
        ENCODE(c, codes[tables[p[j - 2]] ^ s[j - 2]]);
        ENCODE(b, codes[tables[p[j - 3]] ^ s[j - 3]]);
        ENCODE(a, codes[tables[p[j - 4]] ^ s[j - 4]]);
    }
    *state = (coder){a, b, c, d, end};
}

/* The row with an escape in place of each symbol that its table does not have; these are put before `escape`. */
static const uint8_t *escape_row(dense_encoder *e, const uint8_t *p, const uint8_t *s, const uint16_t tables[256],
                                 const dense_code *codes, uint8_t **escape) {
    uint8_t *row = e->row;
    memcpy(row, s, e->words);
    for (size_t j = e->words; j-- > 0;) {
        uint32_t index = tables[p[j]] ^ s[j];
        if (codes[index].f_shift && (index & 255) != ESCAPE) continue;
        row[j] = ESCAPE ^ (p[j] & 128);
        *--*escape = s[j];
    }
    return row;
}

/* The escapes are written from the end back: `escapes_end` and how many there are. */
static uint16_t *code_symbols(dense_encoder *e, const uint8_t *map, const dense_code *codes, uint32_t states[STATES],
                              uint8_t *escapes_end, size_t *escape_count) {
    uint8_t *escape = escapes_end;
    uint16_t tables[BUCKETS][256];
    coder state = {STATE_LOW, STATE_LOW, STATE_LOW, STATE_LOW, e->units + e->own * e->words};
    for (int i = 0; i < BUCKETS * 256; ++i)
        tables[i / 256][i % 256] = (uint16_t)(map[i / 256 * MAGNITUDES + i % MAGNITUDES] << 8 ^ (i & 128));
    for (size_t i = e->own; i-- > 0;) {
        if (e->buckets[i] == COPY) continue;
        const uint8_t *p = predicted(e, i), *s = own_symbols(e, i);
        const uint16_t *of = tables[e->buckets[i]];
        if (e->in->set || e->in->loops->escapes(s, p, e->words)) s = escape_row(e, p, s, of, codes, &escape);
        code_row(&state, p, s, e->words, of, codes);
    }
    states[0] = state.a, states[1] = state.b, states[2] = state.c, states[3] = state.d;
    *escape_count = (size_t)(escapes_end - escape);
    return state.end;
}

static size_t collect_exponents(dense_encoder *e) {
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

/* Which buckets' low parts are coded. Their tables go into the model where it is the stream's own. */
static int choose_low(dense_encoder *e, size_t counts[BUCKETS]) {
    float plain = e->in->shape.dtype == KVMNN_FP16 ? 8 : 5, least = 0.005f * plain * (float)(e->own * e->words);
    const dense_table_set *set = e->in->set;
    int mask = 0;
    for (int b = LOW_FROM; b < BUCKETS; ++b) {
        uint32_t of[256];
        counts[b] = dense_collect_differences(e, b, of);
        if (counts[b] == 0 || (set && !(set->model.low_mask >> b & 1))) continue;
        float bits = 160 + (set ? dense_cross_bits(&set->model.low[b], of)
                                : dense_order0_bits(of) + 3 * (plain == 8 ? 256 : 32));
        if (bits + (set ? 0 : least) >= plain * (float)counts[b]) continue;
        mask |= 1 << b;
        if (!set) dense_quantise(of, &e->model->low[b]);
    }
    return mask;
}

static size_t collect_low(dense_encoder *e, int mask) {
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

/* -- the payload --------------------------------------------------------------------------------------------------- */

static uint8_t *put_varint(uint8_t *at, size_t value) {
    for (; value >= 128; value >>= 7) *at++ = (uint8_t)(value | 128);
    *at++ = (uint8_t)value;
    return at;
}

static uint8_t *put_bytes(uint8_t *at, const void *from, size_t n) {
    memcpy(at, from, n);
    return at + n;
}

static uint8_t *put_tails(dense_encoder *e, uint8_t *at) {
    if (e->in->shape.dtype != KVMNN_FP32) return at;
    for (size_t i = 0; i < e->own; ++i) {
        if (e->buckets[i] == COPY) continue;
        const uint8_t *words = dense_row(&e->in->rows, e->in->rows.history_rows + i);
        for (size_t j = 0; j < e->words; ++j, at += 2) memcpy(at, words + 4 * j, 2);
    }
    return at;
}

static size_t put_head(dense_encoder *e) {
    const dense_input *in = e->in;
    dense_writer w = {.at = e->head};
    if (in->rotary.dims && !in->set) dense_put_rotary(&w, &in->rotary);
    if (in->rotary.dims) dense_put_positions(&w, in->positions, e->all);
    if (!in->set) dense_put_model(&w, e->model);
    dense_put_rows(&w, in->rows.history_rows, e->own, e->buckets, e->references);
    return (size_t)(dense_put_end(&w) - e->head);
}

size_t dense_encode(const dense_input *in, uint8_t *room, uint8_t *out, size_t limit, uint32_t *references) {
    dense_encoder all, *e = &all;
    size_t counts[BUCKETS] = {0}, words = 0, exponents, escapes, coded = 0, low, packed;
    dense_lay_out(e, in, (dense_arena){.at = room});
    dense_find_rows(e);
    if (references) memcpy(references, e->references, e->own * 4);
    for (size_t i = 0; i < e->own; ++i) words += e->buckets[i] == COPY ? 0 : e->words;
    const dense_model *model = in->set ? &in->set->model : e->model;
    dense_code(*codes)[256] = in->set ? (dense_code(*)[256])in->set->codes : e->codes;
    dense_code(*low_codes)[256] = in->set ? (dense_code(*)[256])in->set->low_codes : e->low_codes;
    if (!in->set) {
        size_t most = words / 1024;
        dense_count_contexts(e);
        dense_cluster((const uint32_t(*)[256])e->counts, e->seen,
                      most < 8             ? 8
                      : most > MOST_TABLES ? MOST_TABLES
                                           : (int)most,
                      0, e->cluster, e->model);
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
    dense_put_header(out, &in->shape, 2, (in->rotary.dims ? 1 : 0) | (in->set ? 2 : 0), e->own,
                     (size_t)(at - out) - HEADER_BYTES);
    uint64_t checksum = dense_checksum(out, control, in->own, e->own * in->rows.row_bytes);
    memcpy(out + CHECKSUM_AT, &checksum, 8);
    return (size_t)(at - out);
}
