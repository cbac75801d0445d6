/* From rows of words to a dense stream (docs/format-v2.md).
 *
 * The stream's buffer has room for the words. What is coded backwards is put to its end, where nothing else comes
 * before it is known how much there is; then the stream is put together from its beginning. */
#include "encoder.h"

enum { FLAT_STEP = 4096 };

/* -- what is coded backwards --------------------------------------------------------------------------------------- */

/* Coded symbols: states and units, whose bytes lie somewhere. */
typedef struct {
    uint32_t states[STATES];
    uint8_t *units;
    size_t unit_bytes;
} coded;

static void begin(coded *c) {
    for (int i = 0; i < STATES; ++i) c->states[i] = STATE_LOW;
}

/* The symbols of a row that are coded as escapes, up to `to`; where they begin. NULL where a table has no code for
 * escapes. */
static uint8_t *take_escapes(const uint8_t *p, const uint8_t *s, size_t words, const uint32_t tables[256],
                             const dense_code *codes, const uint8_t *marks, uint8_t *to) {
    for (size_t j = words; j-- > 0;) {
        if (!marks[j / 4]) {
            j &= ~(size_t)3;
            continue;
        }
        const dense_code *code = &codes[tables[p[j]] / CODE_BYTES ^ s[j]];
        if (!(code->start & ESCAPE_MARK)) continue;
        if (code->f_shift == 0) return NULL;
        *--to = s[j];
    }
    return to;
}

/* Tables of contexts: by bucket and predicted symbol where codes of the table lie, with the sign to fold. */
static void lay_tables(const uint8_t *map, uint32_t tables[BUCKETS][256]) {
    for (int i = 0; i < BUCKETS * 256; ++i)
        tables[i / 256][i % 256] =
            (uint32_t)(map[i / 256 * MAGNITUDES + i % MAGNITUDES] << 8 ^ (i & 128)) * CODE_BYTES;
}

/* Units that end at `end` and begin at `least` or later; 0 where they would not. Escapes from `*escapes` back, where
 * they then begin. */
static int code_symbols(dense_encoder *e, const uint32_t tables[BUCKETS][256], const dense_code *codes,
                        const uint8_t *least, uint8_t *end, coded *c, uint8_t **escapes) {
    uint8_t *at = end, *marks = e->row;
    begin(c);
    for (size_t i = e->own; i-- > 0;) {
        if (e->buckets[i] == COPY) continue;
        const uint8_t *p = predicted(e, i), *s = own_symbols(e, i);
        const uint32_t *of = tables[e->buckets[i]];
        if ((size_t)(at - least) < 2 * e->words + 8) return 0;
        at = (uint8_t *)e->in->loops->code(p, s, e->words, of, codes, c->states, (uint16_t *)(void *)at, marks);
        *escapes = take_escapes(p, s, e->words, of, codes, marks, *escapes);
        if (!*escapes) return 0;
    }
    c->units = at, c->unit_bytes = (size_t)(end - at);
    return 1;
}

/* The same of symbols, which may lie at `least`: each makes room when it is coded. */
static int code_flat(const dense_loops *loops, const uint8_t *symbols, size_t n, const dense_code *codes,
                     const uint8_t *least, uint8_t *end, coded *c) {
    uint8_t *at = end, marks[FLAT_STEP / 4];
    begin(c);
    while (n > 0) {
        size_t step = (n - 1) % FLAT_STEP + 1, there = symbols == least ? n : 0;
        if ((size_t)(at - least) < there + 2 * step + 8) return 0;
        n -= step;
        at = (uint8_t *)loops->code(symbols, symbols + n, step, NULL, codes, c->states, (uint16_t *)(void *)at, marks);
    }
    c->units = at, c->unit_bytes = (size_t)(end - at);
    return 1;
}

/* -- sections ------------------------------------------------------------------------------------------------------ */

static uint8_t *put_varint(uint8_t *at, size_t value) {
    for (; value >= 128; value >>= 7) *at++ = (uint8_t)(value | 128);
    *at++ = (uint8_t)value;
    return at;
}

static uint8_t *put_bytes(uint8_t *at, const void *from, size_t n) {
    memmove(at, from, n);
    return at + n;
}

static uint8_t *put_coded(uint8_t *at, const coded *c) {
    at = put_bytes(at, c->states, sizeof c->states);
    return put_bytes(at, c->units, c->unit_bytes);
}

