/* Contexts to tables: neighbours are merged while their own tables would cost more than they save. */
#include "residuals.h"

enum { MIN_CONTEXT_COUNT = 256 }; /* contexts that were seen less often are merged with a neighbour at once */
#define ENTRY_BITS 3.5f           /* of an entry that is not 0; one that is 0 takes a bit */
#define NO_GAIN (-1e30f)

typedef struct {
    uint32_t n;
    float cost;
    int16_t context, similarity_class, magnitude;
    int16_t previous, next;       /* of those that are live; -1 for none */
    int16_t is_live, merged_into; /* merged into another one */
    int16_t partners[2];          /* the next one of the similarity class, the nearest of the class above; -1 for none */
    float costs[2];               /* of one table for both */
    int16_t begin, end;           /* of the counts that are not all 0: multiples of 8 */
} node;

enum { GROUP = 16, GROUPS = CONTEXTS / GROUP };

typedef struct {
    const dense_kernels *kernels;
    node nodes[CONTEXTS];
    float gains[CONTEXTS]; /* with the better partner */
    float group_gains[GROUPS];
    uint32_t (*counts)[256];                    /* by context; of the symbols in use alone, once they are loaded */
    int count, symbols, first_live;             /* symbols: a multiple of 8; first: live node, -1 for none */
    int first_of_class[SIMILARITY_CLASSES + 1]; /* of each similarity class */
    float entry_weight;
} cluster_state;

static const uint32_t ZERO_COUNTS[256] = {0};

static uint32_t *node_counts(const cluster_state *s, int i) { return s->counts[s->nodes[i].context]; }

size_t dense_cluster_scratch_bytes(void) { return sizeof(cluster_state); }

static float x_log2_x(const dense_kernels *kernels, uint32_t n) {
    uint32_t counts[8] = {n}, entries;
    return kernels->log_sum(counts, ZERO_COUNTS, 8, &entries);
}

/* Bits of coding nodes i and j, or i alone, with one table, the table included. */
static float joint_cost(const cluster_state *s, int i, int j) {
    const node *a = &s->nodes[i], *b = j < 0 ? a : &s->nodes[j];
    int begin = a->begin < b->begin ? a->begin : b->begin, end = a->end > b->end ? a->end : b->end;
    uint32_t entries, n = a->n + (j < 0 ? 0 : b->n);
    float sum = s->kernels->log_sum(node_counts(s, i) + begin, (j < 0 ? ZERO_COUNTS : node_counts(s, j)) + begin,
                                  end - begin, &entries);
    return x_log2_x(s->kernels, n) - sum +
           ((float)s->symbols + ENTRY_BITS * (float)(int32_t)entries) * s->entry_weight;
}

float dense_order0_bits(const dense_kernels *kernels, const uint32_t counts[256]) {
    uint32_t n = 0, entries;
    for (int s = 0; s < 256; ++s) n += counts[s];
    return x_log2_x(kernels, n) - kernels->log_sum(counts, ZERO_COUNTS, 256, &entries);
}

float dense_cross_bits(const dense_kernels *kernels, const dense_table *t, const uint32_t counts[256]) {
    float bits = 0;
    for (int s = 0; s < 256; ++s) {
        if (counts[s] == 0) continue;
        if (t->frequencies[s] == 0) return -NO_GAIN;
        bits += (float)(int32_t)counts[s] *
                ((float)SCALE_BITS - x_log2_x(kernels, t->frequencies[s]) / (float)t->frequencies[s]);
    }
    return bits;
}

/* `j` if it is of the similarity class of `i`, else -1. */
static int same_class_or_none(const cluster_state *s, int i, int j) {
    return j >= 0 && s->nodes[j].similarity_class == s->nodes[i].similarity_class ? j : -1;
}

static void merge_nodes(cluster_state *s, int target, int source) {
    node *n = &s->nodes[source];
    uint32_t *sums = node_counts(s, target);
    const uint32_t *counts = node_counts(s, source);
    for (int i = n->begin; i < n->end; ++i) sums[i] += counts[i];
    if (n->begin < s->nodes[target].begin) s->nodes[target].begin = n->begin;
    if (n->end > s->nodes[target].end) s->nodes[target].end = n->end;
    s->nodes[target].n += n->n;
    n->is_live = 0;
    n->merged_into = (int16_t)target;
    if (s->first_of_class[n->similarity_class] == source)
        s->first_of_class[n->similarity_class] = same_class_or_none(s, source, n->next);
    if (n->previous >= 0)
        s->nodes[n->previous].next = n->next;
    else
        s->first_live = n->next;
    if (n->next >= 0) s->nodes[n->next].previous = n->previous;
}

