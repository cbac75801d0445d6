/* The loops of lanes.h, included once per SIMD level with LEVEL(name) giving each function its own name.
 *
 * Plain C that compilers vectorise; there are no intrinsics, so every level and every architecture runs the same code.
 */

enum { LEVEL(TILE) = 4096 };

static void LEVEL(gather2)(const uint8_t *restrict src, size_t words, uint8_t *restrict dst) {
    for (size_t i = 0; i < words; ++i) dst[i] = src[2 * i];
}

static void LEVEL(gather4)(const uint8_t *restrict src, size_t words, uint8_t *restrict dst) {
    for (size_t i = 0; i < words; ++i) dst[i] = src[4 * i];
}

static void LEVEL(difference)(const uint8_t *restrict src, size_t n, uint8_t *restrict dst) {
    for (size_t i = 0; i < n; ++i) dst[i] = (uint8_t)(src[i] - src[(ptrdiff_t)i - 1]);
}

static void LEVEL(exclusive_or)(const uint8_t *restrict src, size_t n, uint8_t *restrict dst) {
    for (size_t i = 0; i < n; ++i) dst[i] = (uint8_t)(src[i] ^ src[(ptrdiff_t)i - 1]);
}

static void LEVEL(predict)(const uint8_t *src, size_t n, int mode, uint8_t *dst) {
    if (n == 0) return;
    if (mode == KVMNN_MODE_RAW) {
        memcpy(dst, src, n);
        return;
    }
    dst[0] = src[0];
    if (mode == KVMNN_MODE_DELTA) LEVEL(difference)(src + 1, n - 1, dst + 1);
    else LEVEL(exclusive_or)(src + 1, n - 1, dst + 1);
}

static void LEVEL(gather)(const uint8_t *src, size_t words, int stride, uint8_t *dst) {
    if (stride == 2) LEVEL(gather2)(src, words, dst);
    else LEVEL(gather4)(src, words, dst);
}

/* Where the tile behind the one of `step` words at `start` ends, in bytes. It is asked for while that one is worked on:
 * what processors fetch on their own ends with a page. Nothing is where all words may lie in a cache. */
static size_t LEVEL(next_end)(size_t start, size_t step, size_t words, int stride) {
    enum { CACHED = 2 << 20 };
    if (words * (size_t)stride < CACHED) return 0;
    return (words - start < 2 * step ? words : start + 2 * step) * (size_t)stride;
}

/* Works in tiles so that the raw lane stays in the first-level cache; tile[15] is the byte before the tile. */
static void LEVEL(predict_lane)(const uint8_t *src, size_t words, int stride, int lane, int mode, uint8_t *dst) {
    uint8_t buffer[16 + LEVEL(TILE)];
    uint8_t *tile = buffer + 16;
    tile[-1] = 0;
    for (size_t start = 0; start < words; start += LEVEL(TILE)) {
        size_t n = words - start < LEVEL(TILE) ? words - start : LEVEL(TILE);
        size_t end = LEVEL(next_end)(start, LEVEL(TILE), words, stride);
        for (size_t i = (start + n) * (size_t)stride; i < end; i += 64) KVMNN_FETCH(src + i);
        LEVEL(gather)(src + start * (size_t)stride + lane, n, stride, mode == KVMNN_MODE_RAW ? dst + start : tile);
        if (mode == KVMNN_MODE_RAW) continue;
        if (mode == KVMNN_MODE_DELTA) LEVEL(difference)(tile, n, dst + start);
        else LEVEL(exclusive_or)(tile, n, dst + start);
        tile[-1] = tile[n - 1];
    }
}

/* Sixty-four counters of one byte each, emptied before they can overflow. */
static size_t LEVEL(repeats)(const uint8_t *s, size_t n) {
    size_t total = 0, i = 1;
    while (i + 64 <= n) {
        uint8_t counts[64] = {0};
        size_t rows = (n - i) / 64 < 255 ? (n - i) / 64 : 255;
        for (size_t row = 0; row < rows; ++row, i += 64)
            for (int j = 0; j < 64; ++j) counts[j] = (uint8_t)(counts[j] + (s[i + j] == s[i + j - 1]));
        for (int j = 0; j < 64; ++j) total += counts[j];
    }
    for (; i < n; ++i) total += s[i] == s[i - 1];
    return total;
}