/* Exponents that symbols do not hold, to `at` if it is not NULL; how many. */
static size_t put_exponents(dense_encoder *e, uint8_t *at) {
    const dense_input *in = e->in;
    size_t count = 0, bytes = in->shape.word_bytes;
    if (in->shape.dtype == KVMNN_FP16) return 0;
    for (size_t i = 0; i < e->own; ++i) {
        const uint8_t *s = own_symbols(e, i), *words = dense_row(&in->rows, in->rows.history_rows + i) + bytes - 2;
        if (e->buckets[i] == COPY || !e->outside[in->rows.history_rows + i]) continue;
        for (size_t j = 0; j < e->words; ++j) {
            if (s[j] & 124) continue;
            if (at) at[count] = (uint8_t)(dense_load16(words + j * bytes) >> 7);
            ++count;
        }
    }
    return count;
}

/* Which buckets' low parts are coded. Their tables go into the model where it is the stream's own. */
static int choose_low(dense_encoder *e) {
    const dense_loops *loops = e->in->loops;
    const dense_table_set *set = e->in->set;
    float plain = e->in->shape.dtype == KVMNN_FP16 ? 8 : 5, least = 0.005f * plain * (float)(e->own * e->words);
    int mask = 0;
    for (int b = LOW_FROM; b < BUCKETS; ++b) {
        const uint32_t *of = e->low_counts[b];
        if (e->difference_count[b] == 0 || (set && !(set->model.low_mask >> b & 1))) continue;
        float bits = 160 + (set ? dense_cross_bits(loops, &set->model.low[b], of)
                                : dense_order0_bits(loops, of) + 3 * (plain == 8 ? 256 : 32));
        if (bits + (set ? 0 : least) >= plain * (float)e->difference_count[b]) continue;
        mask |= 1 << b;
        if (!set) dense_quantise(of, &e->model->low[b]);
    }
    return mask;
}

