#include "match_finder.h"

#include "little_endian.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* How many bytes from `pos` on, before `end`, are those `distance` before them. Eight bytes more can be read. */
static inline size_t match_length_forward(const uint8_t *lane, size_t pos, size_t end, size_t distance) {
    size_t start = pos;
    while (pos < end) {
        uint64_t x = kvmnn_load_le64(lane + pos) ^ kvmnn_load_le64(lane + pos - distance);
        if (x) {
            pos += kvmnn_lowest_bit(x) / 8;
            break;
        }
        pos += 8;
    }
    if (start >= end) return 0;
    return (pos < end ? pos : end) - start;
}

size_t kvmnn_repeats_table_size(size_t n) {
    size_t size = 1 << 12;
    while (size < n / 16 && size < 1 << 18) size *= 2;
    return size;
}

static unsigned table_shift(size_t size) {
    unsigned shift = 64;
    while (size > 1) {
        size >>= 1;
        --shift;
    }
    return shift;
}

typedef struct {
    unsigned min_probe;   /* bytes that must be equal for a place to be looked at ... */
    size_t min_match;     /* ... and how many then, for a repeat ... */
    size_t min_rep_match; /* ... and for another one in the same row, which is said in few bits */
    int min_row_equal;    /* of 64 bytes: a row that has less in common with the other is left */
    /* so many failed probes, as a power of two, make the steps twice as long, so often */
    unsigned skip_log, max_skip_log;
} match_params;

static const match_params MATCH_THOROUGH = {6, 6, 4, 16, 5, 3}, MATCH_FAST = {8, 11, 5, 32, 5, 3};

enum {
    PROBE_STEP = 8,                                 /* from one place that is looked at to the next */
    TAG_BITS = 8,                                   /* of an entry of the table: more bits of the hash ... */
    POSITION_BITS = 32 - TAG_BITS,                  /* ... and below them the place, in steps of the grid from 1 on */
    MAX_SEARCH_BYTES = PROBE_STEP << POSITION_BITS, /* bytes of a lane that are looked at: more than any piece has */
};

typedef struct {
    const uint8_t *lane;
    size_t next_insert; /* place to be put into the table */
    size_t search_end;  /* nothing begins here or later: far enough from the lane's */
    uint32_t *table;
    unsigned shift, num_ignored_bits; /* bits of a hash that are no index; of eight bytes that are not looked at */
} match_search;

static inline uint64_t hash_at(const match_search *s, size_t pos) {
    return (kvmnn_load_le64(s->lane + pos) << s->num_ignored_bits) * 0x9E3779B97F4A7C15ULL;
}

static inline uint32_t make_entry(const match_search *s, uint64_t hash, size_t pos) {
    return (uint32_t)(hash >> (s->shift - TAG_BITS)) << POSITION_BITS | (uint32_t)(pos / PROBE_STEP + 1);
}

/* The place of an entry that is not 0. */
static inline size_t entry_position(uint32_t entry) {
    return (size_t)(entry << TAG_BITS >> TAG_BITS) * PROBE_STEP - PROBE_STEP;
}

/* Whether two entries were made of equal bytes, as far as they tell: few others have to be looked at. */
static inline int tags_equal(uint32_t a, uint32_t b) { return (a ^ b) >> POSITION_BITS == 0; }

/* How many bytes before `pos`, down to `limit`, are those `distance` before them as well. */
static inline size_t match_length_backward(const uint8_t *lane, size_t pos, size_t limit, size_t distance) {
    size_t start = pos;
    while (start > limit && start > distance && lane[start - 1] == lane[start - 1 - distance]) --start;
    return pos - start;
}

static inline void insert_until(match_search *s, size_t end) {
    for (; s->next_insert < end && s->next_insert < s->search_end; s->next_insert += PROBE_STEP) {
        uint64_t hash = hash_at(s, s->next_insert);
        s->table[hash >> s->shift] = make_entry(s, hash, s->next_insert);
    }
}

typedef struct {
    const kvmnn_repeat *next, *end;
} repeat_cursor;

/* Whether a place is in a repeat; places are asked for in ascending order. */
static inline int is_in_repeat(repeat_cursor *cursor, size_t pos) {
    while (cursor->next < cursor->end && cursor->next->start + cursor->next->length <= pos) ++cursor->next;
    return cursor->next < cursor->end && cursor->next->start <= pos;
}

typedef struct {
    size_t (*find)(const uint8_t *lane, size_t n, int is_thorough, uint32_t *table, kvmnn_repeat *out);
    double (*estimate_missed)(const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count,
                              uint32_t *table);
} repeats_kernels;

#define KVMNN_SIMD_KERNELS "frames/match_finder_impl.h"
#define KVMNN_KERNEL_TABLE repeats_kernels
#include "../simd.h"

size_t kvmnn_repeats_find(int level, const uint8_t *lane, size_t n, int is_thorough, uint32_t *table,
                          kvmnn_repeat *out) {
    return isa_tables[level]->find(lane, n, is_thorough, table, out);
}

double kvmnn_repeats_estimate_missed(
    int level, const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count, uint32_t *table) {
    return isa_tables[level]->estimate_missed(lane, n, repeats, count, table);
}
