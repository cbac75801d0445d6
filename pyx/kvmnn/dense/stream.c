/* The outside of a dense stream: header, checksum, sections; and the order of words in a row. */
#include "codec.h"

void dense_write_header(uint8_t *header, const dense_shape *shape, int method, int flags, size_t rows, size_t payload) {
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

uint64_t dense_checksum_seed(const uint8_t *header, size_t control) {
    return kvmnn_xxh64(header + HEADER_BYTES, control, kvmnn_xxh64(header, CHECKSUM_OFFSET, 0));
}

uint64_t dense_checksum(const uint8_t *header, size_t control, const uint8_t *words, size_t n) {
    return kvmnn_xxh64(words, n, dense_checksum_seed(header, control));
}

void dense_reorder_pairs(uint8_t *words, size_t rows, const dense_shape *shape, size_t dims, int to_halves,
                         uint8_t *row) {
    size_t bytes = shape->word_bytes, half = dims / 2;
    for (size_t i = 0; i < rows * shape->heads; ++i, words += shape->dim * bytes) {
        memcpy(row, words, dims * bytes);
        for (size_t k = 0; k < half; ++k) {
            size_t first = to_halves ? 2 * k : k, second = to_halves ? 2 * k + 1 : half + k;
            size_t to_first = to_halves ? k : 2 * k, to_second = to_halves ? half + k : 2 * k + 1;
            memcpy(words + to_first * bytes, row + first * bytes, bytes);
            memcpy(words + to_second * bytes, row + second * bytes, bytes);
        }
    }
}

void dense_prepare_codes(const dense_model *m, dense_code codes[][256], dense_code low_codes[][256]) {
    dense_code_cache cache = {{0}, {{0}}};
    for (int i = 0; i < m->num_tables; ++i) {
        dense_build_encoder_table(&m->symbol_tables[i], &cache, codes[i]);
        dense_mark_escapes(codes[i]);
    }
    for (int b = 0; b < SIMILARITY_CLASSES; ++b)
        if (m->low_mask >> b & 1) dense_build_encoder_table(&m->low_tables[b], &cache, low_codes[b]);
}

void dense_prepare_entries(const dense_model *m, uint32_t entries[][SCALE], uint32_t low_entries[][SCALE]) {
    for (int i = 0; i < m->num_tables; ++i) dense_build_decoder_table(&m->symbol_tables[i], entries[i]);
    for (int b = 0; b < SIMILARITY_CLASSES; ++b)
        if (m->low_mask >> b & 1) dense_build_decoder_table(&m->low_tables[b], low_entries[b]);
}

/* -- sections ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const uint8_t *pos, *end;
    int is_bad;
} section_reader;

static size_t read_varint(section_reader *c) {
    uint64_t value = 0;
    for (int shift = 0; shift < 35; shift += 7) {
        if (c->pos == c->end) break;
        uint8_t byte = *c->pos++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            c->is_bad |= value >> 32 != 0;
            return (size_t)value;
        }
    }
    c->is_bad = 1;
    return 0;
}

static const uint8_t *take_section(section_reader *c, size_t bytes) {
    const uint8_t *start = c->pos;
    if (c->is_bad || bytes > (size_t)(c->end - c->pos)) {
        c->is_bad = 1;
        return start;
    }
    c->pos += bytes;
    return start;
}

dense_error dense_parse(dense_stream *s) {
    section_reader sections = {s->payload, s->payload + s->payload_bytes, 0};
    const uint8_t *prefix = take_section(&sections, s->flags & 2 ? 10 : 2);
    if (sections.is_bad) return DENSE_SIZES;
    s->shape.base = prefix[0];
    s->low_mask = prefix[1];
    if (s->flags & 2) memcpy(&s->set_id, prefix + 2, 8);
    if (s->shape.base > (s->shape.dtype == KVMNN_FP16 ? 0 : MAX_BASE) || s->low_mask >> SIMILARITY_CLASSES)
        return DENSE_SIZES;
    s->history = read_varint(&sections);
    s->head_bytes = read_varint(&sections);
    s->exponent_count = read_varint(&sections);
    s->escape_count = read_varint(&sections);
    s->num_units = read_varint(&sections);
    for (int b = 0; b < SIMILARITY_CLASSES; ++b) {
        if (!(s->low_mask >> b & 1)) continue;
        s->low_count[b] = read_varint(&sections);
        s->num_low_units[b] = read_varint(&sections);
    }
    s->head = take_section(&sections, s->head_bytes);
    s->exponents = take_section(&sections, s->exponent_count);
    s->escapes = take_section(&sections, s->escape_count);
    s->symbols = take_section(&sections, 4 * NUM_STATES + 2 * s->num_units);
    size_t words = s->rows * s->shape.words, num_coded = 0;
    for (int b = 0; b < SIMILARITY_CLASSES; ++b) {
        if (!(s->low_mask >> b & 1)) continue;
        s->low[b] = take_section(&sections, 4 * NUM_STATES + 2 * s->num_low_units[b]);
        num_coded += s->low_count[b];
        if (s->low_count[b] > words) return DENSE_SIZES;
    }
    s->uncoded_low = sections.pos;
    s->uncoded_low_bytes = (size_t)(sections.end - sections.pos);
    if (sections.is_bad || s->history > MAX_HISTORY_ROWS || s->rows > MAX_ROWS - s->history ||
        s->rows > 2 * s->head_bytes + 1 || num_coded > words || s->exponent_count > words || s->escape_count > words)
        return DENSE_SIZES;
    return DENSE_OK;
}
