#include "fse.h"

enum { NUM_WEIGHTS = 12 };

void kvmnn_fse_build(kvmnn_fse_table *table, const int8_t *probabilities, int symbols, int table_log) {
    uint8_t symbol_at[KVMNN_MAX_FSE_STATES];
    uint16_t first_state[KVMNN_MAX_FSE_SYMBOLS + 1];
    int size = 1 << table_log, step = (size >> 1) + (size >> 3) + 3, pos = 0, last_free = size - 1, total = 0;
    table->table_log = table_log;
    first_state[0] = 0;
    for (int s = 0; s < symbols; ++s) {
        int p = probabilities[s];
        first_state[s + 1] = (uint16_t)(first_state[s] + (p < 0 ? 1 : p));
        if (p < 0) symbol_at[last_free--] = (uint8_t)s;
    }
    for (int s = 0; s < symbols; ++s) {
        for (int i = 0; i < probabilities[s]; ++i) {
            symbol_at[pos] = (uint8_t)s;
            do pos = (pos + step) & (size - 1);
            while (pos > last_free);
        }
    }
    for (int u = 0; u < size; ++u) table->next_state[first_state[symbol_at[u]]++] = (uint16_t)(size + u);
    for (int s = 0; s < symbols; ++s) {
        int p = probabilities[s], count = p < 0 ? 1 : p;
        table->delta_find_state[s] = 0;
        table->delta_num_bits[s] = 0;
        if (count == 0) continue;
        if (count == 1) {
            table->delta_num_bits[s] = ((uint32_t)table_log << 16) - (1u << table_log);
        } else {
            uint32_t max_bits = (uint32_t)(table_log - kvmnn_high_bit((uint32_t)count - 1));
            table->delta_num_bits[s] = (max_bits << 16) - ((uint32_t)count << max_bits);
        }
        table->delta_find_state[s] = total - count;
        total += count;
    }
}

/* Counts normalized to a sum of 1 << table_log, at least 1 for each symbol that occurs. */
static void normalize_counts(const uint32_t *counts, int symbols, size_t n, int table_log, int8_t *out) {
    int size = 1 << table_log, remaining = size, most_frequent = 0;
    for (int s = 0; s < symbols; ++s) {
        int count_share = counts[s] ? (int)(((uint64_t)counts[s] * (uint64_t)size + n / 2) / n) : 0;
        if (counts[s] && count_share == 0) count_share = 1;
        out[s] = (int8_t)count_share;
        remaining -= count_share;
        if (counts[s] > counts[most_frequent]) most_frequent = s;
    }
    while (remaining != 0) { /* the largest share bears the rounding, and more of them where it is too small for that */
        if (remaining > 0 || out[most_frequent] > -remaining) {
            out[most_frequent] = (int8_t)(out[most_frequent] + remaining);
            return;
        }
        int largest = 0;
        for (int s = 1; s < symbols; ++s)
            if (out[s] > out[largest]) largest = s;
        --out[largest];
        ++remaining;
    }
}

static void write_normalized_counts(const int8_t *normalized, int last_symbol, int table_log, kvmnn_bitwriter *out) {
    int remaining = (1 << table_log) + 1, threshold = 1 << table_log, bits = table_log + 1, zeros = 0;
    kvmnn_bitwriter_put(out, (uint64_t)(table_log - 5), 4);
    for (int s = 0; s <= last_symbol;) {
        if (zeros) {
            int start = s;
            while (!normalized[s]) ++s;
            for (; s >= start + 3; start += 3) kvmnn_bitwriter_put(out, 3, 2);
            kvmnn_bitwriter_put(out, (uint64_t)(s - start), 2);
        }
        int value = normalized[s++], num_short = 2 * threshold - 1 - remaining;
        remaining -= value;
        zeros = value == 0;
        ++value;
        if (value >= threshold) value += num_short;
        kvmnn_bitwriter_put(out, (uint64_t)value, (unsigned)(bits - (value < num_short)));
        kvmnn_bitwriter_flush(out);
        while (remaining < threshold) {
            --bits;
            threshold >>= 1;
        }
    }
}

/* The description of a table, up to a full byte. */
static size_t write_table_description(const int8_t *normalized, int last_symbol, int table_log, uint8_t *dst) {
    kvmnn_bitwriter out = {0, 0, dst};
    write_normalized_counts(normalized, last_symbol, table_log, &out);
    if (out.num_pending) *out.cursor++ = (uint8_t)out.pending;
    return (size_t)(out.cursor - dst);
}

size_t kvmnn_fse_build_fitted(kvmnn_fse_table *table, const uint32_t *counts, int symbols, size_t n, uint8_t *dst) {
    int8_t normalized[KVMNN_MAX_FSE_SYMBOLS] = {0};
    int last_symbol = 0, num_present = 0;
    for (int s = 0; s < symbols; ++s) {
        if (!counts[s]) continue;
        last_symbol = s;
        ++num_present;
    }
    int table_log = n > 96 || num_present > 16 ? 6 : 5;
    normalize_counts(counts, last_symbol + 1, n, table_log, normalized);
    kvmnn_fse_build(table, normalized, last_symbol + 1, table_log);
    return write_table_description(normalized, last_symbol, table_log, dst);
}

void kvmnn_fse_build_rle(kvmnn_fse_table *table, unsigned symbol) {
    table->table_log = 0;
    table->next_state[0] = 0;
    table->delta_find_state[symbol] = 0;
    table->delta_num_bits[symbol] = 0;
}

size_t kvmnn_fse_encode_weights(const uint8_t *weights, size_t n, uint8_t *dst) {
    uint32_t counts[NUM_WEIGHTS] = {0};
    kvmnn_fse_table table;
    for (size_t i = 0; i < n; ++i) ++counts[weights[i]];
    for (int s = 0; s < NUM_WEIGHTS; ++s)
        if (counts[s] == n) return 0;
    if (n < 2) return 0;
    kvmnn_bitwriter out = {0, 0, dst + kvmnn_fse_build_fitted(&table, counts, NUM_WEIGHTS, n, dst)};
    uint32_t states[2]; /* of the even and of the odd weights */
    int is_started[2] = {0, 0};
    for (size_t i = n; i-- > 0;) {
        int is_odd = (int)(i & 1);
        states[is_odd] = is_started[is_odd] ? kvmnn_fse_encode_symbol(&table, states[is_odd], weights[i], &out)
                                 : kvmnn_fse_init_state(&table, weights[i]);
        is_started[is_odd] = 1;
        kvmnn_bitwriter_flush(&out);
    }
    kvmnn_fse_flush_state(&table, states[1], &out);
    kvmnn_fse_flush_state(&table, states[0], &out);
    kvmnn_bitwriter_flush(&out);
    return (size_t)(kvmnn_bitwriter_finish(&out) - dst);
}
