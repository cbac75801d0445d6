/* The search for repeats, included once per SIMD level with LEVEL(name) giving each function its own name: what differs is
 * how 64 bytes are compared, and how equal ones are counted. */

#ifdef LEVEL_F16C

static inline int LEVEL(bits_set)(uint64_t x) { return __builtin_popcountll(x); }

static inline uint32_t LEVEL(equal32)(const uint8_t *a, const uint8_t *b) {
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)a);
    __m256i y = _mm256_loadu_si256((const __m256i *)(const void *)b);
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, y));
}

static inline uint64_t LEVEL(equal64)(const uint8_t *a, const uint8_t *b) {
    return LEVEL(equal32)(a, b) | (uint64_t)LEVEL(equal32)(a + 32, b + 32) << 32;
}

#else

static inline int LEVEL(bits_set)(uint64_t x) {
    const uint64_t twos = 0x3333333333333333ULL;
    x -= x >> 1 & 0x5555555555555555ULL;
    x = (x & twos) + (x >> 2 & twos);
    return (int)((((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fULL) * 0x0101010101010101ULL) >> 56);
}

/* Which of 64 bytes are equal, the first one in the lowest bit. */
static inline uint64_t LEVEL(equal64)(const uint8_t *a, const uint8_t *b) {
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

#endif

/* Where another row may have more of the 64 bytes at `at` than the one followed: that, and which they are. */
static inline uint64_t LEVEL(closer)(const lane_search *s, size_t at, uint64_t same, size_t *distance) {
    size_t look = (at + GRID - 1) & ~(size_t)(GRID - 1);
    uint32_t entry = s->table[hash_at(s, look) >> s->shift];
    size_t back = look - place_in(entry);
    if (entry == 0 || back > at || back == *distance) return same;
    uint64_t other = LEVEL(equal64)(s->lane + at, s->lane + at - back);
    if (LEVEL(bits_set)(other) <= LEVEL(bits_set)(same)) return same;
    *distance = back;
    return other;
}

/* The repeats from `at` on in the row that goes on `distance` behind another one; where it ends. */
static size_t LEVEL(follow_row)(lane_search *s, const lane_limits *limits, size_t at, size_t distance, kvmnn_repeat *out,
                         size_t *found) {
    enum { CLOSE = 48 }; /* of 64 bytes: where fewer are equal, another row may be closer */
    size_t least = limits->again;
    while (at < s->end) {
        uint64_t same = LEVEL(equal64)(s->lane + at, s->lane + at - distance);
        size_t next = at + 64;
        insert_until(s, at);
        if (LEVEL(bits_set)(same) < CLOSE) {
            size_t before = distance;
            same = LEVEL(closer)(s, at, same, &distance);
            if (distance != before) least = limits->least;
        }
        if (LEVEL(bits_set)(same) < limits->alike) break;
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

static size_t LEVEL(find)(const uint8_t *lane, size_t n, int dear, uint32_t *table, kvmnn_repeat *out) {
    enum { ROOM = 72, SHORT = 64 << 10 };
    const lane_limits *limits = dear ? &DEAR : &CHEAP;
    size_t size = kvmnn_repeats_table(dear ? n : n / 2), at = 0, done = 0, found = 0, vain = 0;
    unsigned patience = limits->patience + (n <= SHORT); /* what comes early in a lane is found again more often */
    if (n <= ROOM) return 0;
    lane_search s = {lane, 0, (n < MOST_PLACES ? n : MOST_PLACES) - ROOM, table, shift_of(size), 64 - 8 * limits->look};
    memset(table, 0, size * sizeof *table);
    while (at < s.end) {
        uint64_t hash = hash_at(&s, at);
        uint32_t before = table[hash >> s.shift], entry = entry_of(&s, hash, at);
        table[hash >> s.shift] = entry;
        if (alike(before, entry) && before && hash_at(&s, place_in(before)) == hash) { /* in this order: few are alike */
            size_t distance = at - place_in(before), begin = at - same_before(lane, at, done, distance);
            size_t length = at - begin + same_length(lane, at, s.end, distance);
            if (length >= limits->least) {
                out[found++] = (kvmnn_repeat){(uint32_t)begin, (uint32_t)length, (uint32_t)distance};
                s.next = at + GRID;
                insert_until(&s, LEVEL(follow_row)(&s, limits, begin + length + 1, distance, out, &found));
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

/* Which of 64 bytes have none of `bits`. */
static inline uint64_t LEVEL(without64)(const uint8_t *a, uint8_t bits) {
    static const uint8_t zeros[64];
    uint8_t left[64];
    for (int i = 0; i < 64; ++i) left[i] = a[i] & bits;
    return LEVEL(equal64)(left, zeros);
}

/* Of a long lane a window in so many is looked at, of which both of a pair must be one; of a short one more bytes count. */
static double LEVEL(missed_of_some)(const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count,
                                    uint32_t *table) {
    enum { ENTRIES = 1 << 12, SHIFT = 64 - 12, ROOM = 72, LEAST = 16, LONG = 1 << 20, SHORT = 1 << 19, MOST_BYTES = 4 };
    size_t every = (n + LONG - 1) / LONG, seen = 0, missed = 0, bytes_that_count = 1;
    while (bytes_that_count < MOST_BYTES && n * 2 * bytes_that_count <= SHORT) bytes_that_count *= 2;
    uint8_t bits = (uint8_t)~(bytes_that_count - 1);
    repeats_walk walk = {repeats, repeats + count};
    memset(table, 0, ENTRIES * sizeof *table);
    for (size_t i = 0; i + ROOM <= n; i += 64 * every) {
        uint64_t found = LEVEL(without64)(lane + i, bits);
        if (found == ~(uint64_t)0) continue; /* of rows of zeros, which every search finds and which say nothing of others */
        for (; found; found &= found - 1) {
            size_t at = i + kvmnn_lowest_bit(found), before;
            uint64_t bytes = kvmnn_load_le64(lane + at);
            uint32_t *entry = table + (bytes * 0x9E3779B97F4A7C15ULL >> SHIFT);
            before = *entry;
            *entry = (uint32_t)at + 1;
            ++seen;
            if (before && kvmnn_load_le64(lane + before - 1) == bytes) missed += !is_repeated(&walk, at);
        }
    }
    return seen < LEAST ? 0 : (double)(missed * every) / (double)seen;
}

/* Whether the eight bytes at `at` are there less than `near` before as well. */
static int LEVEL(is_near)(const uint8_t *lane, size_t at, size_t near) {
    uint64_t bytes = kvmnn_load_le64(lane + at);
    uint8_t first[64], last[64];
    memset(first, lane[at], sizeof first);
    memset(last, lane[at + 7], sizeof last);
    for (size_t i = at > near ? at - near : 0; i < at; i += 64) {
        uint64_t found = LEVEL(equal64)(lane + i, first);
        if (found) found &= LEVEL(equal64)(lane + i + 7, last);
        for (; found; found &= found - 1) {
            size_t before = i + kvmnn_lowest_bit(found);
            if (before < at && kvmnn_load_le64(lane + before) == bytes) return 1;
        }
    }
    return 0;
}

/* Of some places; what comes again soon may have none of the bytes that count above. */
static double LEVEL(missed_near)(const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count) {
    enum { PLACES = 24, NEAR = 1 << 10, ROOM = 72, LEAST = 2 };
    size_t missed = 0;
    repeats_walk walk = {repeats, repeats + count};
    if (n < PLACES * ROOM) return 0;
    for (size_t i = 1; i < PLACES; ++i) {
        size_t at = n / PLACES * i;
        if (LEVEL(is_near)(lane, at, NEAR)) missed += !is_repeated(&walk, at);
    }
    return missed < LEAST ? 0 : (double)missed / PLACES;
}

/* Of some places those where five bytes and more are as in a row shortly before: of columns that never change. */
static double LEVEL(missed_in_rows)(const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count) {
    enum { PLACES = 12, FAR = 512, ROOM = 72, LEAST = 2 };
    size_t missed = 0;
    repeats_walk walk = {repeats, repeats + count};
    if (n < PLACES * (FAR + ROOM)) return 0;
    for (size_t i = 1; i < PLACES; ++i) {
        size_t at = n / PLACES * i;
        for (size_t distance = GRID; distance <= FAR; distance += GRID) {
            uint64_t same = LEVEL(equal64)(lane + at, lane + at - distance);
            same &= same >> 1;
            same &= same >> 2 & same >> 3;
            if (same == 0) continue;
            missed += !is_repeated(&walk, at + kvmnn_lowest_bit(same));
            break;
        }
    }
    return missed < LEAST ? 0 : (double)missed / PLACES;
}

static double LEVEL(missed)(const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count, uint32_t *table) {
    double most = LEVEL(missed_of_some)(lane, n, repeats, count, table), other;
    if ((other = LEVEL(missed_near)(lane, n, repeats, count)) > most) most = other;
    if ((other = LEVEL(missed_in_rows)(lane, n, repeats, count)) > most) most = other;
    return most;
}

static const repeats_loops LEVEL(table) = {LEVEL(find), LEVEL(missed)};
