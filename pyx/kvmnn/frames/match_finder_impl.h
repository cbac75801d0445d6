/* The search for repeats, included once per SIMD level with ISA_FN(name) giving each function its own name: what differs is
 * how 64 bytes are compared, and how equal ones are counted. */

#ifdef ISA_F16C

static inline int ISA_FN(popcount)(uint64_t x) { return __builtin_popcountll(x); }

static inline uint32_t ISA_FN(equal32)(const uint8_t *a, const uint8_t *b) {
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)a);
    __m256i y = _mm256_loadu_si256((const __m256i *)(const void *)b);
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, y));
}

static inline uint64_t ISA_FN(equal64)(const uint8_t *a, const uint8_t *b) {
    return ISA_FN(equal32)(a, b) | (uint64_t)ISA_FN(equal32)(a + 32, b + 32) << 32;
}

#else

static inline int ISA_FN(popcount)(uint64_t x) {
    const uint64_t twos = 0x3333333333333333ULL;
    x -= x >> 1 & 0x5555555555555555ULL;
    x = (x & twos) + (x >> 2 & twos);
    return (int)((((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fULL) * 0x0101010101010101ULL) >> 56);
}

/* Which of 64 bytes are equal, the first one in the lowest bit. */
static inline uint64_t ISA_FN(equal64)(const uint8_t *a, const uint8_t *b) {
#if defined(__SSE2__)
    uint64_t equal = 0;
    for (int i = 0; i < 64; i += 16) {
        __m128i x = _mm_loadu_si128((const __m128i *)(a + i)), y = _mm_loadu_si128((const __m128i *)(b + i));
        equal |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(x, y)) << i;
    }
    return equal;
#else
    const uint64_t low7 = 0x7f7f7f7f7f7f7f7fULL;
    uint64_t equal_mask = 0;
    for (int i = 0; i < 8; ++i) {
        uint64_t x = kvmnn_load_le64(a + 8 * i) ^ kvmnn_load_le64(b + 8 * i);
        uint64_t zero_bytes = ~(((x & low7) + low7) | x) & ~low7; /* the top bit of every byte that is 0 */
        equal_mask |= ((zero_bytes >> 7) * 0x0102040810204080ULL >> 56) << 8 * i;
    }
    return equal_mask;
#endif
}

#endif

/* Where another row may have more of the 64 bytes at `pos` than the one followed: that, and which they are. */
static inline uint64_t ISA_FN(select_closer_row)(const match_search *s, size_t pos, uint64_t equal_mask,
                                                 size_t *distance) {
    size_t probe = (pos + PROBE_STEP - 1) & ~(size_t)(PROBE_STEP - 1);
    uint32_t entry = s->table[hash_at(s, probe) >> s->shift];
    size_t probe_distance = probe - entry_position(entry);
    if (entry == 0 || probe_distance > pos || probe_distance == *distance) return equal_mask;
    uint64_t probe_mask = ISA_FN(equal64)(s->lane + pos, s->lane + pos - probe_distance);
    if (ISA_FN(popcount)(probe_mask) <= ISA_FN(popcount)(equal_mask)) return equal_mask;
    *distance = probe_distance;
    return probe_mask;
}

/* The repeats from `pos` on in the row that goes on `distance` after another one; where it ends. */
static size_t ISA_FN(follow_row)(match_search *s, const match_params *params, size_t pos, size_t distance,
                                 kvmnn_repeat *out, size_t *count) {
    enum { MIN_CLOSE_BYTES = 48 }; /* of 64 bytes: where fewer are equal, another row may be closer */
    size_t min_length = params->min_rep_match;
    while (pos < s->search_end) {
        uint64_t equal_mask = ISA_FN(equal64)(s->lane + pos, s->lane + pos - distance);
        size_t next = pos + 64;
        insert_until(s, pos);
        if (ISA_FN(popcount)(equal_mask) < MIN_CLOSE_BYTES) {
            size_t previous_distance = distance;
            equal_mask = ISA_FN(select_closer_row)(s, pos, equal_mask, &distance);
            if (distance != previous_distance) min_length = params->min_match;
        }
        if (ISA_FN(popcount)(equal_mask) < params->min_row_equal) break;
        while (equal_mask) {
            size_t begin = kvmnn_lowest_bit(equal_mask),
                   length = ~(equal_mask >> begin) ? kvmnn_lowest_bit(~(equal_mask >> begin)) : 64;
            if (begin + length >= 64) {
                length = 64 - begin + match_length_forward(s->lane, pos + 64, s->search_end, distance);
                next = pos + begin + length;
                equal_mask = 0;
            } else {
                equal_mask &= ~(((uint64_t)1 << length) - 1) << begin;
            }
            size_t num_backward = 0;
            if (begin == 0 &&
                min_length == params->min_match) { /* another row: it may have begun in the block before */
                const kvmnn_repeat *last_repeat = out + *count - 1;
                num_backward = match_length_backward(s->lane, pos, last_repeat->start + last_repeat->length, distance);
            }
            if (num_backward + length < min_length) continue;
            out[(*count)++] = (kvmnn_repeat){(uint32_t)(pos + begin - num_backward), (uint32_t)(num_backward + length),
                                             (uint32_t)distance};
            min_length = params->min_rep_match;
        }
        pos = next;
    }
    return pos;
}

