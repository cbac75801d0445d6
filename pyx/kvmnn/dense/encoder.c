/* From rows of words to a dense stream (docs/format-v2.md).
 *
 * The stream's buffer has room for the words. What is coded backwards is put to its end, where nothing else comes
 * before it is known how much there is; then the stream is put together from its beginning. */

/* A reference is context and is never subtracted. Rows of K are rotated by the distance of two positions, in binary32
 * with every operation specified, and the result only chooses tables: a wrong guess costs bits. No operation meets a
 * subnormal, an infinity or a NaN, so the floating-point flags of the host change nothing. The self-test's hash of
 * its streams is the same under GCC, Clang, SSE2, AVX2 and aarch64. */
#include "encoder.h"

enum { LOW_STEP_SYMBOLS = 4096 };

/* -- what is coded backwards --------------------------------------------------------------------------------------- */

/* Coded symbols: states and units, whose bytes lie somewhere. */
typedef struct {
    uint32_t states[NUM_STATES];
    uint8_t *units;
    size_t unit_bytes;
} coded_section;

static void init_states(coded_section *c) {
    for (int i = 0; i < NUM_STATES; ++i) c->states[i] = RANS_LOWER_BOUND;
}

/* The symbols of a row that are coded as escapes, up to `out`; where they begin. NULL where a table has no code for
 * escapes. */
static uint8_t *collect_escapes(const uint8_t *p, const uint8_t *s, size_t words, const uint32_t tables[256],
                                const dense_code *codes, const uint8_t *marks, uint8_t *out) {
    for (size_t j = words; j-- > 0;) {
        if (!marks[j / 4]) {
            j &= ~(size_t)3;
            continue;
        }
        const dense_code *code = &codes[tables[p[j]] / CODE_BYTES ^ s[j]];
        if (!(code->start & ESCAPE_MARK)) continue;
        if (code->f_shift == 0) return NULL;
        *--out = s[j];
    }
    return out;
}

/* Tables of contexts: by similarity class and predicted symbol where codes of the table lie, with the sign to fold. */
static void build_context_codes(const uint8_t *map, uint32_t tables[SIMILARITY_CLASSES][256]) {
    for (int i = 0; i < SIMILARITY_CLASSES * 256; ++i)
        tables[i / 256][i % 256] =
            (uint32_t)(map[i / 256 * MAGNITUDES + i % MAGNITUDES] << 8 ^ (i & 128)) * CODE_BYTES;
}

/* Units that end at `end` and begin at `lower_bound` or later; 0 where they would not. Escapes from `*escapes` back,
 * where they then begin. */
static int encode_symbols(dense_encoder *e, const uint32_t tables[SIMILARITY_CLASSES][256], const dense_code *codes,
                          const uint8_t *lower_bound, uint8_t *end, coded_section *c, uint8_t **escapes) {
    uint8_t *out = end, *marks = e->row;
    init_states(c);
    for (size_t i = e->num_own; i-- > 0;) {
        if (e->similarity_classes[i] == COPY_CLASS) continue;
        const uint8_t *p = predicted_symbols(e, i), *s = own_symbols(e, i);
        const uint32_t *table = tables[e->similarity_classes[i]];
        if ((size_t)(out - lower_bound) < 2 * e->words + 8) return 0;
        out =
            (uint8_t *)e->in->kernels->encode(p, s, e->words, table, codes, c->states, (uint16_t *)(void *)out, marks);
        *escapes = collect_escapes(p, s, e->words, table, codes, marks, *escapes);
        if (!*escapes) return 0;
    }
    c->units = out, c->unit_bytes = (size_t)(end - out);
    return 1;
}