static int find_nearest_above(const cluster_state *s, int i) {
    int best = -1, distance = MAGNITUDES;
    for (int j = s->first_of_class[s->nodes[i].similarity_class + 1]; j >= 0;
         j = same_class_or_none(s, j, s->nodes[j].next)) {
        int gap = s->nodes[j].magnitude - s->nodes[i].magnitude;
        if (gap < 0) gap = -gap;
        if (gap >= distance) break; /* magnitudes ascend */
        best = j, distance = gap;
    }
    return best;
}

static float merge_gain(const cluster_state *s, int i, int d) {
    const node *a = &s->nodes[i];
    return a->partners[d] < 0 ? NO_GAIN : a->cost + s->nodes[a->partners[d]].cost - a->costs[d];
}

/* The partners of node i that are `stale` (bits), and what is gained. */
static void update_partners(cluster_state *s, int i, int stale) {
    node *a = &s->nodes[i];
    for (int d = 0; d < 2; ++d) {
        if (!(stale >> d & 1)) continue;
        int j = d == 0 ? same_class_or_none(s, i, a->next) : find_nearest_above(s, i);
        a->partners[d] = (int16_t)j;
        if (j >= 0) a->costs[d] = joint_cost(s, i, j);
    }
    float gains[2] = {merge_gain(s, i, 0), merge_gain(s, i, 1)};
    s->gains[i] = gains[1] > gains[0] ? gains[1] : gains[0];
}

static void update_group(cluster_state *s, int group) {
    float max_gain = NO_GAIN;
    for (int i = group * GROUP; i < (group + 1) * GROUP; ++i)
        max_gain = s->gains[i] > max_gain ? s->gains[i] : max_gain;
    s->group_gains[group] = max_gain;
}

/* Looks again where a partner of node i has changed. */
static void refresh_partners(cluster_state *s, int i, int first, int second) {
    const int16_t *partners = s->nodes[i].partners;
    int stale = 0;
    for (int d = 0; d < 2; ++d) stale |= (partners[d] == first || partners[d] == second) << d;
    if (!stale) return;
    update_partners(s, i, stale);
    update_group(s, i / GROUP);
}

/* The first node with most gain; -1 for none. */
static int find_best_merge(const cluster_state *s) {
    float max_gain = NO_GAIN;
    int best = -1;
    for (int g = 0; g < GROUPS; ++g)
        if (s->group_gains[g] > max_gain) max_gain = s->group_gains[g], best = g;
    if (best < 0) return -1;
    for (best *= GROUP; s->gains[best] != max_gain;) ++best;
    return best;
}

static void load_contexts(cluster_state *s, const uint8_t *is_seen) {
    s->count = 0;
    for (int b = 0; b <= SIMILARITY_CLASSES; ++b) s->first_of_class[b] = -1;
    for (int c = 0; c < CONTEXTS; ++c) {
        if (!is_seen[c]) continue;
        if (s->first_of_class[c / MAGNITUDES] < 0) s->first_of_class[c / MAGNITUDES] = s->count;
        uint32_t n = 0;
        for (int i = 0; i < 256; ++i) n += s->counts[c][i];
        s->nodes[s->count] = (node){.n = n,
                                    .context = (int16_t)c,
                                    .similarity_class = (int16_t)(c / MAGNITUDES),
                                    .magnitude = c % MAGNITUDES,
                                    .previous = (int16_t)(s->count - 1),
                                    .next = (int16_t)(s->count + 1),
                                    .is_live = 1,
                                    .end = 256};
        ++s->count;
    }
    s->first_live = s->count ? 0 : -1;
    if (s->count) s->nodes[s->count - 1].next = -1;
}

/* Counts of the symbols in use alone, both signs of a magnitude side by side: those of a context then lie together. */
static void compact_symbols(cluster_state *s, uint8_t symbols[256]) {
    uint32_t any_counts[256] = {0}, all_counts[256];
    for (int i = s->first_live; i >= 0; i = s->nodes[i].next) {
        const uint32_t *counts = node_counts(s, i);
        for (int k = 0; k < 256; ++k) any_counts[k] |= counts[k];
    }
    int num_used = 0;
    for (int k = 0; k < 256; ++k)
        if (any_counts[k >> 1 | (k & 1) << 7]) symbols[num_used++] = (uint8_t)(k >> 1 | (k & 1) << 7);
    s->symbols = (num_used + 7) & ~7;
    for (int i = s->first_live; i >= 0; i = s->nodes[i].next) {
        node *n = &s->nodes[i];
        uint32_t *target = node_counts(s, i);
        int begin = 0, end = num_used;
        memcpy(all_counts, target, sizeof all_counts);
        for (int k = 0; k < num_used; ++k) target[k] = all_counts[symbols[k]];
        for (int k = num_used; k < s->symbols; ++k) target[k] = 0;
        while (begin < num_used && target[begin] == 0) ++begin;
        while (end > begin && target[end - 1] == 0) --end;
        n->begin = (int16_t)(begin & ~7), n->end = (int16_t)((end + 7) & ~7);
    }
}

