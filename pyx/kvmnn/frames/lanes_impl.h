/* The kernels of lanes.h, included once per SIMD level with ISA_FN(name) giving each function its own name.
 *
 * Plain C that compilers vectorise; there are no intrinsics, so every level and every architecture runs the same code.
 */

enum { ISA_FN(TILE_BYTES) = 4096 };

static void ISA_FN(gather2)(const uint8_t *restrict src, size_t num_elements, uint8_t *restrict dst) {
    for (size_t i = 0; i < num_elements; ++i) dst[i] = src[2 * i];
}

static void ISA_FN(gather4)(const uint8_t *restrict src, size_t num_elements, uint8_t *restrict dst) {
    for (size_t i = 0; i < num_elements; ++i) dst[i] = src[4 * i];
}

static void ISA_FN(delta_encode)(const uint8_t *restrict src, size_t n, uint8_t *restrict dst) {
    for (size_t i = 0; i < n; ++i) dst[i] = (uint8_t)(src[i] - src[(ptrdiff_t)i - 1]);
}

static void ISA_FN(xor_encode)(const uint8_t *restrict src, size_t n, uint8_t *restrict dst) {
    for (size_t i = 0; i < n; ++i) dst[i] = (uint8_t)(src[i] ^ src[(ptrdiff_t)i - 1]);
}

static void ISA_FN(predict)(const uint8_t *src, size_t n, int mode, uint8_t *dst) {
    if (n == 0) return;
    if (mode == KVMNN_MODE_RAW) {
        memcpy(dst, src, n);
        return;
    }
    dst[0] = src[0];
    if (mode == KVMNN_MODE_DELTA) ISA_FN(delta_encode)(src + 1, n - 1, dst + 1);
    else ISA_FN(xor_encode)(src + 1, n - 1, dst + 1);
}

static void ISA_FN(gather)(const uint8_t *src, size_t num_elements, int itemsize, uint8_t *dst) {
    if (itemsize == 2) ISA_FN(gather2)(src, num_elements, dst);
    else ISA_FN(gather4)(src, num_elements, dst);
}

/* Where the tile after the one of `step` words at `start` ends, in bytes. It is asked for while that one is worked on:
 * what processors fetch on their own ends with a page. Nothing is where all words may lie in a cache. */
static size_t ISA_FN(prefetch_end)(size_t start, size_t step, size_t num_elements, int itemsize) {
    enum { CACHE_BYTES = 2 << 20 };
    if (num_elements * (size_t)itemsize < CACHE_BYTES) return 0;
    return (num_elements - start < 2 * step ? num_elements : start + 2 * step) * (size_t)itemsize;
}

/* Works in tiles so that the raw lane stays in the first-level cache; tile[15] is the byte before the tile. */
static void ISA_FN(predict_lane)(const uint8_t *src, size_t num_elements, int itemsize, int lane, int mode,
                                 uint8_t *dst) {
    uint8_t buffer[16 + ISA_FN(TILE_BYTES)];
    uint8_t *tile = buffer + 16;
    tile[-1] = 0;
    for (size_t start = 0; start < num_elements; start += ISA_FN(TILE_BYTES)) {
        size_t n = num_elements - start < ISA_FN(TILE_BYTES) ? num_elements - start : ISA_FN(TILE_BYTES);
        size_t end = ISA_FN(prefetch_end)(start, ISA_FN(TILE_BYTES), num_elements, itemsize);
        for (size_t i = (start + n) * (size_t)itemsize; i < end; i += 64) KVMNN_PREFETCH(src + i);
        ISA_FN(gather)(src + start * (size_t)itemsize + lane, n, itemsize, mode == KVMNN_MODE_RAW ? dst + start : tile);
        if (mode == KVMNN_MODE_RAW) continue;
        if (mode == KVMNN_MODE_DELTA) ISA_FN(delta_encode)(tile, n, dst + start);
        else ISA_FN(xor_encode)(tile, n, dst + start);
        tile[-1] = tile[n - 1];
    }
}

