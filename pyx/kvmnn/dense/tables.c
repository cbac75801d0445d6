/* Frequency tables: from counts to numbers with three significant bits, and how a model is written. */
#include "dense.h"

enum { MOST_LEVEL = 1792, RUN_BITS = 6 };

/* -- numbers that can be written ----------------------------------------------------------------------------------- */

static uint32_t step_of(uint32_t k) { return (uint32_t)1 << (k > 2 ? k - 2 : 0); }

static uint32_t nearest_level(uint32_t x) { /* x is not 0 */
    uint32_t step = step_of(dense_high_bit(x)), level = (x + step / 2) & ~(step - 1);
    return level < MOST_LEVEL ? level : MOST_LEVEL;
}

static uint32_t level_above(uint32_t level) { return level + step_of(dense_high_bit(level)); }

static uint32_t level_below(uint32_t level) { /* level is above 1 */
    uint32_t step = step_of(dense_high_bit(level - 1));
    return (level - 1) & ~(step - 1);
}

/* The first of the largest ones. */
static int largest_of(const uint16_t f[256]) {
    int16_t most = 0;
    for (int s = 0; s < 256; ++s) most = (int16_t)f[s] > most ? (int16_t)f[s] : most;
    int best = 0;
    while (f[best] != most) ++best;
    return best;
}

/* What others leave of SCALE is the most frequent symbol's: errors of rounding are handed on from one to the next. */
void dense_quantise(const uint32_t counts[256], dense_table *t) {
    uint64_t total = 0;
    int best = 0;
    for (int s = 0; s < 256; ++s) {
        total += counts[s];
        if (counts[s] > counts[best]) best = s;
    }
    memset(t, 0, sizeof *t);
    int64_t carried = 0; /* in 256ths, as are all that are not levels */
    uint32_t others = 0;
    uint8_t listed[256];
    int count = 0;
    for (int s = 0; s < 256; ++s) {
        listed[count] = (uint8_t)s;
        count += counts[s] != 0 && s != best;
    }
    for (int i = 0; i < count; ++i) {
        int s = listed[i];
        int64_t exact = (int64_t)((uint64_t)counts[s] * SCALE * 256 / total), wanted = exact + carried;
        if (wanted < exact * 3 / 4) wanted = exact * 3 / 4;
        if (wanted > exact * 5 / 4) wanted = exact * 5 / 4;
        uint32_t rounded = (uint32_t)((wanted + 128) >> 8);
        t->f[s] = (uint16_t)nearest_level(rounded ? rounded : 1);
        carried += exact - 256 * (int64_t)t->f[s];
        others += t->f[s];
    }
    if (others == 0) others = t->f[best == ESCAPE ? 0 : ESCAPE] = 1; /* no symbol has all of SCALE */
    uint32_t exact = total ? (uint32_t)((uint64_t)counts[best] * SCALE / total) : 1;
    for (;;) {
        int next = largest_of(t->f);
        if (others + exact * 3 / 4 < SCALE || t->f[next] == 1) break;
        others -= t->f[next];
        t->f[next] = (uint16_t)level_below(t->f[next]);
        others += t->f[next];
    }
    int next = largest_of(t->f);
    uint32_t level = nearest_level(SCALE - others), least = t->f[next];
    if (next < best) least = level_above(least);
    t->f[best] = (uint16_t)(level > least ? level : least);
}

int dense_settle(dense_table *t) {
    int best = largest_of(t->f);
    uint32_t others = 0;
    for (int s = 0; s < 256; ++s) others += s == best ? 0 : t->f[s];
    if (others == 0 || others >= SCALE) return 0;
    t->f[best] = (uint16_t)(SCALE - others);
    return 1;
}

/* -- tables in bits ------------------------------------------------------------------------------------------------ */

static void put_used(dense_writer *w, const uint8_t used[256]) {
    uint32_t groups = 0, bits[32] = {0};
    for (int s = 0; s < 256; ++s)
        if (used[s]) bits[s / 8] |= 1u << s % 8, groups |= 1u << s / 8;
    dense_put(w, groups, 32);
    for (int g = 0; g < 32; ++g)
        if (bits[g]) dense_put(w, bits[g], 8);
}

/* The symbols in use, ascending; how many. */
static int get_used(dense_reader *r, uint8_t used[256]) {
    uint32_t groups = dense_get(r, 32);
    int count = 0;
    for (int g = 0; g < 32; ++g) {
        uint32_t bits = groups >> g & 1 ? dense_get(r, 8) : 0;
        for (int j = 0; j < 8; ++j)
            if (bits >> j & 1) used[count++] = (uint8_t)(8 * g + j);
    }
    return count;
}

/* Bits of a table's entry: what is read for `by` + SCALE_BITS, where the exponent goes up by `by`; their number. */
static const uint8_t STEP_BITS[2 * SCALE_BITS + 1] = {7, 7, 7, 7, 7, 7, 7, 7, 7, 11, 5, 0, 1, 3, 7, 7, 7, 7, 7, 7, 7, 7, 7};
static const uint8_t STEP_COUNTS[2 * SCALE_BITS + 1] = {7, 7, 7, 7, 7, 7, 7, 7, 7, 4, 3, 1,
                                                        3, 4, 7, 7, 7, 7, 7, 7, 7, 7, 7};

