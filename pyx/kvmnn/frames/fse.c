#include "fse.h"

enum { WEIGHTS = 12 };

void kvmnn_fse_build(kvmnn_fse *table, const int8_t *probabilities, int symbols, int log) {
    uint8_t symbol_at[KVMNN_FSE_STATES];
    uint16_t first[KVMNN_FSE_SYMBOLS + 1];
    int size = 1 << log, step = (size >> 1) + (size >> 3) + 3, at = 0, high = size - 1, total = 0;
    table->log = log;
    first[0] = 0;
    for (int s = 0; s < symbols; ++s) {
        int p = probabilities[s];
        first[s + 1] = (uint16_t)(first[s] + (p < 0 ? 1 : p));
        if (p < 0) symbol_at[high--] = (uint8_t)s;
    }
    for (int s = 0; s < symbols; ++s) {
        for (int i = 0; i < probabilities[s]; ++i) {
            symbol_at[at] = (uint8_t)s;
            do at = (at + step) & (size - 1);
            while (at > high);
        }
    }
    for (int u = 0; u < size; ++u) table->next[first[symbol_at[u]]++] = (uint16_t)(size + u);
    for (int s = 0; s < symbols; ++s) {
        int p = probabilities[s], count = p < 0 ? 1 : p;
        table->find[s] = 0;
        table->bits[s] = 0;
        if (count == 0) continue;
        if (count == 1) {
            table->bits[s] = ((uint32_t)log << 16) - (1u << log);
        } else {
            uint32_t most = (uint32_t)(log - kvmnn_high_bit((uint32_t)count - 1));
            table->bits[s] = (most << 16) - ((uint32_t)count << most);
        }
        table->find[s] = total - count;
        total += count;
    }
}

/* Shares of 1 << log, at least 1 for what is there at all. */
static void shares(const uint32_t *counts, int symbols, size_t n, int log, int8_t *out) {
    int size = 1 << log, left = size, most = 0;
    for (int s = 0; s < symbols; ++s) {
        int share = counts[s] ? (int)(((uint64_t)counts[s] * (uint64_t)size + n / 2) / n) : 0;
        if (counts[s] && share == 0) share = 1;
        out[s] = (int8_t)share;
        left -= share;
        if (counts[s] > counts[most]) most = s;
    }
    while (left != 0) { /* the largest share bears the rounding, and more of them where it is too small for that */
        if (left > 0 || out[most] > -left) {
            out[most] = (int8_t)(out[most] + left);
            return;
        }
        int largest = 0;
        for (int s = 1; s < symbols; ++s)
            if (out[s] > out[largest]) largest = s;
        --out[largest];
        ++left;
    }
}

static void put_shares(const int8_t *shares, int last, int log, kvmnn_bits *out) {
    int left = (1 << log) + 1, threshold = 1 << log, bits = log + 1, zeros = 0;
    kvmnn_bits_add(out, (uint64_t)(log - 5), 4);
    for (int s = 0; s <= last;) {
        if (zeros) {
            int start = s;
            while (!shares[s]) ++s;
            for (; s >= start + 3; start += 3) kvmnn_bits_add(out, 3, 2);
            kvmnn_bits_add(out, (uint64_t)(s - start), 2);
        }
        int value = shares[s++], most = 2 * threshold - 1 - left;
        left -= value;
        zeros = value == 0;
        ++value;
        if (value >= threshold) value += most;
        kvmnn_bits_add(out, (uint64_t)value, (unsigned)(bits - (value < most)));
        kvmnn_bits_flush(out);
        while (left < threshold) {
            --bits;
            threshold >>= 1;
        }
    }
}

/* The description of a table, up to a full byte. */
static size_t describe(const int8_t *shares, int last, int log, uint8_t *dst) {
    kvmnn_bits out = {0, 0, dst};
    put_shares(shares, last, log, &out);
    if (out.count) *out.at++ = (uint8_t)out.held;
    return (size_t)(out.at - dst);
}

size_t kvmnn_fse_fit(kvmnn_fse *table, const uint32_t *counts, int symbols, size_t n, uint8_t *dst) {
    int8_t parts[KVMNN_FSE_SYMBOLS] = {0};
    int last = 0, present = 0;
    for (int s = 0; s < symbols; ++s) {
        if (!counts[s]) continue;
        last = s;
        ++present;
    }
    int log = n > 96 || present > 16 ? 6 : 5;
    shares(counts, last + 1, n, log, parts);
    kvmnn_fse_build(table, parts, last + 1, log);
    return describe(parts, last, log, dst);
}

void kvmnn_fse_single(kvmnn_fse *table, unsigned symbol) {
    table->log = 0;
    table->next[0] = 0;
    table->find[symbol] = 0;
    table->bits[symbol] = 0;
}

size_t kvmnn_fse_weights(const uint8_t *weights, size_t n, uint8_t *dst) {
    uint32_t counts[WEIGHTS] = {0};
    kvmnn_fse table;
    for (size_t i = 0; i < n; ++i) ++counts[weights[i]];
    for (int s = 0; s < WEIGHTS; ++s)
        if (counts[s] == n) return 0;
    if (n < 2) return 0;
    kvmnn_bits out = {0, 0, dst + kvmnn_fse_fit(&table, counts, WEIGHTS, n, dst)};
    uint32_t states[2]; /* of the even and of the odd weights */
    int begun[2] = {0, 0};
    for (size_t i = n; i-- > 0;) {
        int odd = (int)(i & 1);
        states[odd] = begun[odd] ? kvmnn_fse_put(&table, states[odd], weights[i], &out)
                                 : kvmnn_fse_begin(&table, weights[i]);
        begun[odd] = 1;
        kvmnn_bits_flush(&out);
    }
    kvmnn_fse_end(&table, states[1], &out);
    kvmnn_fse_end(&table, states[0], &out);
    kvmnn_bits_flush(&out);
    return (size_t)(kvmnn_bits_end(&out) - dst);
}
