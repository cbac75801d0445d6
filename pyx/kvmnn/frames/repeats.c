#include "repeats.h"

#include "little_endian.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

static inline int bits_set(uint64_t x) {
    const uint64_t twos = 0x3333333333333333ULL;
    x -= x >> 1 & 0x5555555555555555ULL;
    x = (x & twos) + (x >> 2 & twos);
    return (int)((((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fULL) * 0x0101010101010101ULL) >> 56);
}

/* Which of 64 bytes are equal, the first one in the lowest bit. */
static inline uint64_t equal64(const uint8_t *a, const uint8_t *b) {
#if defined(__SSE2__)
    uint64_t equal = 0;
    for (int i = 0; i < 64; i += 16) {
        __m128i x = _mm_loadu_si128((const __m128i *)(a + i)), y = _mm_loadu_si128((const __m128i *)(b + i));
        equal |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(x, y)) << i;
    }
    return equal;
#else
    const uint64_t low7 = 0x7f7f7f7f7f7f7f7fULL;
    uint64_t found = 0;
    for (int i = 0; i < 8; ++i) {
        uint64_t x = kvmnn_load_le64(a + 8 * i) ^ kvmnn_load_le64(b + 8 * i);
        uint64_t same = ~(((x & low7) + low7) | x) & ~low7; /* the top bit of every byte that is 0 */
        found |= ((same >> 7) * 0x0102040810204080ULL >> 56) << 8 * i;
    }
    return found;
#endif
}

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

static const lane_limits DEAR = {6, 6, 4, 16, 5, 3}, CHEAP = {8, 11, 5, 32, 6, 2};

enum { GRID = 8 }; /* from one place that is looked at to the next */

typedef struct {
    const uint8_t *lane;
    size_t next;     /* place to be put into the table */
    size_t end;      /* nothing begins here or later: far enough from the lane's */
    uint32_t *table;
    unsigned shift, unused; /* bits of a hash that are no index; of eight bytes that are not looked at */
} lane_search;

static inline uint32_t *place_of(const lane_search *s, uint64_t bytes) {
    return s->table + (((bytes << s->unused) * 0x9E3779B97F4A7C15ULL) >> s->shift);
}

/* How many bytes before `at`, down to `done`, are those `distance` before them as well. */
static inline size_t same_before(const uint8_t *lane, size_t at, size_t done, size_t distance) {
    size_t begin = at;
    while (begin > done && begin > distance && lane[begin - 1] == lane[begin - 1 - distance]) --begin;
    return at - begin;
}

static inline void insert_until(lane_search *s, size_t end) {
    for (; s->next < end && s->next < s->end; s->next += GRID)
        *place_of(s, kvmnn_load_le64(s->lane + s->next)) = (uint32_t)s->next + 1;
}

/* Where another row may have more of the 64 bytes at `at` than the one followed: that, and which they are. */
static inline uint64_t closer(const lane_search *s, size_t at, uint64_t same, size_t *distance) {
    size_t look = (at + GRID - 1) & ~(size_t)(GRID - 1), before = *place_of(s, kvmnn_load_le64(s->lane + look));
    if (before == 0 || look - (before - 1) > at || look - (before - 1) == *distance) return same;
    uint64_t other = equal64(s->lane + at, s->lane + at - (look - (before - 1)));
    if (bits_set(other) <= bits_set(same)) return same;
    *distance = look - (before - 1);
    return other;
}

/* The repeats from `at` on in the row that goes on `distance` behind another one; where it ends. */
static size_t follow_row(lane_search *s, const lane_limits *limits, size_t at, size_t distance, kvmnn_repeat *out,
                         size_t *found) {
    enum { HALF = 32 };
    size_t least = limits->again;
    while (at < s->end) {
        uint64_t same = equal64(s->lane + at, s->lane + at - distance);
        size_t next = at + 64;
        insert_until(s, at);
        if (bits_set(same) < HALF) {
            size_t before = distance;
            same = closer(s, at, same, &distance);
            if (distance != before) least = limits->least;
        }
        if (bits_set(same) < limits->alike) break;
        while (same) {
            size_t begin = kvmnn_lowest_bit(same), length = ~(same >> begin) ? kvmnn_lowest_bit(~(same >> begin)) : 64;
            if (begin + length >= 64) {
                length = 64 - begin + same_length(s->lane, at + 64, s->end, distance);
                next = at + begin + length;
                same = 0;
            } else {
                same &= ~(((uint64_t)1 << length) - 1) << begin;
            }
            size_t earlier = 0;
            if (begin == 0 && least == limits->least) { /* another row: it may have begun in the block before */
                const kvmnn_repeat *last = out + *found - 1;
                earlier = same_before(s->lane, at, last->at + last->length, distance);
            }
            if (earlier + length < least) continue;
            out[(*found)++] =
                (kvmnn_repeat){(uint32_t)(at + begin - earlier), (uint32_t)(earlier + length), (uint32_t)distance};
            least = limits->again;
        }
        at = next;
    }
    return at;
}

size_t kvmnn_repeats_find(const uint8_t *lane, size_t n, int dear, uint32_t *table, kvmnn_repeat *out) {
    enum { ROOM = 72, SHORT = 64 << 10 };
    const lane_limits *limits = dear ? &DEAR : &CHEAP;
    size_t size = kvmnn_repeats_table(n), at = 0, done = 0, found = 0, vain = 0;
    unsigned patience = limits->patience + (n <= SHORT); /* what comes early in a lane is found again more often */
    if (n <= ROOM) return 0;
    lane_search s = {lane, 0, n - ROOM, table, shift_of(size), 64 - 8 * limits->look};
    memset(table, 0, size * sizeof *table);
    while (at < s.end) {
        uint64_t bytes = kvmnn_load_le64(lane + at);
        uint32_t *entry = place_of(&s, bytes);
        size_t before = *entry;
        *entry = (uint32_t)at + 1;
        if (before && (bytes ^ kvmnn_load_le64(lane + before - 1)) << s.unused == 0) {
            size_t distance = at - (before - 1), begin = at - same_before(lane, at, done, distance);
            size_t length = at - begin + same_length(lane, at, s.end, distance);
            if (length >= limits->least) {
                out[found++] = (kvmnn_repeat){(uint32_t)begin, (uint32_t)length, (uint32_t)distance};
                s.next = at + GRID;
                insert_until(&s, follow_row(&s, limits, begin + length + 1, distance, out, &found));
                at = s.next;
                done = out[found - 1].at + out[found - 1].length;
                vain = 0;
                continue;
            }
        }
        size_t longer = vain >> patience, step = (size_t)GRID << (longer < limits->longest ? longer : limits->longest);
        at = ((at + GRID + step) & ~(step - 1)) - GRID; /* places in a row stay the same, and are the late ones */
        ++vain;
    }
    return found;
}