/* Sixty-four counters of one byte each, emptied before they can overflow. */
static size_t ISA_FN(repeats)(const uint8_t *s, size_t n) {
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
static void ISA_FN(split)(const uint8_t *src, size_t num_elements, int itemsize, uint8_t *const *lanes,
                          size_t *repeats) {
    size_t step = ISA_FN(TILE_BYTES) / (size_t)itemsize;
    for (int lane = 0; repeats && lane < itemsize; ++lane) repeats[lane] = 0;
    for (size_t start = 0; start < num_elements; start += step) {
        size_t n = num_elements - start < step ? num_elements - start : step;
        size_t end = ISA_FN(prefetch_end)(start, step, num_elements, itemsize);
        for (size_t i = (start + n) * (size_t)itemsize; i < end; i += 64) KVMNN_PREFETCH(src + i);
        for (int lane = 0; lane < itemsize; ++lane) {
            if (lanes[lane] == NULL) continue;
            uint8_t *dst = lanes[lane] + start;
            ISA_FN(gather)(src + start * (size_t)itemsize + lane, n, itemsize, dst);
            if (repeats) repeats[lane] += start ? ISA_FN(repeats)(dst - 1, n + 1) : ISA_FN(repeats)(dst, n);
        }
    }
}

/* Both predictors over whole groups of 64 bytes, of which the first has two before it; adds what repeats to `repeats`. What
 * was predicted one byte before is made again from the lane: what was just stored would be waited for. */
static void ISA_FN(predict_groups)(const uint8_t *restrict raw, size_t n, uint8_t *restrict delta,
                                   uint8_t *restrict exclusive_or, size_t repeats[3]) {
    for (size_t i = 0; i < n;) {
        uint8_t counts[3][64] = {{0}}; /* emptied before they can overflow */
        size_t end = n - i < ISA_FN(TILE_BYTES) ? n : i + ISA_FN(TILE_BYTES);
        for (; i < end; i += 64)
            for (size_t j = 0; j < 64; ++j) {
                const uint8_t *current = raw + i + j;
                uint8_t a = current[0], b = current[-1], c = current[-2], d = (uint8_t)(a - b), x = a ^ b;
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

static void ISA_FN(predict_lane_part)(const uint8_t *src, size_t start, size_t end, int itemsize, int lane,
                                      uint8_t *raw, uint8_t *delta, uint8_t *exclusive_or, size_t repeats[3]) {
    ISA_FN(gather)(src + start * (size_t)itemsize + lane, end - start, itemsize, raw + start);
    size_t i = start;
    while (i < end) {
        if (i >= 2 && end - i >= 64) {
            size_t num_grouped = (end - i) / 64 * 64;
            ISA_FN(predict_groups)(raw + i, num_grouped, delta + i, exclusive_or + i, repeats);
            i += num_grouped;
            continue;
        }
        uint8_t previous = i ? raw[i - 1] : 0;
        delta[i] = (uint8_t)(raw[i] - previous);
        exclusive_or[i] = raw[i] ^ previous;
        if (i) {
            repeats[0] += raw[i] == previous;
            repeats[1] += delta[i] == delta[i - 1];
            repeats[2] += exclusive_or[i] == exclusive_or[i - 1];
        }
        ++i;
    }
}

static size_t ISA_FN(delta_encode_groups)(const uint8_t *restrict src, size_t n, uint8_t *restrict dst) {
    size_t total = 0;
    for (size_t i = 0; i < n;) {
        uint8_t counts[64] = {0};
        size_t end = n - i < ISA_FN(TILE_BYTES) ? n : i + ISA_FN(TILE_BYTES);
        for (; i < end; i += 64)
            for (size_t j = 0; j < 64; ++j) {
                const uint8_t *current = src + i + j;
                uint8_t a = current[0], b = current[-1], c = current[-2], d = (uint8_t)(a - b);
                dst[i + j] = d;
                counts[j] = (uint8_t)(counts[j] + (d == (uint8_t)(b - c)));
            }
        for (int j = 0; j < 64; ++j) total += counts[j];
    }
    return total;
}

/* Equal to the one before is what a ^ b == b ^ c says, and so does a == c. */
static size_t ISA_FN(xor_encode_groups)(const uint8_t *restrict src, size_t n, uint8_t *restrict dst) {
    size_t total = 0;
    for (size_t i = 0; i < n;) {
        uint8_t counts[64] = {0};
        size_t end = n - i < ISA_FN(TILE_BYTES) ? n : i + ISA_FN(TILE_BYTES);
        for (; i < end; i += 64)
            for (size_t j = 0; j < 64; ++j) {
                const uint8_t *current = src + i + j;
                dst[i + j] = current[0] ^ current[-1];
                counts[j] = (uint8_t)(counts[j] + (current[0] == current[-2]));
            }
        for (int j = 0; j < 64; ++j) total += counts[j];
    }
    return total;
}

/* Whole groups have two bytes before them, and begin where no store crosses a cache line, which takes longer. */
static size_t ISA_FN(predict_counting_repeats)(const uint8_t *src, size_t n, int mode, uint8_t *dst) {
    size_t num_before = 2 + (size_t)(-((uintptr_t)dst + 2) & 63), num_grouped, total = 0;
    if (num_before > n) num_before = n;
    num_grouped = (n - num_before) / 64 * 64;
    ISA_FN(predict)(src, num_before, mode, dst);
    for (size_t i = 1; i < num_before; ++i) total += dst[i] == dst[i - 1];
    if (num_grouped && mode == KVMNN_MODE_DELTA)
        total += ISA_FN(delta_encode_groups)(src + num_before, num_grouped, dst + num_before);
    else if (num_grouped) total += ISA_FN(xor_encode_groups)(src + num_before, num_grouped, dst + num_before);
    for (size_t i = num_before + num_grouped; i < n; ++i) {
        dst[i] = mode == KVMNN_MODE_DELTA ? (uint8_t)(src[i] - src[i - 1]) : src[i] ^ src[i - 1];
        total += dst[i] == dst[i - 1];
    }
    return total;
}

/* Running sums of eight bytes at a time: even and odd bytes are widened to 16 bits, where a multiplication by
 * 0x0001000100010001 is a prefix sum that cannot carry into its neighbour. */
static void ISA_FN(delta_decode)(uint8_t *s, size_t n) {
    const uint64_t low = 0x00ff00ff00ff00ffULL, ones = 0x0001000100010001ULL;
    uint64_t previous = 0; /* the byte before the group */
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t x = kvmnn_load_le64(s + i);
        uint64_t even = (x & low) * ones, odd = ((x >> 8) & low) * ones;
        uint64_t at_even = even + (odd << 16) + previous * ones;
        uint64_t at_odd = even + odd + previous * ones;
        previous = (previous + (even >> 48) + (odd >> 48)) & 0xff;
        kvmnn_store_le64(s + i, (at_even & low) | ((at_odd & low) << 8));
    }
    uint8_t previous_byte = (uint8_t)previous;
    for (; i < n; ++i) s[i] = previous_byte = (uint8_t)(previous_byte + s[i]);
}

static void ISA_FN(xor_decode)(uint8_t *s, size_t n) {
    uint64_t previous = 0;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t x = kvmnn_load_le64(s + i);
        x ^= x << 8;
        x ^= x << 16;
        x ^= x << 32;
        kvmnn_store_le64(s + i, x ^ (previous * 0x0101010101010101ULL));
        previous ^= x >> 56;
    }
    uint8_t previous_byte = (uint8_t)previous;
    for (; i < n; ++i) s[i] = previous_byte = (uint8_t)(previous_byte ^ s[i]);
}

static void ISA_FN(unpredict)(uint8_t *stream, size_t n, int mode) {
    if (mode == KVMNN_MODE_DELTA) ISA_FN(delta_decode)(stream, n);
    else if (mode == KVMNN_MODE_XOR) ISA_FN(xor_decode)(stream, n);
}

static void ISA_FN(join2)(const uint8_t *restrict a, const uint8_t *restrict b, size_t num_elements,
                          uint8_t *restrict dst) {
    for (size_t i = 0; i < num_elements; ++i) {
        dst[2 * i] = a[i];
        dst[2 * i + 1] = b[i];
    }
}

static void ISA_FN(join4)(const uint8_t *restrict a, const uint8_t *restrict b, const uint8_t *restrict c,
                          const uint8_t *restrict d, size_t num_elements, uint8_t *restrict dst) {
    for (size_t i = 0; i < num_elements; ++i) {
        dst[4 * i] = a[i];
        dst[4 * i + 1] = b[i];
        dst[4 * i + 2] = c[i];
        dst[4 * i + 3] = d[i];
    }
}

static void ISA_FN(join_at)(const uint8_t *const *lanes, size_t start, size_t num_elements, int itemsize,
                            uint8_t *dst) {
    if (itemsize == 2) ISA_FN(join2)(lanes[0] + start, lanes[1] + start, num_elements, dst);
    else ISA_FN(join4)(lanes[0] + start, lanes[1] + start, lanes[2] + start, lanes[3] + start, num_elements, dst);
}

static void ISA_FN(join)(const uint8_t *const *lanes, size_t num_elements, int itemsize, uint8_t *dst) {
    ISA_FN(join_at)(lanes, 0, num_elements, itemsize, dst);
}

/* Tile by tile, which begin where a vector may be stored. */
static void ISA_FN(join_nontemporal)(const uint8_t *const *lanes, size_t num_elements, int itemsize, uint8_t *dst) {
    uint8_t tile[ISA_FN(TILE_BYTES)];
    size_t start = (16 - (uintptr_t)dst % 16) % 16 / (size_t)itemsize, step = ISA_FN(TILE_BYTES) / (size_t)itemsize;
    if (start > num_elements) start = num_elements;
    ISA_FN(join_at)(lanes, 0, start, itemsize, dst);
    if ((uintptr_t)(dst + start * (size_t)itemsize) % 16 == 0)
        for (; num_elements - start >= step; start += step) {
            ISA_FN(join_at)(lanes, start, step, itemsize, tile);
            kvmnn_nt_copy_aligned(dst + start * (size_t)itemsize, tile, ISA_FN(TILE_BYTES));
        }
    ISA_FN(join_at)(lanes, start, num_elements - start, itemsize, dst + start * (size_t)itemsize);
    kvmnn_nt_fence();
}

static int ISA_FN(join_equals)(const uint8_t *const *lanes, size_t num_elements, int itemsize,
                               const uint8_t *expected) {
    uint8_t tile[ISA_FN(TILE_BYTES)];
    size_t step = ISA_FN(TILE_BYTES) / (size_t)itemsize;
    for (size_t start = 0; start < num_elements; start += step) {
        size_t n = num_elements - start < step ? num_elements - start : step;
        ISA_FN(join_at)(lanes, start, n, itemsize, tile);
        if (memcmp(tile, expected + start * (size_t)itemsize, n * (size_t)itemsize) != 0) return 0;
    }
    return 1;
}

static int ISA_FN(has_run4)(const uint8_t *s) {
    uint8_t found_mask = 0;
    for (int i = 0; i < 128; ++i)
        found_mask |= (uint8_t)(((s[i] ^ s[i + 1]) | (s[i] ^ s[i + 2]) | (s[i] ^ s[i + 3])) == 0);
    return found_mask;
}

/* Eight positions at a time: a byte of x is 0 where the byte there equals its three followers. */
static size_t ISA_FN(find_run4_linear)(const uint8_t *s, size_t i, size_t end) {
    const uint64_t ones = 0x0101010101010101ULL;
    for (; i + 8 <= end; i += 8) {
        uint64_t bytes = kvmnn_load_le64(s + i);
        uint64_t x = (bytes ^ kvmnn_load_le64(s + i + 1)) | (bytes ^ kvmnn_load_le64(s + i + 2)) |
                     (bytes ^ kvmnn_load_le64(s + i + 3));
        x = (x - ones) & ~x & (ones << 7);
        if (x != 0) return i + kvmnn_lowest_bit(x) / 8;
    }
    for (; i < end; ++i)
        if (s[i] == s[i + 1] && s[i] == s[i + 2] && s[i] == s[i + 3]) return i;
    return end;
}

/* Where runs are frequent the next one is near; where they are not, whole blocks are passed over. */
static size_t ISA_FN(find_run4)(const uint8_t *s, size_t i, size_t n) {
    if (n < 4) return n;
    size_t end = n - 3; /* no run starts here or later */
    if (i >= end) return n;
    size_t near_end = end - i < 32 ? end : i + 32;
    size_t p = ISA_FN(find_run4_linear)(s, i, near_end);
    if (p < near_end) return p;
    for (i = near_end; i + 128 <= end; i += 128)
        if (ISA_FN(has_run4)(s + i)) return ISA_FN(find_run4_linear)(s, i, i + 128);
    p = ISA_FN(find_run4_linear)(s, i, end);
    return p < end ? p : n;
}

static size_t ISA_FN(run_length)(const uint8_t *s, size_t i, size_t n) {
    const uint64_t pattern = s[i] * 0x0101010101010101ULL;
    size_t end = i + 1;
    for (; end + 8 <= n; end += 8) {
        uint64_t x = kvmnn_load_le64(s + end) ^ pattern;
        if (x != 0) break;
    }
    while (end < n && s[end] == s[i]) ++end;
    return end - i;
}

static void ISA_FN(histogram)(const uint8_t *s, size_t n, uint64_t counts[256]) {
    /* Four tables, because a store to a counter that is loaded again at once would stall. */
    uint32_t tables[4][256];
    while (n > 0) {
        size_t step = n < ((size_t)1 << 30) ? n : (size_t)1 << 30;
        size_t i = 0;
        memset(tables, 0, sizeof tables);
        for (; i + 4 <= step; i += 4)
            for (int j = 0; j < 4; ++j) tables[j][s[i + j]]++;
        for (; i < step; ++i) tables[0][s[i]]++;
        for (int b = 0; b < 256; ++b)
            counts[b] += (uint64_t)tables[0][b] + tables[1][b] + tables[2][b] + tables[3][b];
        s += step;
        n -= step;
    }
}

static const kvmnn_lane_kernels ISA_FN(table) = {
    ISA_NAME,
    ISA_FN(predict_lane),
    ISA_FN(split),
    ISA_FN(predict_lane_part),
    kvmnn_nt_copy,
    ISA_FN(predict),
    ISA_FN(predict_counting_repeats),
    ISA_FN(unpredict),
    ISA_FN(join),
    ISA_FN(join_nontemporal),
    ISA_FN(join_equals),
    ISA_FN(find_run4),
    ISA_FN(repeats),
    ISA_FN(run_length),
    ISA_FN(histogram),
};
