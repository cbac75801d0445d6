/* Table sets: a model made of some arrays, for others like them (docs/format-v2.md, "Table sets"). */
#include "encoder.h"

void dense_count(const dense_input *in, uint8_t *room, dense_counts *counts) {
    dense_encoder all, *e = &all;
    dense_lay_out(e, in, 0, (dense_arena){.at = room});
    dense_find_rows(e);
    dense_count_contexts(e);
    for (int c = 0; c < CONTEXTS; ++c) {
        if (!e->seen[c]) continue;
        counts->seen[c] = 1;
        for (int s = 0; s < 256; ++s) counts->contexts[c][s] += e->counts[c][s];
    }
    for (int b = LOW_FROM; b < BUCKETS; ++b)
        for (int s = 0; s < 256; ++s) counts->low[b][s] += e->low_counts[b][s];
}

/* A table of low parts for each bucket where one saves something; it has all low parts there are. */
static void put_low(const dense_loops *loops, const dense_counts *counts, int dtype, dense_model *m) {
    int values = dtype == KVMNN_FP16 ? 256 : 32;
    m->low_mask = 0;
    for (int b = LOW_FROM; b < BUCKETS; ++b) {
        uint32_t of[256] = {0}, n = 0;
        for (int s = 0; s < values; ++s) n += of[s] = counts->low[b][s] + (counts->low[b][s] == 0);
        if (dense_order0_bits(loops, of) > 0.97f * (dtype == KVMNN_FP16 ? 8 : 5) * (float)n) continue;
        m->low_mask |= (uint8_t)(1 << b);
        dense_quantise(of, &m->low[b]);
    }
}

size_t dense_put_set(const dense_loops *loops, dense_counts *counts, int dtype, int base,
                     const dense_rotary *rotary, void *cluster_room, uint8_t *out) {
    dense_model m;
    dense_cluster(loops, counts->contexts, counts->seen, SHARED_TABLES, 1, cluster_room, &m);
    put_low(loops, counts, dtype, &m);
    memcpy(out, "KVMT", 4);
    out[4] = 1;
    out[5] = (uint8_t)dtype;
    out[6] = (uint8_t)base;
    out[7] = rotary->dims ? 1 : 0;
    dense_writer w = {.at = out + SET_HEADER_BYTES};
    if (rotary->dims) dense_put_rotary(&w, rotary);
    dense_put_model(&w, &m);
    return (size_t)(dense_put_end(&w) - out);
}

dense_error dense_get_set(const uint8_t *data, size_t n, dense_table_set *set) {
    dense_reader r = {.at = data + SET_HEADER_BYTES, .end = data + n};
    dense_error error = DENSE_OK;
    set->dtype = data[5], set->base = data[6];
    if (set->dtype > KVMNN_FP32 || set->base > (set->dtype == KVMNN_FP16 ? 0 : MOST_BASE) || data[7] > 1)
        return DENSE_SIZES;
    if (data[7]) error = dense_get_rotary(&r, 2 * MOST_PAIRS, set->frequencies, &set->rotary);
    if (!error) error = dense_get_model(&r, &set->model);
    if (error) return error;
    if (!dense_got_all(&r)) return DENSE_HEAD;
    set->id = kvmnn_xxh64(data, n, 0);
    dense_prepare_codes(&set->model, set->codes, set->low_codes);
    dense_prepare_entries(&set->model, set->entries, set->low_entries);
    return DENSE_OK;
}
