#include "quantise.h"

#include <math.h>
#include <string.h>

static size_t up(size_t a, size_t b) { return (a + b - 1) / b; }

static float get(const uint8_t *p, size_t i) {
    float x;
    memcpy(&x, p + i * sizeof x, sizeof x);
    return x;
}

static void set(uint8_t *p, size_t i, float x) { memcpy(p + i * sizeof x, &x, sizeof x); }

/* A float as int the way x86 converts: what does not fit, NaN included, becomes the least int. */
static int32_t to_int(float x) { return x >= -2147483648.0f && x < 2147483648.0f ? (int32_t)x : INT32_MIN; }

/* -- keys: groups of hP tokens, [dims / lP][hP][lP] codes, hP scales, hP biases ------------------------------------------ */

static size_t key_codes(const kvmnn_pack8 *p) { return up(p->dims, p->lP) * p->lP * p->hP; }
static size_t key_group(const kvmnn_pack8 *p) { return key_codes(p) + 2 * sizeof(float) * p->hP; }
static size_t key_code(const kvmnn_pack8 *p, size_t place, size_t d) {
    return d / p->lP * p->lP * p->hP + place * p->lP + d % p->lP;
}

static void quantise_key(const kvmnn_pack8 *p, uint8_t *group, size_t place, const uint8_t *row, const float *most,
                         float *sum) {
    float least = get(row, 0) - most[0], greatest = least;
    for (size_t d = 1; d < p->dims; ++d) {
        float x = get(row, d) - most[d];
        least = least < x ? least : x;
        greatest = greatest > x ? greatest : x;
    }
    const float scale = (greatest - least) / 255.0f;
    const float bias = least + 128.0f * (greatest - least) / 255.0f;
    set(group + key_codes(p), place, scale);
    set(group + key_codes(p), p->hP + place, bias);
    *sum = 0.0f;
    for (size_t d = 0; d < p->dims; ++d) {
        float x = get(row, d) - most[d] - least;
        int32_t code = to_int(roundf(x / (greatest - least) * 255.0f - 128.0f));
        group[key_code(p, place, d)] = (uint8_t)code;
        *sum += (float)code * scale + bias;
    }
}

void kvmnn_quantise_keys(const kvmnn_pack8 *p, uint8_t *head, float *sums, float *most, size_t past, size_t count,
                         const uint8_t *rows, size_t row_stride) {
    for (size_t i = 0; count > 1 && i < count; ++i)
        for (size_t d = 0; d < p->dims; ++d) {
            float x = get(rows + i * row_stride, d);
            most[d] = most[d] > x ? most[d] : x;
        }
    for (size_t i = 0; i < count; ++i) {
        size_t t = past + i;
        quantise_key(p, head + t / p->hP * key_group(p), t % p->hP, rows + i * row_stride, most, &sums[t]);
    }
}

void kvmnn_dequantise_keys(const kvmnn_pack8 *p, const uint8_t *head, size_t start, size_t count, uint8_t *rows,
                           size_t row_stride) {
    for (size_t i = 0; i < count; ++i) {
        const size_t place = (start + i) % p->hP;
        const uint8_t *group = head + (start + i) / p->hP * key_group(p);
        const float scale = get(group + key_codes(p), place), bias = get(group + key_codes(p), p->hP + place);
        for (size_t d = 0; d < p->dims; ++d)
            set(rows + i * row_stride, d, (float)(int8_t)group[key_code(p, place, d)] * scale + bias);
    }
}

/* -- values: blocks of tokens, [dims / hP] times [block / lP][hP][lP] codes, hP scales, hP biases ----------------------- */

static size_t value_codes(const kvmnn_pack8 *p) { return up(p->block, p->lP) * p->lP * p->hP; }
static size_t value_column(const kvmnn_pack8 *p) { return value_codes(p) + 2 * sizeof(float) * p->hP; }
static size_t value_block(const kvmnn_pack8 *p) { return up(p->dims, p->hP) * value_column(p); }
static size_t value_code(const kvmnn_pack8 *p, size_t t, size_t d) {
    size_t r = t % p->block;
    return t / p->block * value_block(p) + d / p->hP * value_column(p) + r / p->lP * p->lP * p->hP +
           d % p->hP * p->lP + r % p->lP;
}

/* Scale and bias of dim d in block b: at [0] and at [hP] from here, in floats. */
static size_t value_scale(const kvmnn_pack8 *p, size_t b, size_t d) {
    return b * value_block(p) + d / p->hP * value_column(p) + value_codes(p) + d % p->hP * sizeof(float);
}

/* The engine compares with 1e-6 in double precision. */
static int vanishes(float x) { return (double)x < 1e-6; }

static void fix_scales(const kvmnn_pack8 *p, uint8_t *head, size_t count, const uint8_t *rows, size_t row_stride) {
    for (size_t d = 0; d < p->dims; ++d) {
        float least = get(rows, d), greatest = least;
        for (size_t i = 0; i < count; ++i) {
            float x = get(rows + i * row_stride, d);
            greatest = greatest > x ? greatest : x;
            least = least < x ? least : x;
        }
        const float range = greatest - least;
        uint8_t *scale = head + value_scale(p, 0, d);
        set(scale, 0, vanishes(range) ? 0.0f : range / 255.0f);
        set(scale, p->hP, vanishes(range) ? greatest : range / 255.0f * 128.0f + least);
    }
}

void kvmnn_quantise_values(const kvmnn_pack8 *p, uint8_t *head, float *sums, size_t blocks, size_t past, size_t count,
                           const uint8_t *rows, size_t row_stride) {
    const size_t width = up(p->dims, p->hP) * p->hP;
    if (past == 0) fix_scales(p, head, count, rows, row_stride);
    for (size_t b = 1; past % p->block == 0 && b < blocks; ++b)
        for (size_t d = 0; d < p->dims; d += p->hP)
            memcpy(head + value_scale(p, b, d), head + value_scale(p, 0, d), 2 * sizeof(float) * p->hP);
    for (size_t d = 0; d < p->dims; ++d) {
        const float scale = get(head + value_scale(p, 0, d), 0), bias = get(head + value_scale(p, 0, d), p->hP);
        const float factor = vanishes(scale) ? 0.0f : 1.0f / scale;
        const float shift = vanishes(scale) ? 0.0f : -bias / scale;
        for (size_t i = 0; i < count; ++i) {
            int32_t code = to_int(roundf(get(rows + i * row_stride, d) * factor + shift));
            code = code > 127 ? 127 : code < -128 ? -128 : code;
            head[value_code(p, past + i, d)] = (uint8_t)code;
            sums[(past + i) / p->block * width + d] += (float)code * scale + bias;
        }
    }
}

void kvmnn_dequantise_values(const kvmnn_pack8 *p, const uint8_t *head, size_t start, size_t count, uint8_t *rows,
                             size_t row_stride) {
    for (size_t t = start; t < start + count; ++t, rows += row_stride)
        for (size_t d = 0; d < p->dims; ++d) {
            const uint8_t *scale = head + value_scale(p, t / p->block, d);
            set(rows, d, (float)(int8_t)head[value_code(p, t, d)] * get(scale, 0) + get(scale, p->hP));
        }
}
