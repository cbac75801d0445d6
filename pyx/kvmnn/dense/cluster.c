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
    float costs[2];         /* of one table for both */
    int16_t begin, end;     /* of the counts that are not all 0: multiples of 8 */
} node;

enum { GROUP = 16, GROUPS = CONTEXTS / GROUP };

typedef struct {
    const dense_loops *loops;
    node nodes[CONTEXTS];
    float gains[CONTEXTS]; /* with the better partner */
    float group_gains[GROUPS];
    uint32_t (*counts)[256];   /* by context; of the symbols in use alone, once they are loaded */
    int count, symbols, first; /* symbols: a multiple of 8; first: live node, -1 for none */
    int firsts[BUCKETS + 1];   /* of each bucket */
    float entry_weight;
} state;

static const uint32_t NOTHING[256] = {0};

static uint32_t *counts_of(const state *s, int i) { return s->counts[s->nodes[i].context]; }

size_t dense_cluster_room(void) { return sizeof(state); }

static float times_log(const dense_loops *loops, uint32_t n) {
    uint32_t counts[8] = {n}, entries;
    return loops->log_sum(counts, NOTHING, 8, &entries);
}

/* Bits of coding nodes i and j, or i alone, with one table, the table included. */
static float joint_cost(const state *s, int i, int j) {
    const node *a = &s->nodes[i], *b = j < 0 ? a : &s->nodes[j];
    int begin = a->begin < b->begin ? a->begin : b->begin, end = a->end > b->end ? a->end : b->end;
    uint32_t entries, n = a->n + (j < 0 ? 0 : b->n);
    float sum = s->loops->log_sum(counts_of(s, i) + begin, (j < 0 ? NOTHING : counts_of(s, j)) + begin, end - begin,
                                  &entries);
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

/* `j` if it is of the bucket of `i`, else -1. */
static int of_bucket(const state *s, int i, int j) {
    return j >= 0 && s->nodes[j].bucket == s->nodes[i].bucket ? j : -1;
}

static void add(state *s, int to, int from) {
    node *n = &s->nodes[from];
    uint32_t *sums = counts_of(s, to);
    const uint32_t *counts = counts_of(s, from);
    for (int i = n->begin; i < n->end; ++i) sums[i] += counts[i];
    if (n->begin < s->nodes[to].begin) s->nodes[to].begin = n->begin;
    if (n->end > s->nodes[to].end) s->nodes[to].end = n->end;
    s->nodes[to].n += n->n;
    n->live = 0;
    n->into = (int16_t)to;
    if (s->firsts[n->bucket] == from) s->firsts[n->bucket] = of_bucket(s, from, n->behind);
    if (n->before >= 0)
        s->nodes[n->before].behind = n->behind;
    else
        s->first = n->behind;
    if (n->behind >= 0) s->nodes[n->behind].before = n->before;
}

static int nearest_above(const state *s, int i) {
    int best = -1, distance = MAGNITUDES;
    for (int j = s->firsts[s->nodes[i].bucket + 1]; j >= 0; j = of_bucket(s, j, s->nodes[j].behind)) {
        int apart = s->nodes[j].magnitude - s->nodes[i].magnitude;
        if (apart < 0) apart = -apart;
        if (apart >= distance) break; /* magnitudes ascend */
        best = j, distance = apart;
    }
    return best;
}

static float gain_with(const state *s, int i, int d) {
    const node *a = &s->nodes[i];
    return a->partners[d] < 0 ? NONE : a->cost + s->nodes[a->partners[d]].cost - a->costs[d];
}

/* The partners of node i that are `stale` (bits), and what is gained. */
static void look_for_partners(state *s, int i, int stale) {
    node *a = &s->nodes[i];
    for (int d = 0; d < 2; ++d) {
        if (!(stale >> d & 1)) continue;
        int j = d == 0 ? of_bucket(s, i, a->behind) : nearest_above(s, i);
        a->partners[d] = (int16_t)j;
        if (j >= 0) a->costs[d] = joint_cost(s, i, j);
    }
    float gains[2] = {gain_with(s, i, 0), gain_with(s, i, 1)};
    s->gains[i] = gains[1] > gains[0] ? gains[1] : gains[0];
}

static void update_group(state *s, int group) {
    float most = NONE;
    for (int i = group * GROUP; i < (group + 1) * GROUP; ++i) most = s->gains[i] > most ? s->gains[i] : most;
    s->group_gains[group] = most;
}

/* Looks again where a partner of node i has changed. */
static void look_again(state *s, int i, int one, int other) {
    const int16_t *partners = s->nodes[i].partners;
    int stale = 0;
    for (int d = 0; d < 2; ++d) stale |= (partners[d] == one || partners[d] == other) << d;
    if (!stale) return;
    look_for_partners(s, i, stale);
    update_group(s, i / GROUP);
}

/* The first node with most gain; -1 for none. */
static int most_gain(const state *s) {
    float most = NONE;
    int best = -1;
    for (int g = 0; g < GROUPS; ++g)
        if (s->group_gains[g] > most) most = s->group_gains[g], best = g;
    if (best < 0) return -1;
    for (best *= GROUP; s->gains[best] != most;) ++best;
    return best;
}

static void load(state *s, const uint8_t *seen) {
    s->count = 0;
    for (int b = 0; b <= BUCKETS; ++b) s->firsts[b] = -1;
    for (int c = 0; c < CONTEXTS; ++c) {
        if (!seen[c]) continue;
        if (s->firsts[c / MAGNITUDES] < 0) s->firsts[c / MAGNITUDES] = s->count;
        uint32_t n = 0;
        for (int i = 0; i < 256; ++i) n += s->counts[c][i];
        s->nodes[s->count] = (node){.n = n,
                                    .context = (int16_t)c,
                                    .bucket = (int16_t)(c / MAGNITUDES),
                                    .magnitude = c % MAGNITUDES,
                                    .before = (int16_t)(s->count - 1),
                                    .behind = (int16_t)(s->count + 1),
                                    .live = 1,
                                    .end = 256};
        ++s->count;
    }
    s->first = s->count ? 0 : -1;
    if (s->count) s->nodes[s->count - 1].behind = -1;
}

/* Counts of the symbols in use alone, both signs of a magnitude side by side: those of a context then lie together. */
static void compact(state *s, uint8_t symbols[256]) {
    uint32_t any[256] = {0}, all[256];
    for (int i = s->first; i >= 0; i = s->nodes[i].behind) {
        const uint32_t *counts = counts_of(s, i);
        for (int k = 0; k < 256; ++k) any[k] |= counts[k];
    }
    int used = 0;
    for (int k = 0; k < 256; ++k)
        if (any[k >> 1 | (k & 1) << 7]) symbols[used++] = (uint8_t)(k >> 1 | (k & 1) << 7);
    s->symbols = (used + 7) & ~7;
    for (int i = s->first; i >= 0; i = s->nodes[i].behind) {
        node *n = &s->nodes[i];
        uint32_t *to = counts_of(s, i);
        int begin = 0, end = used;
        memcpy(all, to, sizeof all);
        for (int k = 0; k < used; ++k) to[k] = all[symbols[k]];
        for (int k = used; k < s->symbols; ++k) to[k] = 0;
        while (begin < used && to[begin] == 0) ++begin;
        while (end > begin && to[end - 1] == 0) --end;
        n->begin = (int16_t)(begin & ~7), n->end = (int16_t)((end + 7) & ~7);
    }
}

static void merge_rare(state *s) {
    for (int i = s->first; i >= 0;) {
        int behind = s->nodes[i].behind, j = of_bucket(s, i, behind);
        if (j < 0) j = of_bucket(s, i, s->nodes[i].before);
        if (j >= 0 && s->nodes[i].n < LEAST_COUNT) add(s, j, i);
        i = behind;
    }
}

static void merge(state *s, int most) {
    int live = 0;
    for (int i = 0; i < CONTEXTS; ++i) s->gains[i] = NONE;
    for (int i = s->first; i >= 0; i = s->nodes[i].behind, ++live) s->nodes[i].cost = joint_cost(s, i, -1);
    for (int i = s->first; i >= 0; i = s->nodes[i].behind) look_for_partners(s, i, 3);
    for (int g = 0; g < GROUPS; ++g) update_group(s, g);
    for (; live > 1; --live) {
        int best = most_gain(s);
        if (best < 0 || (s->gains[best] < 0 && live <= most)) return;
        int direction = gain_with(s, best, 1) > gain_with(s, best, 0), gone = s->nodes[best].partners[direction];
        float cost = s->nodes[best].costs[direction];
        add(s, best, gone);
        s->nodes[best].cost = cost;
        s->gains[gone] = NONE;
        update_group(s, gone / GROUP);
        look_for_partners(s, best, 3);
        update_group(s, best / GROUP);
        /* those whose next or nearest one it may be */
        for (int k = 0; k < 2; ++k) {
            int i = k ? gone : best, bucket = s->nodes[i].bucket, before = of_bucket(s, i, s->nodes[i].before);
            if (before >= 0) look_again(s, before, best, gone);
            if (bucket == 0) continue;
            for (int j = s->firsts[bucket - 1]; j >= 0; j = of_bucket(s, j, s->nodes[j].behind))
                look_again(s, j, best, gone);
        }
    }
}

void dense_cluster(const dense_loops *loops, uint32_t (*counts)[256], const uint8_t *seen, int most, int shared,
                   void *room, dense_model *m) {
    state *s = room;
    uint8_t symbols[256];
    s->loops = loops, s->counts = counts;
    s->entry_weight = shared ? 0 : 1;
    load(s, seen);
    merge_rare(s);
    compact(s, symbols);
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