static size_t ISA_FN(find)(const uint8_t *lane, size_t n, int is_thorough, uint32_t *table, kvmnn_repeat *out) {
    enum { TAIL_BYTES = 72, SHORT_LANE_BYTES = 64 << 10 };
    const match_params *params = is_thorough ? &MATCH_THOROUGH : &MATCH_FAST;
    size_t size = kvmnn_repeats_table_size(is_thorough ? n : n / 2), pos = 0, emitted_end = 0, count = 0,
           num_failures = 0;
    unsigned skip_log =
        params->skip_log + (n <= SHORT_LANE_BYTES); /* what comes early in a lane is found again more often */
    if (n <= TAIL_BYTES) return 0;
    match_search s = {lane,
                      0,
                      (n < MAX_SEARCH_BYTES ? n : MAX_SEARCH_BYTES) - TAIL_BYTES,
                      table,
                      table_shift(size),
                      64 - 8 * params->min_probe};
    memset(table, 0, size * sizeof *table);
    while (pos < s.search_end) {
        uint64_t hash = hash_at(&s, pos);
        uint32_t previous_entry = table[hash >> s.shift], entry = make_entry(&s, hash, pos);
        table[hash >> s.shift] = entry;
        /* in this order: few tags are equal */
        if (tags_equal(previous_entry, entry) && previous_entry && hash_at(&s, entry_position(previous_entry)) == hash) {
            size_t distance = pos - entry_position(previous_entry),
                   begin = pos - match_length_backward(lane, pos, emitted_end, distance);
            size_t length = pos - begin + match_length_forward(lane, pos, s.search_end, distance);
            if (length >= params->min_match) {
                out[count++] = (kvmnn_repeat){(uint32_t)begin, (uint32_t)length, (uint32_t)distance};
                s.next_insert = pos + PROBE_STEP;
                insert_until(&s, ISA_FN(follow_row)(&s, params, begin + length + 1, distance, out, &count));
                pos = s.next_insert;
                emitted_end = out[count - 1].start + out[count - 1].length;
                num_failures = 0;
                continue;
            }
        }
        size_t skip = num_failures >> skip_log,
               step = (size_t)PROBE_STEP << (skip < params->max_skip_log ? skip : params->max_skip_log);
        pos = ((pos + PROBE_STEP + step) & ~(step - 1)) -
              PROBE_STEP; /* places in a row stay the same, and are the late ones */
        ++num_failures;
    }
    return count;
}

/* Which of 64 bytes have none of `bits`. */
static inline uint64_t ISA_FN(mask_without_bits)(const uint8_t *a, uint8_t bits) {
    static const uint8_t zeros[64];
    uint8_t masked[64];
    for (int i = 0; i < 64; ++i) masked[i] = a[i] & bits;
    return ISA_FN(equal64)(masked, zeros);
}

/* Of a long lane a window in so many is looked at, of which both of a pair must be one; of a short one more bytes count. */
static double ISA_FN(estimate_missed_sampled)(const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count,
                                              uint32_t *table) {
    enum {
        ENTRIES = 1 << 12,
        SHIFT = 64 - 12,
        TAIL_BYTES = 72,
        MIN_SAMPLES = 16,
        SAMPLE_BYTES = 1 << 20,
        SHORT_LANE_BYTES = 1 << 19,
        MAX_BYTE_VALUES = 4
    };
    size_t window_step = (n + SAMPLE_BYTES - 1) / SAMPLE_BYTES, num_samples = 0, num_missed = 0, num_byte_values = 1;
    while (num_byte_values < MAX_BYTE_VALUES && n * 2 * num_byte_values <= SHORT_LANE_BYTES) num_byte_values *= 2;
    uint8_t bits = (uint8_t)~(num_byte_values - 1);
    repeat_cursor cursor = {repeats, repeats + count};
    memset(table, 0, ENTRIES * sizeof *table);
    for (size_t i = 0; i + TAIL_BYTES <= n; i += 64 * window_step) {
        uint64_t candidates = ISA_FN(mask_without_bits)(lane + i, bits);
        if (candidates == ~(uint64_t)0) continue; /* rows of zeros: every search finds them */
        for (; candidates; candidates &= candidates - 1) {
            size_t pos = i + kvmnn_lowest_bit(candidates), previous;
            uint64_t bytes = kvmnn_load_le64(lane + pos);
            uint32_t *entry = table + (bytes * 0x9E3779B97F4A7C15ULL >> SHIFT);
            previous = *entry;
            *entry = (uint32_t)pos + 1;
            ++num_samples;
            if (previous && kvmnn_load_le64(lane + previous - 1) == bytes) num_missed += !is_in_repeat(&cursor, pos);
        }
    }
    return num_samples < MIN_SAMPLES ? 0 : (double)(num_missed * window_step) / (double)num_samples;
}