/* The same of symbols, which may lie at `lower_bound`: each makes room when it is coded. */
static int encode_low(const dense_kernels *kernels, const uint8_t *symbols, size_t n, const dense_code *codes,
                      const uint8_t *lower_bound, uint8_t *end, coded_section *c) {
    uint8_t *out = end, marks[LOW_STEP_SYMBOLS / 4];
    init_states(c);
    while (n > 0) {
        size_t step = (n - 1) % LOW_STEP_SYMBOLS + 1, num_blocked = symbols == lower_bound ? n : 0;
        if ((size_t)(out - lower_bound) < num_blocked + 2 * step + 8) return 0;
        n -= step;
        out = (uint8_t *)kernels->encode(symbols, symbols + n, step, NULL, codes, c->states, (uint16_t *)(void *)out,
                                         marks);
    }
    c->units = out, c->unit_bytes = (size_t)(end - out);
    return 1;
}

/* -- sections ------------------------------------------------------------------------------------------------------ */

static uint8_t *write_varint(uint8_t *out, size_t value) {
    for (; value >= 128; value >>= 7) *out++ = (uint8_t)(value | 128);
    *out++ = (uint8_t)value;
    return out;
}

static uint8_t *write_bytes(uint8_t *out, const void *src, size_t n) {
    memmove(out, src, n);
    return out + n;
}

static uint8_t *write_section(uint8_t *out, const coded_section *c) {
    out = write_bytes(out, c->states, sizeof c->states);
    return write_bytes(out, c->units, c->unit_bytes);
}

/* Exponents that symbols do not hold, to `out` if it is not NULL; how many. */
static size_t write_exponents(dense_encoder *e, uint8_t *out) {
    const dense_input *in = e->in;
    size_t count = 0, bytes = in->shape.word_bytes;
    if (in->shape.dtype == KVMNN_FP16) return 0;
    for (size_t i = 0; i < e->num_own; ++i) {
        const uint8_t *s = own_symbols(e, i), *words = dense_row(&in->rows, in->rows.history_rows + i) + bytes - 2;
        if (e->similarity_classes[i] == COPY_CLASS || !e->has_outside[in->rows.history_rows + i]) continue;
        for (size_t j = 0; j < e->words; ++j) {
            if (s[j] & 124) continue;
            if (out) out[count] = (uint8_t)(dense_load16(words + j * bytes) >> 7);
            ++count;
        }
    }
    return count;
}

/* Of which similarity classes low parts are coded. Their tables go into the model where it is the stream's own. */
static int select_low_classes(dense_encoder *e) {
    const dense_kernels *kernels = e->in->kernels;
    const dense_table_set *table_set = e->in->table_set;
    float raw_bits = e->in->shape.dtype == KVMNN_FP16 ? 8 : 5,
          min_gain = 0.005f * raw_bits * (float)(e->num_own * e->words);
    int mask = 0;
    for (int b = FIRST_LOW_CLASS; b < SIMILARITY_CLASSES; ++b) {
        const uint32_t *counts = e->low_counts[b];
        if (e->difference_count[b] == 0 || (table_set && !(table_set->model.low_mask >> b & 1))) continue;
        float bits = 160 + (table_set ? dense_cross_bits(kernels, &table_set->model.low_tables[b], counts)
                                : dense_order0_bits(kernels, counts) + 3 * (raw_bits == 8 ? 256 : 32));
        if (bits + (table_set ? 0 : min_gain) >= raw_bits * (float)e->difference_count[b]) continue;
        mask |= 1 << b;
        if (!table_set) dense_quantize_frequencies(counts, &e->model->low_tables[b]);
    }
    return mask;
}