static void merge_rare(cluster_state *s) {
    for (int i = s->first_live; i >= 0;) {
        int next = s->nodes[i].next, j = same_class_or_none(s, i, next);
        if (j < 0) j = same_class_or_none(s, i, s->nodes[i].previous);
        if (j >= 0 && s->nodes[i].n < MIN_CONTEXT_COUNT) merge_nodes(s, j, i);
        i = next;
    }
}

static void merge_tables(cluster_state *s, int max_tables) {
    int num_live = 0;
    for (int i = 0; i < CONTEXTS; ++i) s->gains[i] = NO_GAIN;
    for (int i = s->first_live; i >= 0; i = s->nodes[i].next, ++num_live) s->nodes[i].cost = joint_cost(s, i, -1);
    for (int i = s->first_live; i >= 0; i = s->nodes[i].next) update_partners(s, i, 3);
    for (int g = 0; g < GROUPS; ++g) update_group(s, g);
    for (; num_live > 1; --num_live) {
        int best = find_best_merge(s);
        if (best < 0 || (s->gains[best] < 0 && num_live <= max_tables)) return;
        int direction = merge_gain(s, best, 1) > merge_gain(s, best, 0), absorbed = s->nodes[best].partners[direction];
        float cost = s->nodes[best].costs[direction];
        merge_nodes(s, best, absorbed);
        s->nodes[best].cost = cost;
        s->gains[absorbed] = NO_GAIN;
        update_group(s, absorbed / GROUP);
        update_partners(s, best, 3);
        update_group(s, best / GROUP);
        /* those whose next or nearest one it may be */
        for (int k = 0; k < 2; ++k) {
            int i = k ? absorbed : best, similarity_class = s->nodes[i].similarity_class,
                previous = same_class_or_none(s, i, s->nodes[i].previous);
            if (previous >= 0) refresh_partners(s, previous, best, absorbed);
            if (similarity_class == 0) continue;
            for (int j = s->first_of_class[similarity_class - 1]; j >= 0;
                 j = same_class_or_none(s, j, s->nodes[j].next))
                refresh_partners(s, j, best, absorbed);
        }
    }
}

void dense_cluster_contexts(const dense_kernels *kernels, uint32_t (*counts)[256], const uint8_t *is_seen,
                            int max_tables, int is_shared, void *scratch, dense_model *m) {
    cluster_state *s = scratch;
    uint8_t symbols[256];
    s->kernels = kernels, s->counts = counts;
    s->entry_weight = is_shared ? 0 : 1;
    load_contexts(s, is_seen);
    merge_rare(s);
    compact_symbols(s, symbols);
    merge_tables(s, max_tables);
    int table_index[CONTEXTS];
    m->num_tables = 0;
    for (int i = 0; i < s->count; ++i) {
        if (!s->nodes[i].is_live) continue;
        uint32_t full_counts[256] = {0};
        for (int k = 0; k < s->symbols; ++k)
            if (node_counts(s, i)[k]) full_counts[symbols[k]] = node_counts(s, i)[k];
        table_index[i] = m->num_tables;
        if (is_shared && full_counts[ESCAPE_SYMBOL] == 0) full_counts[ESCAPE_SYMBOL] = 1;
        dense_quantize_frequencies(full_counts, &m->symbol_tables[m->num_tables++]);
    }
    if (m->num_tables == 0) {
        uint32_t single_count[256] = {1};
        dense_quantize_frequencies(single_count, &m->symbol_tables[m->num_tables++]);
    }
    uint8_t last_table = 0;
    for (int c = 0, i = 0; c < CONTEXTS; ++c) {
        if (is_seen[c]) {
            int root = i++;
            while (!s->nodes[root].is_live) root = s->nodes[root].merged_into;
            last_table = (uint8_t)table_index[root];
        }
        m->context_tables[c] = last_table;
    }
}