/* Tile by tile, so that words are read from memory once and bytes are counted while the first-level cache has them. */
static void LEVEL(split)(const uint8_t *src, size_t words, int stride, uint8_t *const *lanes, size_t *repeats) {
    size_t step = LEVEL(TILE) / (size_t)stride;
    for (int lane = 0; repeats && lane < stride; ++lane) repeats[lane] = 0;
    for (size_t start = 0; start < words; start += step) {
        size_t n = words - start < step ? words - start : step;
        size_t end = LEVEL(next_end)(start, step, words, stride);
        for (size_t i = (start + n) * (size_t)stride; i < end; i += 64) KVMNN_FETCH(src + i);
        for (int lane = 0; lane < stride; ++lane) {
            if (lanes[lane] == NULL) continue;
            uint8_t *to = lanes[lane] + start;
            LEVEL(gather)(src + start * (size_t)stride + lane, n, stride, to);
            if (repeats) repeats[lane] += start ? LEVEL(repeats)(to - 1, n + 1) : LEVEL(repeats)(to, n);
        }
    }
}

/* Both predictors over whole groups of 64 bytes, of which the first has two before it; adds what repeats to `repeats`. What
 * was predicted one byte before is made again from the lane: what was just stored would be waited for. */
static void LEVEL(predict_groups)(const uint8_t *restrict raw, size_t n, uint8_t *restrict delta,
                                  uint8_t *restrict exclusive_or, size_t repeats[3]) {
    for (size_t i = 0; i < n;) {
        uint8_t counts[3][64] = {{0}}; /* emptied before they can overflow */
        size_t end = n - i < LEVEL(TILE) ? n : i + LEVEL(TILE);
        for (; i < end; i += 64)
            for (size_t j = 0; j < 64; ++j) {
                const uint8_t *at = raw + i + j;
                uint8_t a = at[0], b = at[-1], c = at[-2], d = (uint8_t)(a - b), x = a ^ b;
                delta[i + j] = d;
                exclusive_or[i + j] = x;
                counts[0][j] = (uint8_t)(counts[0][j] + (x == 0));
                counts[1][j] = (uint8_t)(counts[1][j] + (d == (uint8_t)(b - c)));
                counts[2][j] = (uint8_t)(counts[2][j] + (x == (uint8_t)(b ^ c)));
            }
        for (int k = 0; k < 3; ++k)
            for (int j = 0; j < 64; ++j) repeats[k] += counts[k][j];
    }
}

static void LEVEL(predict_lane_part)(const uint8_t *src, size_t start, size_t end, int stride, int lane, uint8_t *raw,
                                     uint8_t *delta, uint8_t *exclusive_or, size_t repeats[3]) {
    LEVEL(gather)(src + start * (size_t)stride + lane, end - start, stride, raw + start);
    size_t i = start;
    while (i < end) {
        if (i >= 2 && end - i >= 64) {
            size_t whole = (end - i) / 64 * 64;
            LEVEL(predict_groups)(raw + i, whole, delta + i, exclusive_or + i, repeats);
            i += whole;
            continue;
        }
        uint8_t before = i ? raw[i - 1] : 0;
        delta[i] = (uint8_t)(raw[i] - before);
        exclusive_or[i] = raw[i] ^ before;
        if (i) {
            repeats[0] += raw[i] == before;
            repeats[1] += delta[i] == delta[i - 1];
            repeats[2] += exclusive_or[i] == exclusive_or[i - 1];
        }
        ++i;
    }
}

static size_t LEVEL(difference_groups)(const uint8_t *restrict src, size_t n, uint8_t *restrict dst) {
    size_t total = 0;
    for (size_t i = 0; i < n;) {
        uint8_t counts[64] = {0};
        size_t end = n - i < LEVEL(TILE) ? n : i + LEVEL(TILE);
        for (; i < end; i += 64)
            for (size_t j = 0; j < 64; ++j) {
                const uint8_t *at = src + i + j;
                uint8_t a = at[0], b = at[-1], c = at[-2], d = (uint8_t)(a - b);
                dst[i + j] = d;
                counts[j] = (uint8_t)(counts[j] + (d == (uint8_t)(b - c)));
            }
        for (int j = 0; j < 64; ++j) total += counts[j];
    }
    return total;
}

/* Equal to the one before is what a ^ b == b ^ c says, and so does a == c. */
static size_t LEVEL(exclusive_or_groups)(const uint8_t *restrict src, size_t n, uint8_t *restrict dst) {
    size_t total = 0;
    for (size_t i = 0; i < n;) {
        uint8_t counts[64] = {0};
        size_t end = n - i < LEVEL(TILE) ? n : i + LEVEL(TILE);
        for (; i < end; i += 64)
            for (size_t j = 0; j < 64; ++j) {
                const uint8_t *at = src + i + j;
                dst[i + j] = at[0] ^ at[-1];
                counts[j] = (uint8_t)(counts[j] + (at[0] == at[-2]));
            }
        for (int j = 0; j < 64; ++j) total += counts[j];
    }
    return total;
}