/* Low parts that are not coded; words are hashed while they are near. */
static uint8_t *write_low(dense_encoder *e, int mask, dense_hash *hash, uint8_t *out) {
    const dense_input *in = e->in;
    uint8_t pack_buffer[8 + PAD_BYTES], *selected = e->row_differences;
    size_t num_buffered = 0; /* of 8 that are packed together */
    for (size_t i = 0; i < e->num_own; ++i) {
        if (e->similarity_classes[i] == COPY_CLASS) continue;
        size_t count = e->words;
        dense_hash_to(hash, in->original_rows + (i + 1) * in->rows.row_bytes);
        int is_raw = in->shape.dtype == KVMNN_FP16 && !(mask >> e->similarity_classes[i] & 1);
        const uint8_t *low = e->row_low;
        in->kernels->split(dense_row(&in->rows, in->rows.history_rows + i), e->words, in->shape.dtype, in->shape.base,
                           NULL, is_raw ? out : e->row_low);
        if (is_raw) {
            out += count;
            continue;
        }
        if (mask >> e->similarity_classes[i] & 1) {
            count = in->kernels->select_equal(e->row_low, own_symbols(e, i), predicted_symbols(e, i), e->words, 0,
                                              selected);
            low = selected;
        }
        if (in->shape.dtype == KVMNN_FP16) {
            out = write_bytes(out, low, count);
            continue;
        }
        size_t num_first = num_buffered ? 8 - num_buffered < count ? 8 - num_buffered : count : 0;
        memcpy(pack_buffer + num_buffered, low, num_first);
        num_buffered += num_first;
        if (num_buffered == 8) {
            in->kernels->pack5(pack_buffer, 8, out);
            out += 5, num_buffered = 0;
        }
        size_t num_packed = (count - num_first) & ~(size_t)7;
        in->kernels->pack5(low + num_first, num_packed, out);
        out += num_packed / 8 * 5;
        if (num_first + num_packed < count) {
            num_buffered = count - num_first - num_packed;
            memcpy(pack_buffer, low + num_first + num_packed, num_buffered);
        }
    }
    if (num_buffered) in->kernels->pack5(pack_buffer, num_buffered, out);
    return out + (5 * num_buffered + 7) / 8;
}

static uint8_t *write_tails(dense_encoder *e, uint8_t *out) {
    if (e->in->shape.dtype != KVMNN_FP32) return out;
    for (size_t i = 0; i < e->num_own; ++i) {
        if (e->similarity_classes[i] == COPY_CLASS) continue;
        const uint8_t *words = dense_row(&e->in->rows, e->in->rows.history_rows + i);
        for (size_t j = 0; j < e->words; ++j, out += 2) memcpy(out, words + 4 * j, 2);
    }
    return out;
}

static size_t write_head(dense_encoder *e) {
    const dense_input *in = e->in;
    bitwriter w = {.cursor = e->head};
    if (in->rotary.dims && !in->table_set) dense_write_rotary(&w, &in->rotary);
    if (in->rotary.dims) dense_write_positions(&w, in->positions, e->num_rows);
    if (!in->table_set) dense_write_model(&w, e->model);
    dense_write_row_references(&w, in->rows.history_rows, e->num_own, e->similarity_classes, e->references);
    return (size_t)(bitwriter_finish(&w) - e->head);
}

/* Tables of the stream's own, but for those of low parts. */
static void build_model(dense_encoder *e, size_t words) {
    size_t max_tables = words / 1024;
    dense_count_contexts(e);
    max_tables = max_tables < 8 ? 8 : max_tables > MAX_OWN_TABLES ? MAX_OWN_TABLES : max_tables;
    dense_cluster_contexts(e->in->kernels, e->counts, e->is_seen, (int)max_tables, 0, e->cluster_scratch, e->model);
}

size_t dense_encode_capacity(const dense_input *in) {
    size_t step = in->shape.words > LOW_STEP_SYMBOLS ? in->shape.words : LOW_STEP_SYMBOLS;
    return HEADER_BYTES + in->rows.rows * in->rows.row_bytes + 2 * step + 8;
}