/* Low parts that are not coded; words are hashed while they are near. */
static uint8_t *put_low(dense_encoder *e, int mask, dense_hash *hash, uint8_t *at) {
    const dense_input *in = e->in;
    uint8_t rest[8 + PAD], *row = e->row_differences;
    size_t held = 0; /* of 8 that are packed together */
    for (size_t i = 0; i < e->own; ++i) {
        if (e->buckets[i] == COPY) continue;
        size_t count = e->words;
        dense_hash_to(hash, in->own + (i + 1) * in->rows.row_bytes);
        int as_it_is = in->shape.dtype == KVMNN_FP16 && !(mask >> e->buckets[i] & 1);
        const uint8_t *low = e->row_low;
        in->loops->split(dense_row(&in->rows, in->rows.history_rows + i), e->words, in->shape.dtype, in->shape.base,
                         NULL, as_it_is ? at : e->row_low);
        if (as_it_is) {
            at += count;
            continue;
        }
        if (mask >> e->buckets[i] & 1) {
            count = in->loops->pick(e->row_low, own_symbols(e, i), predicted(e, i), e->words, 0, row);
            low = row;
        }
        if (in->shape.dtype == KVMNN_FP16) {
            at = put_bytes(at, low, count);
            continue;
        }
        size_t first = held ? 8 - held < count ? 8 - held : count : 0;
        memcpy(rest + held, low, first);
        held += first;
        if (held == 8) {
            in->loops->pack5(rest, 8, at);
            at += 5, held = 0;
        }
        size_t whole = (count - first) & ~(size_t)7;
        in->loops->pack5(low + first, whole, at);
        at += whole / 8 * 5;
        if (first + whole < count) {
            held = count - first - whole;
            memcpy(rest, low + first + whole, held);
        }
    }
    if (held) in->loops->pack5(rest, held, at);
    return at + (5 * held + 7) / 8;
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

/* Tables of the stream's own, but for those of low parts. */
static void make_model(dense_encoder *e, size_t words) {
    size_t most = words / 1024;
    dense_count_contexts(e);
    most = most < 8 ? 8 : most > OWN_TABLES ? OWN_TABLES : most;
    dense_cluster(e->in->loops, e->counts, e->seen, (int)most, 0, e->cluster, e->model);
}

size_t dense_encode_out(const dense_input *in) {
    size_t step = in->shape.words > FLAT_STEP ? in->shape.words : FLAT_STEP;
    return HEADER_BYTES + in->rows.rows * in->rows.row_bytes + 2 * step + 8;
}

size_t dense_encode(const dense_input *in, uint8_t *room, uint8_t *out, size_t limit, uint32_t *references) {
    dense_encoder all, *e = &all;
    size_t words = 0, raw = in->rows.rows * in->rows.row_bytes, coded_low = 0;
    uint8_t *end = out + dense_encode_out(in);
    if (limit > HEADER_BYTES + raw) limit = HEADER_BYTES + raw;
    dense_lay_out(e, in, 1, (dense_arena){.at = room});
    e->differences[BUCKETS - 1] = out;
    dense_find_rows(e);
    if (references) memcpy(references, e->references, e->own * 4);
    for (size_t i = 0; i < e->own; ++i) words += e->buckets[i] == COPY ? 0 : e->words;
    const dense_model *model = in->set ? &in->set->model : e->model;
    dense_code(*codes)[256] = in->set ? (dense_code(*)[256])in->set->codes : e->codes;
    dense_code(*low_codes)[256] = in->set ? (dense_code(*)[256])in->set->low_codes : e->low_codes;
    if (!in->set) make_model(e, words);
    int mask = choose_low(e);
    if (!in->set) e->model->low_mask = (uint8_t)mask;
    size_t head = put_head(e);
    if (!in->set) {
        dense_settle_model(e->model);
        dense_prepare_codes(e->model, e->codes, e->low_codes);
    }

    coded symbols, low[BUCKETS];
    size_t size = HEADER_BYTES + 64 + head;
    for (int b = BUCKETS; b-- > LOW_FROM;) {
        if (!(mask >> b & 1)) continue;
        size_t count = e->difference_count[b];
        if (!code_flat(in->loops, e->differences[b], count, low_codes[b], out, end, &low[b])) return 0;
        end = low[b].units;
        size += 16 + low[b].unit_bytes;
        coded_low += count;
    }
    uint32_t tables[BUCKETS][256];
    lay_tables(model->map, tables);
    /* what is coded of low parts needs its differences no more */
    uint8_t *escapes_end = e->differences[LOW_FROM] + e->own * e->words, *escaped = escapes_end;
    if (!code_symbols(e, (const uint32_t(*)[256])tables, codes[0], out, end, &symbols, &escaped)) return 0;
    size_t escapes = (size_t)(escapes_end - escaped);
    size_t rest = words - coded_low, exponents = put_exponents(e, NULL);
    size_t rest_bytes = in->shape.dtype == KVMNN_FP16 ? rest : (5 * rest + 7) / 8;
    if (in->shape.dtype == KVMNN_FP32) rest_bytes += 2 * words;
    size += escapes + exponents + symbols.unit_bytes + rest_bytes;
    if (size >= limit) return 0;

    uint8_t *at = out + HEADER_BYTES;
    *at++ = (uint8_t)in->shape.base;
    *at++ = (uint8_t)mask;
    if (in->set) at = put_bytes(at, &in->set->id, 8);
    at = put_varint(at, in->rows.history_rows);
    at = put_varint(at, head);
    at = put_varint(at, exponents);
    at = put_varint(at, escapes);
    at = put_varint(at, symbols.unit_bytes / 2);
    for (int b = LOW_FROM; b < BUCKETS; ++b) {
        if (!(mask >> b & 1)) continue;
        at = put_varint(at, e->difference_count[b]);
        at = put_varint(at, low[b].unit_bytes / 2);
    }
    at = put_bytes(at, e->head, head);
    size_t control = (size_t)(at - out) - HEADER_BYTES;
    at += put_exponents(e, at);
    at = put_bytes(at, escaped, escapes);
    at = put_coded(at, &symbols);
    for (int b = LOW_FROM; b < BUCKETS; ++b)
        if (mask >> b & 1) at = put_coded(at, &low[b]);
    dense_put_header(out, &in->shape, 2, (in->rotary.dims ? 1 : 0) | (in->set ? 2 : 0), e->own,
                     (size_t)(at - out) - HEADER_BYTES + rest_bytes);
    dense_hash hash;
    dense_hash_begin(&hash, in->own, dense_seed(out, control));
    at = put_low(e, mask, &hash, at);
    at = put_tails(e, at);
    uint64_t checksum = dense_hash_end(&hash, raw);
    memcpy(out + CHECKSUM_AT, &checksum, 8);
    return (size_t)(at - out);
}
