/* Contexts to tables: neighbours are merged while their own tables would cost more than they save. */
#include "dense.h"

enum { LEAST_COUNT = 256 }; /* contexts that were seen less often are merged with a neighbour at once */
#define ENTRY_BITS 3.5f     /* of an entry that is not 0; one that is 0 takes a bit */
#define NONE (-1e30f)

typedef struct {
    uint32_t n;
    float cost;
    int16_t bucket, magnitude;
    int16_t live, into;  /* merged into another one */
    int16_t partners[2]; /* the next one of the bucket, the nearest of the bucket above; -1 for none */
    float gains[2];
    int16_t stale;
} node;

typedef struct {
    node nodes[CONTEXTS];
    uint32_t counts[CONTEXTS][256]; /* of the symbols in use alone */
    uint32_t nothing[256];
    int count, symbols; /* symbols: a multiple of 8 */
    float entry_weight;
} state;

size_t dense_cluster_room(void) { return sizeof(state); }

/* x * log2(x), to 1e-5 of x; 0 for 0. Plain operations in a fixed order, so that all machines make the same tables. */
static inline float times_log(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    float e = (float)(int32_t)(bits >> 23) - 127.0f, m;
    bits = (bits & 0x7fffff) | 0x3f800000;
    memcpy(&m, &bits, 4);
    float p =
        3.1157899f + m * (-3.3241990f + m * (2.5988452f + m * (-1.2315303f + m * (0.31821337f - m * 0.034436006f))));
    return x * (e + p * (m - 1.0f));
}

/* Bits of coding both counts with one table, the table included. */
static float joint_cost(const uint32_t *a, const uint32_t *b, uint32_t n, int symbols, float entry_weight) {
    float sums[8] = {0}, sum = 0;
    uint32_t used[8] = {0}, entries = 0;
    for (int i = 0; i < symbols; i += 8)
        for (int k = 0; k < 8; ++k) {
            uint32_t count = a[i + k] + b[i + k];
            sums[k] += times_log((float)(int32_t)count);
            used[k] += count != 0;
        }
    for (int k = 0; k < 8; ++k) sum += sums[k], entries += used[k];
    return times_log((float)(int32_t)n) - sum + ((float)symbols + ENTRY_BITS * (float)(int32_t)entries) * entry_weight;
}

float dense_order0_bits(const uint32_t counts[256]) {
    static const uint32_t nothing[256] = {0};
    uint32_t n = 0;
    for (int s = 0; s < 256; ++s) n += counts[s];
    return joint_cost(counts, nothing, n, 256, 0);
}

float dense_cross_bits(const dense_table *t, const uint32_t counts[256]) {
    float bits = 0;
    for (int s = 0; s < 256; ++s) {
        if (counts[s] == 0) continue;
        float f = (float)t->f[s];
        if (t->f[s] == 0) return -NONE;
        bits += (float)(int32_t)counts[s] * ((float)SCALE_BITS - times_log(f) / f);
    }
    return bits;
}

static void add(state *s, int to, int from) {
    for (int i = 0; i < s->symbols; ++i) s->counts[to][i] += s->counts[from][i];
    s->nodes[to].n += s->nodes[from].n;
    s->nodes[from].live = 0;
    s->nodes[from].into = (int16_t)to;
}

static int next_in_bucket(const state *s, int i, int step) {
    for (int j = i + step; j >= 0 && j < s->count && s->nodes[j].bucket == s->nodes[i].bucket; j += step)
        if (s->nodes[j].live) return j;
    return -1;
}

static int nearest_above(const state *s, int i) {
    int best = -1, distance = MAGNITUDES;
    for (int j = i + 1; j < s->count && s->nodes[j].bucket <= s->nodes[i].bucket + 1; ++j) {
        if (!s->nodes[j].live || s->nodes[j].bucket == s->nodes[i].bucket) continue;
        int apart = s->nodes[j].magnitude - s->nodes[i].magnitude;
        if (apart < 0) apart = -apart;
        if (apart < distance) best = j, distance = apart;
    }
    return best;
}

