#include "repeats.h"

#include "little_endian.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* How many bytes from `at` on, before `end`, are those `distance` before them. Eight bytes more can be read. */
static inline size_t same_length(const uint8_t *lane, size_t at, size_t end, size_t distance) {
    size_t begin = at;
    while (at < end) {
        uint64_t x = kvmnn_load_le64(lane + at) ^ kvmnn_load_le64(lane + at - distance);
        if (x) {
            at += kvmnn_lowest_bit(x) / 8;
            break;
        }
        at += 8;
    }
    if (begin >= end) return 0;
    return (at < end ? at : end) - begin;
}

size_t kvmnn_repeats_table(size_t n) {
    size_t size = 1 << 12;
    while (size < n / 16 && size < 1 << 18) size *= 2;
    return size;
}

static unsigned shift_of(size_t size) {
    unsigned shift = 64;
    while (size > 1) {
        size >>= 1;
        --shift;
    }
    return shift;
}

typedef struct {
    unsigned look;  /* bytes that must be equal for a place to be looked at ... */
    size_t least;   /* ... and how many then, for a repeat ... */
    size_t again;   /* ... and for another one in the same row, which is said in few bits */
    int alike;      /* of 64 bytes: a row that has less in common with the other is left */
    unsigned patience, longest; /* so many looks in vain, as a power of two, make the steps twice as long, so often */
} lane_limits;

static const lane_limits DEAR = {6, 6, 4, 16, 5, 3}, CHEAP = {8, 11, 5, 32, 5, 3};

enum {
    GRID = 8,                         /* from one place that is looked at to the next */
    TAG_BITS = 8,                     /* of an entry of the table: more bits of the hash ... */
    PLACE_BITS = 32 - TAG_BITS,       /* ... and below them the place, in steps of the grid from 1 on */
    MOST_PLACES = GRID << PLACE_BITS, /* bytes of a lane that are looked at: more than any piece has */
};

typedef struct {
    const uint8_t *lane;
    size_t next;     /* place to be put into the table */
    size_t end;      /* nothing begins here or later: far enough from the lane's */
    uint32_t *table;
    unsigned shift, unused; /* bits of a hash that are no index; of eight bytes that are not looked at */
} lane_search;

static inline uint64_t hash_at(const lane_search *s, size_t at) {
    return (kvmnn_load_le64(s->lane + at) << s->unused) * 0x9E3779B97F4A7C15ULL;
}

static inline uint32_t entry_of(const lane_search *s, uint64_t hash, size_t at) {
    return (uint32_t)(hash >> (s->shift - TAG_BITS)) << PLACE_BITS | (uint32_t)(at / GRID + 1);
}

/* The place of an entry that is not 0. */
static inline size_t place_in(uint32_t entry) { return (size_t)(entry << TAG_BITS >> TAG_BITS) * GRID - GRID; }

/* Whether two entries were made of equal bytes, as far as they tell: few others have to be looked at. */
static inline int alike(uint32_t a, uint32_t b) { return (a ^ b) >> PLACE_BITS == 0; }

/* How many bytes before `at`, down to `done`, are those `distance` before them as well. */
static inline size_t same_before(const uint8_t *lane, size_t at, size_t done, size_t distance) {
    size_t begin = at;
    while (begin > done && begin > distance && lane[begin - 1] == lane[begin - 1 - distance]) --begin;
    return at - begin;
}

static inline void insert_until(lane_search *s, size_t end) {
    for (; s->next < end && s->next < s->end; s->next += GRID) {
        uint64_t hash = hash_at(s, s->next);
        s->table[hash >> s->shift] = entry_of(s, hash, s->next);
    }
}

typedef struct {
    const kvmnn_repeat *next, *end;
} repeats_walk;

/* Whether a place is in a repeat; places are asked for in ascending order. */
static inline int is_repeated(repeats_walk *walk, size_t at) {
    while (walk->next < walk->end && walk->next->at + walk->next->length <= at) ++walk->next;
    return walk->next < walk->end && walk->next->at <= at;
}

typedef struct {
    size_t (*find)(const uint8_t *lane, size_t n, int dear, uint32_t *table, kvmnn_repeat *out);
    double (*missed)(const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count, uint32_t *table);
} repeats_loops;

#define KVMNN_LOOPS "frames/repeats_impl.h"
#define KVMNN_TABLE repeats_loops
#include "../simd.h"

size_t kvmnn_repeats_find(int level, const uint8_t *lane, size_t n, int dear, uint32_t *table, kvmnn_repeat *out) {
    return level_tables[level]->find(lane, n, dear, table, out);
}

double kvmnn_repeats_missed(
    int level, const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count, uint32_t *table) {
    return level_tables[level]->missed(lane, n, repeats, count, table);
}