/* Whole groups have two bytes before them, and begin where no store crosses a cache line, which takes longer. */
static size_t LEVEL(predict_counted)(const uint8_t *src, size_t n, int mode, uint8_t *dst) {
    size_t head = 2 + (size_t)(-((uintptr_t)dst + 2) & 63), whole, total = 0;
    if (head > n) head = n;
    whole = (n - head) / 64 * 64;
    LEVEL(predict)(src, head, mode, dst);
    for (size_t i = 1; i < head; ++i) total += dst[i] == dst[i - 1];
    if (whole && mode == KVMNN_MODE_DELTA) total += LEVEL(difference_groups)(src + head, whole, dst + head);
    else if (whole) total += LEVEL(exclusive_or_groups)(src + head, whole, dst + head);
    for (size_t i = head + whole; i < n; ++i) {
        dst[i] = mode == KVMNN_MODE_DELTA ? (uint8_t)(src[i] - src[i - 1]) : src[i] ^ src[i - 1];
        total += dst[i] == dst[i - 1];
    }
    return total;
}

/* Running sums of eight bytes at a time: even and odd bytes are widened to 16 bits, where a multiplication by
 * 0x0001000100010001 is a prefix sum that cannot carry into its neighbour. */
static void LEVEL(undo_difference)(uint8_t *s, size_t n) {
    const uint64_t low = 0x00ff00ff00ff00ffULL, ones = 0x0001000100010001ULL;
    uint64_t before = 0; /* the byte before the group */
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t x = kvmnn_load_le64(s + i);
        uint64_t even = (x & low) * ones, odd = ((x >> 8) & low) * ones;
        uint64_t at_even = even + (odd << 16) + before * ones;
        uint64_t at_odd = even + odd + before * ones;
        before = (before + (even >> 48) + (odd >> 48)) & 0xff;
        kvmnn_store_le64(s + i, (at_even & low) | ((at_odd & low) << 8));
    }
    uint8_t last = (uint8_t)before;
    for (; i < n; ++i) s[i] = last = (uint8_t)(last + s[i]);
}

static void LEVEL(undo_exclusive_or)(uint8_t *s, size_t n) {
    uint64_t before = 0;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t x = kvmnn_load_le64(s + i);
        x ^= x << 8;
        x ^= x << 16;
        x ^= x << 32;
        kvmnn_store_le64(s + i, x ^ (before * 0x0101010101010101ULL));
        before ^= x >> 56;
    }
    uint8_t last = (uint8_t)before;
    for (; i < n; ++i) s[i] = last = (uint8_t)(last ^ s[i]);
}

static void LEVEL(unpredict)(uint8_t *stream, size_t n, int mode) {
    if (mode == KVMNN_MODE_DELTA) LEVEL(undo_difference)(stream, n);
    else if (mode == KVMNN_MODE_XOR) LEVEL(undo_exclusive_or)(stream, n);
}

static void LEVEL(join2)(const uint8_t *restrict a, const uint8_t *restrict b, size_t words, uint8_t *restrict dst) {
    for (size_t i = 0; i < words; ++i) {
        dst[2 * i] = a[i];
        dst[2 * i + 1] = b[i];
    }
}

static void LEVEL(join4)(const uint8_t *restrict a, const uint8_t *restrict b, const uint8_t *restrict c,
                         const uint8_t *restrict d, size_t words, uint8_t *restrict dst) {
    for (size_t i = 0; i < words; ++i) {
        dst[4 * i] = a[i];
        dst[4 * i + 1] = b[i];
        dst[4 * i + 2] = c[i];
        dst[4 * i + 3] = d[i];
    }
}

static void LEVEL(join_at)(const uint8_t *const *lanes, size_t start, size_t words, int stride, uint8_t *dst) {
    if (stride == 2) LEVEL(join2)(lanes[0] + start, lanes[1] + start, words, dst);
    else LEVEL(join4)(lanes[0] + start, lanes[1] + start, lanes[2] + start, lanes[3] + start, words, dst);
}

static void LEVEL(join)(const uint8_t *const *lanes, size_t words, int stride, uint8_t *dst) {
    LEVEL(join_at)(lanes, 0, words, stride, dst);
}

