/* The outside of a dense stream: header, checksum, sections; and the order of words in a row. */
#include "coding.h"

void dense_put_header(uint8_t *header, const dense_shape *shape, int method, int flags, size_t rows, size_t payload) {
    uint16_t heads = (uint16_t)shape->heads, dim = (uint16_t)shape->dim;
    uint32_t tokens = (uint32_t)rows, bytes = (uint32_t)payload;
    memcpy(header, "KVMD", 4);
    header[4] = 1;
    header[5] = (uint8_t)method;
    header[6] = (uint8_t)shape->dtype;
    header[7] = (uint8_t)flags;
    memcpy(header + 8, &heads, 2);
    memcpy(header + 10, &dim, 2);
    memcpy(header + 12, &tokens, 4);
    memcpy(header + 16, &bytes, 4);
}

uint64_t dense_seed(const uint8_t *header, size_t control) {
    return kvmnn_xxh64(header + HEADER_BYTES, control, kvmnn_xxh64(header, CHECKSUM_AT, 0));
}

uint64_t dense_checksum(const uint8_t *header, size_t control, const uint8_t *words, size_t n) {
    return kvmnn_xxh64(words, n, dense_seed(header, control));
}

void dense_part_pairs(uint8_t *words, size_t rows, const dense_shape *shape, size_t dims, int apart, uint8_t *row) {
    size_t bytes = shape->word_bytes, half = dims / 2;
    for (size_t i = 0; i < rows * shape->heads; ++i, words += shape->dim * bytes) {
        memcpy(row, words, dims * bytes);
        for (size_t k = 0; k < half; ++k) {
            size_t first = apart ? 2 * k : k, second = apart ? 2 * k + 1 : half + k;
            size_t to_first = apart ? k : 2 * k, to_second = apart ? half + k : 2 * k + 1;
            memcpy(words + to_first * bytes, row + first * bytes, bytes);
            memcpy(words + to_second * bytes, row + second * bytes, bytes);
        }
    }
}

void dense_prepare_codes(const dense_model *m, dense_code codes[][256], dense_code low_codes[][256]) {
    dense_known_codes known = {{0}, {{0}}};
    for (int i = 0; i < m->tables; ++i) {
        dense_encoder_table(&m->symbols[i], &known, codes[i]);
        dense_mark_escapes(codes[i]);
    }
    for (int b = 0; b < BUCKETS; ++b)
        if (m->low_mask >> b & 1) dense_encoder_table(&m->low[b], &known, low_codes[b]);
}

void dense_prepare_entries(const dense_model *m, uint32_t entries[][SCALE], uint32_t low_entries[][SCALE]) {
    for (int i = 0; i < m->tables; ++i) dense_decoder_table(&m->symbols[i], entries[i]);
    for (int b = 0; b < BUCKETS; ++b)
        if (m->low_mask >> b & 1) dense_decoder_table(&m->low[b], low_entries[b]);
}

/* -- sections ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const uint8_t *at, *end;
    int bad;
} cursor;

static size_t varint(cursor *c) {
    uint64_t value = 0;
    for (int shift = 0; shift < 35; shift += 7) {
        if (c->at == c->end) break;
        uint8_t byte = *c->at++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            c->bad |= value >> 32 != 0;
            return (size_t)value;
        }
    }
    c->bad = 1;
    return 0;
}

static const uint8_t *section(cursor *c, size_t bytes) {
    const uint8_t *begin = c->at;
    if (c->bad || bytes > (size_t)(c->end - c->at)) {
        c->bad = 1;
        return begin;
    }
    c->at += bytes;
    return begin;
}

dense_error dense_parse(dense_stream *s) {
    cursor c = {s->payload, s->payload + s->payload_bytes, 0};
    const uint8_t *fixed = section(&c, s->flags & 2 ? 10 : 2);
    if (c.bad) return DENSE_SIZES;
    s->shape.base = fixed[0];
    s->low_mask = fixed[1];
    if (s->flags & 2) memcpy(&s->set_id, fixed + 2, 8);
    if (s->shape.base > (s->shape.dtype == KVMNN_FP16 ? 0 : MOST_BASE) || s->low_mask >> BUCKETS) return DENSE_SIZES;
    s->history = varint(&c);
    s->head_bytes = varint(&c);
    s->exponent_count = varint(&c);
    s->escape_count = varint(&c);
    s->units = varint(&c);
    for (int b = 0; b < BUCKETS; ++b) {
        if (!(s->low_mask >> b & 1)) continue;
        s->low_count[b] = varint(&c);
        s->low_units[b] = varint(&c);
    }
    s->head = section(&c, s->head_bytes);
    s->exponents = section(&c, s->exponent_count);
    s->escapes = section(&c, s->escape_count);
    s->symbols = section(&c, 4 * STATES + 2 * s->units);
    size_t words = s->rows * s->shape.words, coded = 0;
    for (int b = 0; b < BUCKETS; ++b) {
        if (!(s->low_mask >> b & 1)) continue;
        s->low[b] = section(&c, 4 * STATES + 2 * s->low_units[b]);
        coded += s->low_count[b];
        if (s->low_count[b] > words) return DENSE_SIZES;
    }
    s->rest = c.at;
    s->rest_bytes = (size_t)(c.end - c.at);
    if (c.bad || s->history > MOST_HISTORY || s->rows > MOST_ROWS - s->history || s->rows > 2 * s->head_bytes + 1 ||
        coded > words || s->exponent_count > words || s->escape_count > words)
        return DENSE_SIZES;
    return DENSE_OK;
}
