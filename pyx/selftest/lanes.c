/* Self-test of lanes.c without Python: every function of every level's table against a byte loop, over sizes, strides,
 * lanes, modes and alignments, with guard bytes around what is written. Prints one line; exits 1 at a mismatch. */
#include "kvmnn/frames/lanes.h"
#include "kvmnn/simd.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ELEMENTS = 9000, GUARD = 64 };

static uint8_t pool[4 * MAX_ELEMENTS + 3 * GUARD];
static uint8_t output[4 * MAX_ELEMENTS + 3 * GUARD];
static uint8_t expected_bytes[4 * MAX_ELEMENTS];
static unsigned long num_checks;

static uint64_t random_state = 0x9e3779b97f4a7c15u;

static uint32_t random32(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

/* Stretches of noise, of small alphabets and of runs, so that differences, carries and run ends all occur. */
static void fill_pool(void) {
    size_t i = 0;
    while (i < sizeof pool) {
        size_t n = 1 + random32() % 300;
        uint32_t kind = random32() % 4;
        uint8_t value = (uint8_t)random32();
        for (; n > 0 && i < sizeof pool; --n, ++i) {
            if (kind == 0) pool[i] = (uint8_t)random32();
            else if (kind == 1) pool[i] = (uint8_t)(value + random32() % 3);
            else if (kind == 2) pool[i] = random32() % 40 == 0 ? (uint8_t)random32() : value;
            else pool[i] = value;
        }
    }
}

static void fail(const kvmnn_lane_kernels *table, const char *what, size_t n, size_t offset, int a, int b) {
    printf("selftest: %s: %s differs at size %zu, offset %zu (%d, %d)\n", table->name, what, n, offset, a, b);
    exit(1);
}

static void naive_predict(const uint8_t *src, size_t n, size_t stride, int mode, uint8_t *dst) {
    uint8_t previous = 0;
    for (size_t i = 0; i < n; ++i) {
        uint8_t x = src[i * stride];
        dst[i] = mode == KVMNN_MODE_RAW     ? x
                 : mode == KVMNN_MODE_DELTA ? (uint8_t)(x - previous)
                                            : (uint8_t)(x ^ previous);
        previous = x;
    }
}

static uint8_t *fill_guard(size_t offset) {
    memset(output, 0xc3, sizeof output);
    return output + GUARD + offset;
}

/* Whether exactly n bytes at `target` are those of `expected_bytes` and every other byte is as fill_guard() left it. */
static int is_exact(const uint8_t *target, size_t n) {
    size_t num_before = (size_t)(target - output);
    ++num_checks;
    if (memcmp(target, expected_bytes, n) != 0) return 0;
    for (size_t i = 0; i < num_before; ++i)
        if (output[i] != 0xc3) return 0;
    for (size_t i = num_before + n; i < num_before + n + GUARD; ++i)
        if (output[i] != 0xc3) return 0;
    return 1;
}

static void check_predictors(const kvmnn_lane_kernels *t, const uint8_t *src, size_t n, size_t offset) {
    for (int mode = 0; mode < 3; ++mode) {
        naive_predict(src, n, 1, mode, expected_bytes);
        uint8_t *dst = fill_guard(offset);
        t->predict(src, n, mode, dst);
        if (!is_exact(dst, n)) fail(t, "predict", n, offset, mode, 0);

        if (mode == KVMNN_MODE_RAW) {
            dst = fill_guard(offset);
            t->copy_nontemporal(dst, src, n);
            if (!is_exact(dst, n)) fail(t, "copy_past", n, offset, 0, 0);
        } else {
            size_t repeats = 0;
            dst = fill_guard(offset);
            for (size_t i = 1; i < n; ++i) repeats += expected_bytes[i] == expected_bytes[i - 1];
            if (t->predict_counting_repeats(src, n, mode, dst) != repeats || !is_exact(dst, n))
                fail(t, "predict_counting_repeats", n, offset, mode, 0);
        }

        memcpy(expected_bytes, src, n); /* undoing what predict made must give the source */
        dst = fill_guard(offset);
        naive_predict(src, n, 1, mode, dst);
        t->unpredict(dst, n, mode);
        if (!is_exact(dst, n)) fail(t, "unpredict", n, offset, mode, 0);
    }
}

static void check_lanes(const kvmnn_lane_kernels *t, const uint8_t *src, size_t words, size_t offset) {
    static uint8_t parts[4][MAX_ELEMENTS + 8];
    for (int stride = 2; stride <= 4; stride += 2) {
        const uint8_t *lanes[4] = {parts[0] + offset % 8, parts[1] + 1, parts[2], parts[3] + 3};
        for (int lane = 0; lane < stride; ++lane) {
            for (int mode = 0; mode < 3; ++mode) {
                naive_predict(src + lane, words, (size_t)stride, mode, expected_bytes);
                uint8_t *dst = fill_guard(offset);
                t->predict_lane(src, words, stride, lane, mode, dst);
                if (!is_exact(dst, words)) fail(t, "predict_lane", words, offset, stride * 10 + lane, mode);
            }
            uint8_t *lane_bytes = parts[lane] + (lanes[lane] - parts[lane]);
            for (size_t i = 0; i < words; ++i) lane_bytes[i] = src[i * (size_t)stride + (size_t)lane];
        }
        size_t bytes = words * (size_t)stride;
        memcpy(expected_bytes, src, bytes);
        uint8_t *dst = fill_guard(offset);
        t->join(lanes, words, stride, dst);
        if (!is_exact(dst, bytes)) fail(t, "join", words, offset, stride, 0);
        dst = fill_guard(offset);
        t->join_nontemporal(lanes, words, stride, dst);
        if (!is_exact(dst, bytes)) fail(t, "join_nontemporal", words, offset, stride, 0);

        ++num_checks;
        if (t->join_equals(lanes, words, stride, src) != 1) fail(t, "join_equals", words, offset, stride, 1);
        if (bytes > 0) {
            size_t offset_to_flip = random32() % bytes;
            expected_bytes[offset_to_flip] ^= (uint8_t)(1u << random32() % 8);
            if (t->join_equals(lanes, words, stride, expected_bytes) != 0)
                fail(t, "join_equals", words, offset, stride, 0);
        }
    }
}

/* Lanes as they are, all and some of them, counted or not. */
static void check_split(const kvmnn_lane_kernels *t, const uint8_t *src, size_t words, size_t offset) {
    static uint8_t outputs[4][MAX_ELEMENTS + 2 * GUARD];
    for (int stride = 2; stride <= 4; stride += 2) {
        for (int lane_mask = 1; lane_mask < 1 << stride; ++lane_mask) {
            int with_counts = random32() % 4 != 0;
            size_t repeats[4] = {7, 7, 7, 7};
            uint8_t *lanes[4] = {NULL};
            for (int lane = 0; lane < stride; ++lane) {
                memset(outputs[lane], 0xc3, words + 2 * GUARD);
                if (lane_mask >> lane & 1) lanes[lane] = outputs[lane] + offset;
            }
            t->split(src, words, stride, lanes, with_counts ? repeats : NULL);
            for (int lane = 0; lane < stride; ++lane) {
                size_t count = 0, num_written = lanes[lane] ? words : 0;
                naive_predict(src + lane, words, (size_t)stride, KVMNN_MODE_RAW, expected_bytes);
                for (size_t i = 1; i < num_written; ++i) count += expected_bytes[i] == expected_bytes[i - 1];
                ++num_checks;
                if (memcmp(outputs[lane] + offset, expected_bytes, num_written) != 0 ||
                    (with_counts && repeats[lane] != count))
                    fail(t, "split", words, offset, stride * 10 + lane, lane_mask);
                for (size_t i = 0; i < words + 2 * GUARD; ++i)
                    if ((i < offset || i >= offset + num_written) && outputs[lane][i] != 0xc3)
                        fail(t, "split, outside", words, offset, stride * 10 + lane, lane_mask);
            }
        }
    }
}

/* All three predictors of a lane, part by part, each part writing nothing but its own words. */
static void check_parts(const kvmnn_lane_kernels *t, const uint8_t *src, size_t words, size_t offset) {
    static uint8_t expected[3][MAX_ELEMENTS], outputs[3][MAX_ELEMENTS + 8];
    for (int stride = 2; stride <= 4; stride += 2) {
        for (int lane = 0; lane < stride; ++lane) {
            for (int mode = 0; mode < 3; ++mode) naive_predict(src + lane, words, (size_t)stride, mode, expected[mode]);
            size_t repeats[3] = {1, 2, 3}; /* which are added to */
            memset(outputs, 0xc3, sizeof outputs);
            for (size_t start = 0, end; start < words; start = end) {
                uint32_t max_part = random32() % 4 ? 70 : 5000;
                end = start + 1 + random32() % max_part;
                if (end > words) end = words;
                t->predict_lane_part(src, start, end, stride, lane, outputs[0], outputs[1], outputs[2], repeats);
                for (int mode = 0; mode < 3; ++mode) {
                    int outside = 0;
                    for (size_t i = end; i < end + 8; ++i) outside |= outputs[mode][i] != 0xc3;
                    ++num_checks;
                    if (outside || memcmp(outputs[mode], expected[mode], end) != 0)
                        fail(t, "predict_lane_part", words, offset, stride * 10 + lane, mode);
                }
            }
            for (int mode = 0; mode < 3; ++mode) {
                size_t count = (size_t)mode + 1;
                for (size_t i = 1; i < words; ++i) count += expected[mode][i] == expected[mode][i - 1];
                ++num_checks;
                if (repeats[mode] != count)
                    fail(t, "predict_lane_part repeats", words, offset, stride * 10 + lane, mode);
            }
        }
    }
}

static void check_runs(const kvmnn_lane_kernels *t, const uint8_t *s, size_t n, size_t offset) {
    uint64_t counts[256], expected[256];
    for (size_t i = 0; i <= n; i += n > 600 ? 1 + random32() % 97 : 1) {
        size_t p = i;
        while (p + 4 <= n && !(s[p] == s[p + 1] && s[p] == s[p + 2] && s[p] == s[p + 3])) ++p;
        if (p + 4 > n) p = n;
        ++num_checks;
        if (t->find_run4(s, i, n) != p) fail(t, "find_run4", n, offset, (int)i, (int)p);
        if (i == n) break;
        for (p = i; p < n && s[p] == s[i];) ++p;
        ++num_checks;
        if (t->run_length(s, i, n) != p - i) fail(t, "run_length", n, offset, (int)i, (int)(p - i));
    }
    for (int b = 0; b < 256; ++b) counts[b] = expected[b] = (uint64_t)b << 33;
    for (size_t i = 0; i < n; ++i) expected[s[i]]++;
    t->histogram(s, n, counts);
    ++num_checks;
    if (memcmp(counts, expected, sizeof counts) != 0) fail(t, "histogram", n, offset, 0, 0);
}

static void check_repeats(const kvmnn_lane_kernels *t, const uint8_t *s, size_t n, size_t offset) {
    size_t expected = 0;
    for (size_t i = 1; i < n; ++i) expected += s[i] == s[i - 1];
    ++num_checks;
    if (t->repeats(s, n) != expected) fail(t, "repeats", n, offset, (int)expected, 0);
}

/* Long enough for its byte counters to overflow if they were not emptied. */
static void check_long_repeats(const kvmnn_lane_kernels *t) {
    memset(output, 7, sizeof output);
    for (size_t n = 16 * 1024 - 80; n + 64 < sizeof output; n += n < 16600 ? 1 : 977) {
        check_repeats(t, output + n % 64, n, n % 64);
        check_repeats(t, pool + n % 64, n, n % 64);
    }
}

static void check_level(const kvmnn_lane_kernels *t) {
    static const size_t large[] = {511,  1000, 1023, 1024, 1025, 2048, 4095, 4096,
                                   4097, 4111, 4112, 8191, 8192, 8193, 8999};
    for (size_t i = 0; i < 301 + sizeof large / sizeof *large; ++i) {
        size_t n = i <= 300 ? i : large[i - 301];
        for (size_t offset = 0; offset < 33; offset += n > 300 ? 11 : n > 64 ? 5 : 1) {
            const uint8_t *src = pool + (i * 131 + offset) % (sizeof pool - 4 * n);
            check_predictors(t, src, n, offset);
            check_lanes(t, src, n, offset);
            check_split(t, src, n, offset);
            check_parts(t, src, n, offset);
            /* A heap block of the exact size lets valgrind and the address sanitizer see reads beyond it. */
            uint8_t *own = malloc(n ? n : 1);
            if (own == NULL) exit(2);
            memcpy(own, src, n);
            check_runs(t, own, n, offset);
            check_repeats(t, own, n, offset);
            free(own);
        }
    }
}

int main(void) {
    char levels[64] = "";
    fill_pool();
    for (int level = 0; level < KVMNN_NUM_ISAS; ++level) {
        if (!kvmnn_simd_is_supported(level)) continue;
        check_level(kvmnn_lane_kernels_at(level));
        check_long_repeats(kvmnn_lane_kernels_at(level));
        strcat(strcat(levels, " "), kvmnn_lane_kernels_at(level)->name);
    }
    printf("selftest: ok, %lu checks, levels:%s\n", num_checks, levels);
    return 0;
}
