/* Contexts to tables: neighbours are merged while their own tables would cost more than they save. */
#include "words.h"

enum { LEAST_COUNT = 256 }; /* contexts that were seen less often are merged with a neighbour at once */
#define ENTRY_BITS 3.5f     /* of an entry that is not 0; one that is 0 takes a bit */
#define NONE (-1e30f)

typedef struct {
    uint32_t n;
    float cost;
    int16_t context, bucket, magnitude;
    int16_t before, behind; /* of those that are live; -1 for none */
    int16_t live, into;     /* merged into another one */
    int16_t partners[2];    /* the next one of the bucket, the nearest of the bucket above; -1 for none */
    float gains[2];
    int16_t stale; /* bits: which of the gains */
} node;

typedef struct {
    const dense_loops *loops;
    node nodes[CONTEXTS];
    uint32_t (*counts)[256];   /* by context; of the symbols in use alone, once they are loaded */
    int count, symbols, first; /* symbols: a multiple of 8; first: live node, -1 for none */
    float entry_weight;
} state;

static const uint32_t NOTHING[256] = {0};

static uint32_t *counts_of(const state *s, int i) { return s->counts[s->nodes[i].context]; }

size_t dense_cluster_room(void) { return sizeof(state); }

static float times_log(const dense_loops *loops, uint32_t n) {
    uint32_t counts[8] = {n}, entries;
    return loops->log_sum(counts, NOTHING, 8, &entries);
}

/* Bits of coding both counts with one table, the table included. */
static float joint_cost(const state *s, const uint32_t *a, const uint32_t *b, uint32_t n) {
    uint32_t entries;
    float sum = s->loops->log_sum(a, b, s->symbols, &entries);
    return times_log(s->loops, n) - sum +
           ((float)s->symbols + ENTRY_BITS * (float)(int32_t)entries) * s->entry_weight;
}

float dense_order0_bits(const dense_loops *loops, const uint32_t counts[256]) {
    uint32_t n = 0, entries;
    for (int s = 0; s < 256; ++s) n += counts[s];
    return times_log(loops, n) - loops->log_sum(counts, NOTHING, 256, &entries);
}

float dense_cross_bits(const dense_loops *loops, const dense_table *t, const uint32_t counts[256]) {
    float bits = 0;
    for (int s = 0; s < 256; ++s) {
        if (counts[s] == 0) continue;
        if (t->f[s] == 0) return -NONE;
        bits += (float)(int32_t)counts[s] * ((float)SCALE_BITS - times_log(loops, t->f[s]) / (float)t->f[s]);
    }
    return bits;
}

static void add(state *s, int to, int from) {
    node *n = &s->nodes[from];
    uint32_t *sums = counts_of(s, to);
    const uint32_t *counts = counts_of(s, from);
    for (int i = 0; i < s->symbols; ++i) sums[i] += counts[i];
    s->nodes[to].n += n->n;
    n->live = 0;
    n->into = (int16_t)to;
    if (n->before >= 0)
        s->nodes[n->before].behind = n->behind;
    else
        s->first = n->behind;
    if (n->behind >= 0) s->nodes[n->behind].before = n->before;
}

/* `j` if it is of the bucket of `i`, else -1. */
static int of_bucket(const state *s, int i, int j) {
    return j >= 0 && s->nodes[j].bucket == s->nodes[i].bucket ? j : -1;
}

static int nearest_above(const state *s, int i) {
    int best = -1, distance = MAGNITUDES, above = s->nodes[i].bucket + 1, j = s->nodes[i].behind;
    while (j >= 0 && s->nodes[j].bucket < above) j = s->nodes[j].behind;
    for (; j >= 0 && s->nodes[j].bucket == above; j = s->nodes[j].behind) {
        int apart = s->nodes[j].magnitude - s->nodes[i].magnitude;
        if (apart < 0) apart = -apart;
        if (apart < distance) best = j, distance = apart;
    }
    return best;
}

static void look_for_partners(state *s, int i) {
    node *a = &s->nodes[i];
    for (int d = 0; d < 2; ++d) {
        if (!(a->stale >> d & 1)) continue;
        int j = d == 0 ? of_bucket(s, i, a->behind) : nearest_above(s, i);
        a->partners[d] = (int16_t)j;
        a->gains[d] = NONE;
        if (j < 0) continue;
        const node *b = &s->nodes[j];
        a->gains[d] = a->cost + b->cost - joint_cost(s, counts_of(s, i), counts_of(s, j), a->n + b->n);
    }
    a->stale = 0;
}