static void put_table(dense_writer *w, const uint8_t used[256], const dense_table *t) {
    unsigned last = 0;
    for (int s = 0; s < 256; ++s) {
        if (!used[s]) continue;
        uint32_t f = t->f[s];
        unsigned e = dense_width(f), step = e + SCALE_BITS - last, count = STEP_COUNTS[step];
        uint32_t entry = STEP_BITS[step] | (count == 7 ? e << 3 : 0);
        unsigned k = e ? e - 1 : 0, bits = k < 2 ? k : 2;
        entry |= (f & (((uint32_t)1 << k) - 1)) >> (k - bits) << count;
        dense_put(w, entry, count + bits);
        last = e;
    }
}

/* By the next four bits: how many bits a step takes, and by how much the exponent goes up. */
static const uint8_t STEP_LENGTHS[16] = {1, 3, 1, 4, 1, 3, 1, 7, 1, 3, 1, 4, 1, 3, 1, 7};
static const int8_t STEPS[16] = {0, 1, 0, 2, 0, -1, 0, 0, 0, 1, 0, -2, 0, -1, 0, 0};

static int get_table(dense_reader *r, const uint8_t *used, int count, dense_table *t) {
    int e = 0;
    memset(t, 0, sizeof *t);
    for (int i = 0; i < count; ++i) {
        uint32_t next = dense_peek(r, 9); /* as many as an entry may have */
        unsigned step = STEP_LENGTHS[next & 15];
        e = step == 7 ? (int)(next >> 3 & 15) : e + STEPS[next & 15];
        if (e < 0 || e > SCALE_BITS) return 0;
        unsigned k = e ? (unsigned)e - 1 : 0, bits = k < 2 ? k : 2;
        dense_skip(r, step + bits);
        if (r->over) return 0;
        t->f[used[i]] = (uint16_t)(((uint32_t)(e != 0) << k) + ((next >> step & ((1u << bits) - 1)) << (k - bits)));
        while (e == 0 && i + 1 < count && r->count && !(r->held & 1)) dense_skip(r, 1), ++i; /* more that stay at 0 */
    }
    return dense_settle(t);
}

static void mark_used(const dense_table *t, uint8_t used[256]) {
    for (int s = 0; s < 256; ++s) used[s] |= t->f[s] != 0;
}

void dense_put_model(dense_writer *w, const dense_model *m) {
    uint8_t used[256] = {0};
    unsigned width = dense_width((uint32_t)m->tables - 1);
    dense_put(w, (uint32_t)m->tables - 1, 6);
    for (int i = 0, end; i < CONTEXTS; i = end) {
        for (end = i + 1; end < CONTEXTS && end - i < 1 << RUN_BITS && m->map[end] == m->map[i];) ++end;
        dense_put(w, (uint32_t)(end - i - 1), RUN_BITS);
        dense_put(w, m->map[i], width);
    }
    for (int i = 0; i < m->tables; ++i) mark_used(&m->symbols[i], used);
    put_used(w, used);
    for (int i = 0; i < m->tables; ++i) put_table(w, used, &m->symbols[i]);
    dense_put(w, m->low_mask, BUCKETS);
    for (int b = 0; b < BUCKETS; ++b) {
        if (!(m->low_mask >> b & 1)) continue;
        memset(used, 0, sizeof used);
        mark_used(&m->low[b], used);
        put_used(w, used);
        put_table(w, used, &m->low[b]);
    }
}

void dense_settle_model(dense_model *m) {
    for (int i = 0; i < m->tables; ++i) dense_settle(&m->symbols[i]);
    for (int b = 0; b < BUCKETS; ++b)
        if (m->low_mask >> b & 1) dense_settle(&m->low[b]);
}

dense_error dense_get_model(dense_reader *r, dense_model *m) {
    uint8_t used[256];
    m->tables = (int)dense_get(r, 6) + 1;
    unsigned width = dense_width((uint32_t)m->tables - 1);
    for (uint32_t i = 0; i < CONTEXTS;) {
        uint32_t run = dense_get(r, RUN_BITS) + 1, table = dense_get(r, width);
        if (r->over) return DENSE_HEAD;
        if (run > CONTEXTS - i || table >= (uint32_t)m->tables) return DENSE_MODEL;
        memset(m->map + i, (int)table, run);
        i += run;
    }
    int count = get_used(r, used);
    for (int i = 0; i < m->tables; ++i)
        if (!get_table(r, used, count, &m->symbols[i])) return r->over ? DENSE_HEAD : DENSE_MODEL;
    m->low_mask = (uint8_t)dense_get(r, BUCKETS);
    for (int b = 0; b < BUCKETS; ++b) {
        if (!(m->low_mask >> b & 1)) continue;
        count = get_used(r, used);
        if (!get_table(r, used, count, &m->low[b])) return r->over ? DENSE_HEAD : DENSE_MODEL;
    }
    return r->over ? DENSE_HEAD : DENSE_OK;
}
