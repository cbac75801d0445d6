/* Frequency tables: from counts to numbers with three significant bits, and how a model is written. */
#include "dense.h"

enum { MAX_LEVEL = 1792, RUN_BITS = 6 };

/* -- numbers that can be written ----------------------------------------------------------------------------------- */

static uint32_t level_step(uint32_t k) { return (uint32_t)1 << (k > 2 ? k - 2 : 0); }

static uint32_t round_to_level(uint32_t x) { /* x is not 0 */
    uint32_t step = level_step(dense_high_bit(x)), level = (x + step / 2) & ~(step - 1);
    return level < MAX_LEVEL ? level : MAX_LEVEL;
}

static uint32_t next_level(uint32_t level) { return level + level_step(dense_high_bit(level)); }

static uint32_t previous_level(uint32_t level) { /* level is above 1 */
    uint32_t step = level_step(dense_high_bit(level - 1));
    return (level - 1) & ~(step - 1);
}

/* The first of the largest ones. */
static int find_largest(const uint16_t f[256]) {
    int16_t max_frequency = 0;
    for (int s = 0; s < 256; ++s) max_frequency = (int16_t)f[s] > max_frequency ? (int16_t)f[s] : max_frequency;
    int best = 0;
    while (f[best] != max_frequency) ++best;
    return best;
}

/* What others leave of SCALE is the most frequent symbol's: errors of rounding are handed on from one to the next. */
void dense_quantize_frequencies(const uint32_t counts[256], dense_table *t) {
    uint64_t total = 0;
    int best = 0;
    for (int s = 0; s < 256; ++s) {
        total += counts[s];
        if (counts[s] > counts[best]) best = s;
    }
    memset(t, 0, sizeof *t);
    int64_t rounding_error = 0; /* in 256ths, as are all that are not levels */
    uint32_t other_sum = 0;
    uint8_t symbols_in_use[256];
    int count = 0;
    for (int s = 0; s < 256; ++s) {
        symbols_in_use[count] = (uint8_t)s;
        count += counts[s] != 0 && s != best;
    }
    for (int i = 0; i < count; ++i) {
        int s = symbols_in_use[i];
        int64_t exact = (int64_t)((uint64_t)counts[s] * SCALE * 256 / total), target = exact + rounding_error;
        if (target < exact * 3 / 4) target = exact * 3 / 4;
        if (target > exact * 5 / 4) target = exact * 5 / 4;
        uint32_t rounded_target = (uint32_t)((target + 128) >> 8);
        t->frequencies[s] = (uint16_t)round_to_level(rounded_target ? rounded_target : 1);
        rounding_error += exact - 256 * (int64_t)t->frequencies[s];
        other_sum += t->frequencies[s];
    }
    if (other_sum == 0)
        other_sum = t->frequencies[best == ESCAPE_SYMBOL ? 0 : ESCAPE_SYMBOL] = 1; /* no symbol has all of SCALE */
    uint32_t exact = total ? (uint32_t)((uint64_t)counts[best] * SCALE / total) : 1;
    for (;;) {
        int next = find_largest(t->frequencies);
        if (other_sum + exact * 3 / 4 < SCALE || t->frequencies[next] == 1) break;
        other_sum -= t->frequencies[next];
        t->frequencies[next] = (uint16_t)previous_level(t->frequencies[next]);
        other_sum += t->frequencies[next];
    }
    int next = find_largest(t->frequencies);
    uint32_t level = round_to_level(SCALE - other_sum), min_level = t->frequencies[next];
    if (next < best) min_level = next_level(min_level);
    t->frequencies[best] = (uint16_t)(level > min_level ? level : min_level);
}

int dense_normalize(dense_table *t) {
    int best = find_largest(t->frequencies);
    uint32_t other_sum = 0;
    for (int s = 0; s < 256; ++s) other_sum += s == best ? 0 : t->frequencies[s];
    if (other_sum == 0 || other_sum >= SCALE) return 0;
    t->frequencies[best] = (uint16_t)(SCALE - other_sum);
    return 1;
}

/* -- tables in bits ------------------------------------------------------------------------------------------------ */

static void write_symbols_in_use(bitwriter *w, const uint8_t is_used[256]) {
    uint32_t groups = 0, bits[32] = {0};
    for (int s = 0; s < 256; ++s)
        if (is_used[s]) bits[s / 8] |= 1u << s % 8, groups |= 1u << s / 8;
    bitwriter_put(w, groups, 32);
    for (int g = 0; g < 32; ++g)
        if (bits[g]) bitwriter_put(w, bits[g], 8);
}

/* The symbols in use, ascending; how many. */
static int read_symbols_in_use(bitreader *r, uint8_t symbols[256]) {
    uint32_t groups = bitreader_get(r, 32);
    int count = 0;
    for (int g = 0; g < 32; ++g) {
        uint32_t bits = groups >> g & 1 ? bitreader_get(r, 8) : 0;
        for (int j = 0; j < 8; ++j)
            if (bits >> j & 1) symbols[count++] = (uint8_t)(8 * g + j);
    }
    return count;
}

/* Bits of a table's entry: what is read for `by` + SCALE_BITS, where the exponent goes up by `by`; their number. */
static const uint8_t STEP_BITS[2 * SCALE_BITS + 1] = {7, 7, 7, 7, 7, 7, 7, 7, 7, 11, 5, 0, 1, 3, 7, 7, 7, 7, 7, 7, 7, 7, 7};
static const uint8_t STEP_COUNTS[2 * SCALE_BITS + 1] = {7, 7, 7, 7, 7, 7, 7, 7, 7, 4, 3, 1,
                                                        3, 4, 7, 7, 7, 7, 7, 7, 7, 7, 7};