size_t dense_encode(const dense_input *in, uint8_t *scratch, uint8_t *out, size_t limit, uint32_t *references) {
    dense_encoder storage, *e = &storage;
    size_t words = 0, raw_bytes = in->rows.rows * in->rows.row_bytes, num_coded_low = 0;
    uint8_t *end = out + dense_encode_capacity(in);
    if (limit > HEADER_BYTES + raw_bytes) limit = HEADER_BYTES + raw_bytes;
    dense_allocate_parts(e, in, 1, (dense_arena){.cursor = scratch});
    e->differences[SIMILARITY_CLASSES - 1] = out;
    dense_match_rows(e);
    if (references) memcpy(references, e->references, e->num_own * 4);
    for (size_t i = 0; i < e->num_own; ++i) words += e->similarity_classes[i] == COPY_CLASS ? 0 : e->words;
    const dense_model *model = in->table_set ? &in->table_set->model : e->model;
    dense_code(*codes)[256] = in->table_set ? (dense_code(*)[256])in->table_set->codes : e->codes;
    dense_code(*low_codes)[256] = in->table_set ? (dense_code(*)[256])in->table_set->low_codes : e->low_codes;
    if (!in->table_set) build_model(e, words);
    int mask = select_low_classes(e);
    if (!in->table_set) e->model->low_mask = (uint8_t)mask;
    size_t head = write_head(e);
    if (!in->table_set) {
        dense_normalize_model(e->model);
        dense_prepare_codes(e->model, e->codes, e->low_codes);
    }

    coded_section symbols, low[SIMILARITY_CLASSES];
    size_t size = HEADER_BYTES + 64 + head;
    for (int b = SIMILARITY_CLASSES; b-- > FIRST_LOW_CLASS;) {
        if (!(mask >> b & 1)) continue;
        size_t count = e->difference_count[b];
        if (!encode_low(in->kernels, e->differences[b], count, low_codes[b], out, end, &low[b])) return 0;
        end = low[b].units;
        size += 16 + low[b].unit_bytes;
        num_coded_low += count;
    }
    uint32_t tables[SIMILARITY_CLASSES][256];
    build_context_codes(model->context_tables, tables);
    /* what is coded of low parts needs its differences no more */
    uint8_t *escapes_end = e->differences[FIRST_LOW_CLASS] + e->num_own * e->words, *escapes_begin = escapes_end;
    if (!encode_symbols(e, (const uint32_t(*)[256])tables, codes[0], out, end, &symbols, &escapes_begin)) return 0;
    size_t escapes = (size_t)(escapes_end - escapes_begin);
    size_t num_uncoded = words - num_coded_low, exponents = write_exponents(e, NULL);
    size_t uncoded_bytes = in->shape.dtype == KVMNN_FP16 ? num_uncoded : (5 * num_uncoded + 7) / 8;
    if (in->shape.dtype == KVMNN_FP32) uncoded_bytes += 2 * words;
    size += escapes + exponents + symbols.unit_bytes + uncoded_bytes;
    if (size >= limit) return 0;

    uint8_t *cursor = out + HEADER_BYTES;
    *cursor++ = (uint8_t)in->shape.base;
    *cursor++ = (uint8_t)mask;
    if (in->table_set) cursor = write_bytes(cursor, &in->table_set->id, 8);
    cursor = write_varint(cursor, in->rows.history_rows);
    cursor = write_varint(cursor, head);
    cursor = write_varint(cursor, exponents);
    cursor = write_varint(cursor, escapes);
    cursor = write_varint(cursor, symbols.unit_bytes / 2);
    for (int b = FIRST_LOW_CLASS; b < SIMILARITY_CLASSES; ++b) {
        if (!(mask >> b & 1)) continue;
        cursor = write_varint(cursor, e->difference_count[b]);
        cursor = write_varint(cursor, low[b].unit_bytes / 2);
    }
    cursor = write_bytes(cursor, e->head, head);
    size_t control = (size_t)(cursor - out) - HEADER_BYTES;
    cursor += write_exponents(e, cursor);
    cursor = write_bytes(cursor, escapes_begin, escapes);
    cursor = write_section(cursor, &symbols);
    for (int b = FIRST_LOW_CLASS; b < SIMILARITY_CLASSES; ++b)
        if (mask >> b & 1) cursor = write_section(cursor, &low[b]);
    dense_write_header(out, &in->shape, 2, (in->rotary.dims ? 1 : 0) | (in->table_set ? 2 : 0), e->num_own,
                       (size_t)(cursor - out) - HEADER_BYTES + uncoded_bytes);
    dense_hash hash;
    dense_hash_begin(&hash, in->original_rows, dense_checksum_seed(out, control));
    cursor = write_low(e, mask, &hash, cursor);
    cursor = write_tails(e, cursor);
    uint64_t checksum = dense_hash_end(&hash, raw_bytes);
    memcpy(out + CHECKSUM_OFFSET, &checksum, 8);
    return (size_t)(cursor - out);
}