static void load(state *s, const uint8_t *seen, uint8_t symbols[256]) {
    uint32_t any[256] = {0};
    s->count = 0;
    for (int c = 0; c < CONTEXTS; ++c)
        if (seen[c])
            for (int i = 0; i < 256; ++i) any[i] |= s->counts[c][i];
    int used = 0;
    for (int i = 0; i < 256; ++i)
        if (any[i]) symbols[used++] = (uint8_t)i;
    s->symbols = (used + 7) & ~7;
    for (int i = used; i < s->symbols; ++i) symbols[i] = 0;
    for (int c = 0; c < CONTEXTS; ++c) {
        if (!seen[c]) continue;
        uint32_t *to = s->counts[c], n = 0;
        for (int i = 0; i < used; ++i) n += to[i] = to[symbols[i]]; /* symbols ascend: none is read behind its place */
        for (int i = used; i < s->symbols; ++i) to[i] = 0;
        s->nodes[s->count] = (node){.n = n,
                                    .context = (int16_t)c,
                                    .bucket = (int16_t)(c / MAGNITUDES),
                                    .magnitude = c % MAGNITUDES,
                                    .before = (int16_t)(s->count - 1),
                                    .behind = (int16_t)(s->count + 1),
                                    .live = 1,
                                    .stale = 3};
        ++s->count;
    }
    s->first = s->count ? 0 : -1;
    if (s->count) s->nodes[s->count - 1].behind = -1;
}

static void merge_rare(state *s) {
    for (int i = s->first; i >= 0;) {
        int behind = s->nodes[i].behind, j = of_bucket(s, i, behind);
        if (j < 0) j = of_bucket(s, i, s->nodes[i].before);
        if (j >= 0 && s->nodes[i].n < LEAST_COUNT) add(s, j, i);
        i = behind;
    }
}

static int merge(state *s, int most) {
    int live = 0;
    for (int i = s->first; i >= 0; i = s->nodes[i].behind) {
        ++live;
        s->nodes[i].cost = joint_cost(s, counts_of(s, i), NOTHING, s->nodes[i].n);
    }
    while (live > 1) {
        float gain = NONE;
        int best = -1, direction = 0;
        for (int i = s->first; i >= 0; i = s->nodes[i].behind) {
            if (s->nodes[i].stale) look_for_partners(s, i);
            for (int d = 0; d < 2; ++d)
                if (s->nodes[i].gains[d] > gain) gain = s->nodes[i].gains[d], best = i, direction = d;
        }
        if (best < 0 || (gain < 0 && live <= most)) break;
        int j = s->nodes[best].partners[direction];
        add(s, best, j);
        s->nodes[best].cost = joint_cost(s, counts_of(s, best), NOTHING, s->nodes[best].n);
        s->nodes[best].stale = 3;
        --live;
        for (int i = s->first; i >= 0; i = s->nodes[i].behind)
            for (int d = 0; d < 2; ++d)
                if (s->nodes[i].partners[d] == best || s->nodes[i].partners[d] == j) s->nodes[i].stale |= 1 << d;
    }
    return live;
}

void dense_cluster(const dense_loops *loops, uint32_t (*counts)[256], const uint8_t *seen, int most, int shared,
                   void *room, dense_model *m) {
    state *s = room;
    uint8_t symbols[256];
    s->loops = loops, s->counts = counts;
    s->entry_weight = shared ? 0 : 1;
    load(s, seen, symbols);
    merge_rare(s);
    merge(s, most);
    int number[CONTEXTS];
    m->tables = 0;
    for (int i = 0; i < s->count; ++i) {
        if (!s->nodes[i].live) continue;
        uint32_t full[256] = {0};
        for (int k = 0; k < s->symbols; ++k)
            if (counts_of(s, i)[k]) full[symbols[k]] = counts_of(s, i)[k];
        number[i] = m->tables;
        if (shared && full[ESCAPE] == 0) full[ESCAPE] = 1;
        dense_quantise(full, &m->symbols[m->tables++]);
    }
    if (m->tables == 0) {
        uint32_t one[256] = {1};
        dense_quantise(one, &m->symbols[m->tables++]);
    }
    uint8_t last = 0;
    for (int c = 0, i = 0; c < CONTEXTS; ++c) {
        if (seen[c]) {
            int root = i++;
            while (!s->nodes[root].live) root = s->nodes[root].into;
            last = (uint8_t)number[root];
        }
        m->map[c] = last;
    }
}