static void write_table(bitwriter *w, const uint8_t is_used[256], const dense_table *t) {
    unsigned previous_width = 0;
    for (int s = 0; s < 256; ++s) {
        if (!is_used[s]) continue;
        uint32_t f = t->frequencies[s];
        unsigned e = dense_bit_width(f), step = e + SCALE_BITS - previous_width, count = STEP_COUNTS[step];
        uint32_t entry = STEP_BITS[step] | (count == 7 ? e << 3 : 0);
        unsigned k = e ? e - 1 : 0, bits = k < 2 ? k : 2;
        entry |= (f & (((uint32_t)1 << k) - 1)) >> (k - bits) << count;
        bitwriter_put(w, entry, count + bits);
        previous_width = e;
    }
}

/* By the next four bits: how many bits a step takes, and by how much the exponent goes up. */
static const uint8_t STEP_LENGTHS[16] = {1, 3, 1, 4, 1, 3, 1, 7, 1, 3, 1, 4, 1, 3, 1, 7};
static const int8_t STEPS[16] = {0, 1, 0, 2, 0, -1, 0, 0, 0, 1, 0, -2, 0, -1, 0, 0};

static int read_table(bitreader *r, const uint8_t *symbols, int count, dense_table *t) {
    int e = 0;
    memset(t, 0, sizeof *t);
    for (int i = 0; i < count; ++i) {
        uint32_t next_bits = bitreader_peek(r, 9); /* as many as an entry may have */
        unsigned step = STEP_LENGTHS[next_bits & 15];
        e = step == 7 ? (int)(next_bits >> 3 & 15) : e + STEPS[next_bits & 15];
        if (e < 0 || e > SCALE_BITS) return 0;
        unsigned k = e ? (unsigned)e - 1 : 0, bits = k < 2 ? k : 2;
        bitreader_skip(r, step + bits);
        if (r->overrun) return 0;
        t->frequencies[symbols[i]] =
            (uint16_t)(((uint32_t)(e != 0) << k) + ((next_bits >> step & ((1u << bits) - 1)) << (k - bits)));
        while (e == 0 && i + 1 < count && r->num_pending && !(r->pending & 1))
            bitreader_skip(r, 1), ++i; /* more that stay at 0 */
    }
    return dense_normalize(t);
}

static void mark_symbols_in_use(const dense_table *t, uint8_t is_used[256]) {
    for (int s = 0; s < 256; ++s) is_used[s] |= t->frequencies[s] != 0;
}

void dense_write_model(bitwriter *w, const dense_model *m) {
    uint8_t is_used[256] = {0};
    unsigned width = dense_bit_width((uint32_t)m->num_tables - 1);
    bitwriter_put(w, (uint32_t)m->num_tables - 1, 6);
    for (int i = 0, end; i < CONTEXTS; i = end) {
        for (end = i + 1; end < CONTEXTS && end - i < 1 << RUN_BITS && m->context_tables[end] == m->context_tables[i];)
            ++end;
        bitwriter_put(w, (uint32_t)(end - i - 1), RUN_BITS);
        bitwriter_put(w, m->context_tables[i], width);
    }
    for (int i = 0; i < m->num_tables; ++i) mark_symbols_in_use(&m->symbol_tables[i], is_used);
    write_symbols_in_use(w, is_used);
    for (int i = 0; i < m->num_tables; ++i) write_table(w, is_used, &m->symbol_tables[i]);
    bitwriter_put(w, m->low_mask, SIMILARITY_CLASSES);
    for (int b = 0; b < SIMILARITY_CLASSES; ++b) {
        if (!(m->low_mask >> b & 1)) continue;
        memset(is_used, 0, sizeof is_used);
        mark_symbols_in_use(&m->low_tables[b], is_used);
        write_symbols_in_use(w, is_used);
        write_table(w, is_used, &m->low_tables[b]);
    }
}

void dense_normalize_model(dense_model *m) {
    for (int i = 0; i < m->num_tables; ++i) dense_normalize(&m->symbol_tables[i]);
    for (int b = 0; b < SIMILARITY_CLASSES; ++b)
        if (m->low_mask >> b & 1) dense_normalize(&m->low_tables[b]);
}

dense_error dense_read_model(bitreader *r, dense_model *m) {
    uint8_t symbols[256];
    m->num_tables = (int)bitreader_get(r, 6) + 1;
    unsigned width = dense_bit_width((uint32_t)m->num_tables - 1);
    for (uint32_t i = 0; i < CONTEXTS;) {
        uint32_t run = bitreader_get(r, RUN_BITS) + 1, table = bitreader_get(r, width);
        if (r->overrun) return DENSE_HEAD;
        if (run > CONTEXTS - i || table >= (uint32_t)m->num_tables) return DENSE_MODEL;
        memset(m->context_tables + i, (int)table, run);
        i += run;
    }
    int count = read_symbols_in_use(r, symbols);
    for (int i = 0; i < m->num_tables; ++i)
        if (!read_table(r, symbols, count, &m->symbol_tables[i])) return r->overrun ? DENSE_HEAD : DENSE_MODEL;
    m->low_mask = (uint8_t)bitreader_get(r, SIMILARITY_CLASSES);
    for (int b = 0; b < SIMILARITY_CLASSES; ++b) {
        if (!(m->low_mask >> b & 1)) continue;
        count = read_symbols_in_use(r, symbols);
        if (!read_table(r, symbols, count, &m->low_tables[b])) return r->overrun ? DENSE_HEAD : DENSE_MODEL;
    }
    return r->overrun ? DENSE_HEAD : DENSE_OK;
}