static void look_for_partners(state *s, int i) {
    node *a = &s->nodes[i];
    a->partners[0] = (int16_t)next_in_bucket(s, i, 1);
    a->partners[1] = (int16_t)nearest_above(s, i);
    for (int d = 0; d < 2; ++d) {
        int j = a->partners[d];
        a->gains[d] = NONE;
        if (j < 0) continue;
        const node *b = &s->nodes[j];
        a->gains[d] =
            a->cost + b->cost - joint_cost(s->counts[i], s->counts[j], a->n + b->n, s->symbols, s->entry_weight);
    }
    a->stale = 0;
}

static void load(state *s, const uint32_t (*counts)[256], const uint8_t *seen, uint8_t symbols[256]) {
    uint32_t any[256] = {0};
    s->count = 0;
    for (int c = 0; c < CONTEXTS; ++c)
        if (seen[c])
            for (int i = 0; i < 256; ++i) any[i] |= counts[c][i];
    int used = 0;
    for (int i = 0; i < 256; ++i)
        if (any[i]) symbols[used++] = (uint8_t)i;
    s->symbols = (used + 7) & ~7;
    for (int i = used; i < s->symbols; ++i) symbols[i] = 0;
    for (int c = 0; c < CONTEXTS; ++c) {
        if (!seen[c]) continue;
        uint32_t *to = s->counts[s->count], n = 0;
        for (int i = 0; i < used; ++i) n += to[i] = counts[c][symbols[i]];
        for (int i = used; i < s->symbols; ++i) to[i] = 0;
        s->nodes[s->count++] =
            (node){.n = n, .bucket = (int16_t)(c / MAGNITUDES), .magnitude = c % MAGNITUDES, .live = 1, .stale = 1};
    }
}

static void merge_rare(state *s) {
    for (int i = 0; i < s->count; ++i) {
        if (s->nodes[i].n >= LEAST_COUNT) continue;
        int j = next_in_bucket(s, i, 1);
        if (j < 0) j = next_in_bucket(s, i, -1);
        if (j >= 0) add(s, j, i);
    }
}

static int merge(state *s, int most) {
    int live = 0;
    for (int i = 0; i < s->count; ++i) {
        node *a = &s->nodes[i];
        if (!a->live) continue;
        ++live;
        a->cost = joint_cost(s->counts[i], s->nothing, a->n, s->symbols, s->entry_weight);
    }
    while (live > 1) {
        float gain = NONE;
        int best = -1, direction = 0;
        for (int i = 0; i < s->count; ++i) {
            if (!s->nodes[i].live) continue;
            if (s->nodes[i].stale) look_for_partners(s, i);
            for (int d = 0; d < 2; ++d)
                if (s->nodes[i].gains[d] > gain) gain = s->nodes[i].gains[d], best = i, direction = d;
        }
        if (best < 0 || (gain < 0 && live <= most)) break;
        int j = s->nodes[best].partners[direction];
        add(s, best, j);
        s->nodes[best].cost = joint_cost(s->counts[best], s->nothing, s->nodes[best].n, s->symbols, s->entry_weight);
        s->nodes[best].stale = 1;
        --live;
        for (int i = 0; i < s->count; ++i)
            for (int d = 0; d < 2; ++d)
                if (s->nodes[i].partners[d] == best || s->nodes[i].partners[d] == j) s->nodes[i].stale = 1;
    }
    return live;
}

void dense_cluster(const uint32_t (*counts)[256], const uint8_t *seen, int most, int shared, void *room,
                   dense_model *m) {
    state *s = room;
    uint8_t symbols[256];
    memset(s->nothing, 0, sizeof s->nothing);
    s->entry_weight = shared ? 0 : 1;
    load(s, counts, seen, symbols);
    merge_rare(s);
    merge(s, most);
    int number[CONTEXTS];
    m->tables = 0;
    for (int i = 0; i < s->count; ++i) {
        if (!s->nodes[i].live) continue;
        uint32_t full[256] = {0};
        for (int k = 0; k < s->symbols; ++k)
            if (s->counts[i][k]) full[symbols[k]] = s->counts[i][k];
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