/* Whether the eight bytes at `pos` are there less than `max_distance` before as well. */
static int ISA_FN(occurs_nearby)(const uint8_t *lane, size_t pos, size_t max_distance) {
    uint64_t bytes = kvmnn_load_le64(lane + pos);
    uint8_t first[64], last[64];
    memset(first, lane[pos], sizeof first);
    memset(last, lane[pos + 7], sizeof last);
    for (size_t i = pos > max_distance ? pos - max_distance : 0; i < pos; i += 64) {
        uint64_t candidates = ISA_FN(equal64)(lane + i, first);
        if (candidates) candidates &= ISA_FN(equal64)(lane + i + 7, last);
        for (; candidates; candidates &= candidates - 1) {
            size_t earlier = i + kvmnn_lowest_bit(candidates);
            if (earlier < pos && kvmnn_load_le64(lane + earlier) == bytes) return 1;
        }
    }
    return 0;
}

/* Of some places; what comes again soon may have none of the bytes that count above. */
static double ISA_FN(estimate_missed_nearby)(const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count) {
    enum { NUM_PROBES = 24, MAX_DISTANCE = 1 << 10, TAIL_BYTES = 72, MIN_SAMPLES = 2 };
    size_t num_missed = 0;
    repeat_cursor cursor = {repeats, repeats + count};
    if (n < NUM_PROBES * TAIL_BYTES) return 0;
    for (size_t i = 1; i < NUM_PROBES; ++i) {
        size_t pos = n / NUM_PROBES * i;
        if (ISA_FN(occurs_nearby)(lane, pos, MAX_DISTANCE)) num_missed += !is_in_repeat(&cursor, pos);
    }
    return num_missed < MIN_SAMPLES ? 0 : (double)num_missed / NUM_PROBES;
}

/* Of some places those where five bytes and more are as in a row shortly before: of columns that never change. */
static double ISA_FN(estimate_missed_in_rows)(const uint8_t *lane, size_t n, const kvmnn_repeat *repeats,
                                              size_t count) {
    enum { NUM_PROBES = 12, MAX_ROW_DISTANCE = 512, TAIL_BYTES = 72, MIN_SAMPLES = 2 };
    size_t num_missed = 0;
    repeat_cursor cursor = {repeats, repeats + count};
    if (n < NUM_PROBES * (MAX_ROW_DISTANCE + TAIL_BYTES)) return 0;
    for (size_t i = 1; i < NUM_PROBES; ++i) {
        size_t pos = n / NUM_PROBES * i;
        for (size_t distance = PROBE_STEP; distance <= MAX_ROW_DISTANCE; distance += PROBE_STEP) {
            uint64_t equal_mask = ISA_FN(equal64)(lane + pos, lane + pos - distance);
            equal_mask &= equal_mask >> 1;
            equal_mask &= equal_mask >> 2 & equal_mask >> 3;
            if (equal_mask == 0) continue;
            num_missed += !is_in_repeat(&cursor, pos + kvmnn_lowest_bit(equal_mask));
            break;
        }
    }
    return num_missed < MIN_SAMPLES ? 0 : (double)num_missed / NUM_PROBES;
}

static double ISA_FN(estimate_missed)(const uint8_t *lane, size_t n, const kvmnn_repeat *repeats, size_t count,
                                      uint32_t *table) {
    double max_fraction = ISA_FN(estimate_missed_sampled)(lane, n, repeats, count, table), fraction;
    if ((fraction = ISA_FN(estimate_missed_nearby)(lane, n, repeats, count)) > max_fraction) max_fraction = fraction;
    if ((fraction = ISA_FN(estimate_missed_in_rows)(lane, n, repeats, count)) > max_fraction) max_fraction = fraction;
    return max_fraction;
}

static const repeats_kernels ISA_FN(table) = {ISA_FN(find), ISA_FN(estimate_missed)};
