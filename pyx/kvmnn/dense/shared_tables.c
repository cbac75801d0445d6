/* Table sets: a model made of some arrays, for others like them (docs/format-v2.md, "Table sets"). */
#include "encoder.h"

void dense_count_symbols(const dense_input *in, uint8_t *scratch, dense_counts *counts) {
    dense_encoder storage, *e = &storage;
    dense_allocate_parts(e, in, 0, (dense_arena){.cursor = scratch});
    dense_match_rows(e);
    dense_count_contexts(e);
    for (int c = 0; c < CONTEXTS; ++c) {
        if (!e->is_seen[c]) continue;
        counts->is_seen[c] = 1;
        for (int s = 0; s < 256; ++s) counts->contexts[c][s] += e->counts[c][s];
    }
    for (int b = FIRST_LOW_CLASS; b < SIMILARITY_CLASSES; ++b)
        for (int s = 0; s < 256; ++s) counts->low[b][s] += e->low_counts[b][s];
}

/* A table of low parts for each similarity class where one saves something; it has all low parts there are. */
static void build_low_tables(const dense_kernels *kernels, const dense_counts *counts, int dtype, dense_model *m) {
    int values = dtype == KVMNN_FP16 ? 256 : 32;
    m->low_mask = 0;
    for (int b = FIRST_LOW_CLASS; b < SIMILARITY_CLASSES; ++b) {
        uint32_t class_counts[256] = {0}, n = 0;
        for (int s = 0; s < values; ++s) n += class_counts[s] = counts->low[b][s] + (counts->low[b][s] == 0);
        if (dense_order0_bits(kernels, class_counts) > 0.97f * (dtype == KVMNN_FP16 ? 8 : 5) * (float)n) continue;
        m->low_mask |= (uint8_t)(1 << b);
        dense_quantize_frequencies(class_counts, &m->low_tables[b]);
    }
}

size_t dense_write_table_set(const dense_kernels *kernels, dense_counts *counts, int dtype, int base,
                             const dense_rotary *rotary, void *cluster_scratch, uint8_t *out) {
    dense_model m;
    dense_cluster_contexts(kernels, counts->contexts, counts->is_seen, MAX_SHARED_TABLES, 1, cluster_scratch, &m);
    build_low_tables(kernels, counts, dtype, &m);
    memcpy(out, "KVMT", 4);
    out[4] = 1;
    out[5] = (uint8_t)dtype;
    out[6] = (uint8_t)base;
    out[7] = rotary->dims ? 1 : 0;
    bitwriter w = {.cursor = out + SET_HEADER_BYTES};
    if (rotary->dims) dense_write_rotary(&w, rotary);
    dense_write_model(&w, &m);
    return (size_t)(bitwriter_finish(&w) - out);
}

dense_error dense_read_table_set(const uint8_t *data, size_t n, dense_table_set *table_set) {
    bitreader r = {.cursor = data + SET_HEADER_BYTES, .end = data + n};
    dense_error error = DENSE_OK;
    table_set->dtype = data[5], table_set->base = data[6];
    if (table_set->dtype > KVMNN_FP32 || table_set->base > (table_set->dtype == KVMNN_FP16 ? 0 : MAX_BASE) ||
        data[7] > 1)
        return DENSE_SIZES;
    if (data[7]) error = dense_read_rotary(&r, 2 * MAX_ROTARY_PAIRS, table_set->frequencies, &table_set->rotary);
    if (!error) error = dense_read_model(&r, &table_set->model);
    if (error) return error;
    if (!bitreader_is_exhausted(&r)) return DENSE_HEAD;
    table_set->id = kvmnn_xxh64(data, n, 0);
    dense_prepare_codes(&table_set->model, table_set->codes, table_set->low_codes);
    dense_prepare_entries(&table_set->model, table_set->entries, table_set->low_entries);
    return DENSE_OK;
}