/* Tile by tile, which begin where a vector may be stored. */
static void LEVEL(join_past)(const uint8_t *const *lanes, size_t words, int stride, uint8_t *dst) {
    uint8_t tile[LEVEL(TILE)];
    size_t start = (16 - (uintptr_t)dst % 16) % 16 / (size_t)stride, step = LEVEL(TILE) / (size_t)stride;
    if (start > words) start = words;
    LEVEL(join_at)(lanes, 0, start, stride, dst);
    if ((uintptr_t)(dst + start * (size_t)stride) % 16 == 0)
        for (; words - start >= step; start += step) {
            LEVEL(join_at)(lanes, start, step, stride, tile);
            kvmnn_copy_past(dst + start * (size_t)stride, tile, LEVEL(TILE));
        }
    LEVEL(join_at)(lanes, start, words - start, stride, dst + start * (size_t)stride);
    kvmnn_end_copies_past();
}

static int LEVEL(join_equals)(const uint8_t *const *lanes, size_t words, int stride, const uint8_t *expected) {
    uint8_t tile[LEVEL(TILE)];
    size_t step = LEVEL(TILE) / (size_t)stride;
    for (size_t start = 0; start < words; start += step) {
        size_t n = words - start < step ? words - start : step;
        LEVEL(join_at)(lanes, start, n, stride, tile);
        if (memcmp(tile, expected + start * (size_t)stride, n * (size_t)stride) != 0) return 0;
    }
    return 1;
}

static int LEVEL(any_run4)(const uint8_t *s) {
    uint8_t any = 0;
    for (int i = 0; i < 128; ++i)
        any |= (uint8_t)(((s[i] ^ s[i + 1]) | (s[i] ^ s[i + 2]) | (s[i] ^ s[i + 3])) == 0);
    return any;
}

/* Eight positions at a time: a byte of x is 0 where the byte there equals its three followers. */
static size_t LEVEL(find_run4_near)(const uint8_t *s, size_t i, size_t end) {
    const uint64_t ones = 0x0101010101010101ULL;
    for (; i + 8 <= end; i += 8) {
        uint64_t at = kvmnn_load_le64(s + i);
        uint64_t x = (at ^ kvmnn_load_le64(s + i + 1)) | (at ^ kvmnn_load_le64(s + i + 2)) |
                     (at ^ kvmnn_load_le64(s + i + 3));
        x = (x - ones) & ~x & (ones << 7);
        if (x != 0) return i + kvmnn_lowest_bit(x) / 8;
    }
    for (; i < end; ++i)
        if (s[i] == s[i + 1] && s[i] == s[i + 2] && s[i] == s[i + 3]) return i;
    return end;
}

/* Where runs are frequent the next one is near; where they are not, whole blocks are passed over. */
static size_t LEVEL(find_run4)(const uint8_t *s, size_t i, size_t n) {
    if (n < 4) return n;
    size_t end = n - 3; /* no run starts here or later */
    if (i >= end) return n;
    size_t near = end - i < 32 ? end : i + 32;
    size_t p = LEVEL(find_run4_near)(s, i, near);
    if (p < near) return p;
    for (i = near; i + 128 <= end; i += 128)
        if (LEVEL(any_run4)(s + i)) return LEVEL(find_run4_near)(s, i, i + 128);
    p = LEVEL(find_run4_near)(s, i, end);
    return p < end ? p : n;
}

static size_t LEVEL(run_length)(const uint8_t *s, size_t i, size_t n) {
    const uint64_t same = s[i] * 0x0101010101010101ULL;
    size_t end = i + 1;
    for (; end + 8 <= n; end += 8) {
        uint64_t x = kvmnn_load_le64(s + end) ^ same;
        if (x != 0) break;
    }
    while (end < n && s[end] == s[i]) ++end;
    return end - i;
}

static void LEVEL(histogram)(const uint8_t *s, size_t n, uint64_t counts[256]) {
    /* Four tables, because a store to a counter that is loaded again at once would stall. */
    uint32_t part[4][256];
    while (n > 0) {
        size_t step = n < ((size_t)1 << 30) ? n : (size_t)1 << 30;
        size_t i = 0;
        memset(part, 0, sizeof part);
        for (; i + 4 <= step; i += 4)
            for (int j = 0; j < 4; ++j) part[j][s[i + j]]++;
        for (; i < step; ++i) part[0][s[i]]++;
        for (int b = 0; b < 256; ++b)
            counts[b] += (uint64_t)part[0][b] + part[1][b] + part[2][b] + part[3][b];
        s += step;
        n -= step;
    }
}

static const kvmnn_lanes LEVEL(table) = {
    KVMNN_LEVEL_NAME,     LEVEL(predict_lane), LEVEL(split), LEVEL(predict_lane_part), kvmnn_past, LEVEL(predict),
    LEVEL(predict_counted), LEVEL(unpredict),  LEVEL(join),  LEVEL(join_past),         LEVEL(join_equals),
    LEVEL(find_run4),     LEVEL(repeats),      LEVEL(run_length), LEVEL(histogram),
};
