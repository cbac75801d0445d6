#include "quantize.h"

#include <math.h>
#include <string.h>

static size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

static float load_float(const uint8_t *layout, size_t i) {
    float x;
    memcpy(&x, layout + i * sizeof x, sizeof x);
    return x;
}

static void store_float(uint8_t *layout, size_t i, float x) { memcpy(layout + i * sizeof x, &x, sizeof x); }

/* A float as int the way x86 converts: what does not fit, NaN included, becomes the least int. */
static int32_t to_int(float x) { return x >= -2147483648.0f && x < 2147483648.0f ? (int32_t)x : INT32_MIN; }

/* -- keys: groups of hP tokens, [dims / lP][hP][lP] codes, hP scales, hP biases ------------------------------------------ */

static size_t key_codes(const kvmnn_int8_layout *layout) {
    return ceil_div(layout->dims, layout->lP) * layout->lP * layout->hP;
}
static size_t key_group(const kvmnn_int8_layout *layout) { return key_codes(layout) + 2 * sizeof(float) * layout->hP; }
static size_t key_code(const kvmnn_int8_layout *layout, size_t slot, size_t d) {
    return d / layout->lP * layout->lP * layout->hP + slot * layout->lP + d % layout->lP;
}

static void quantize_key(const kvmnn_int8_layout *layout, uint8_t *group, size_t slot, const uint8_t *row,
                         const float *running_max, float *sum) {
    float min_value = load_float(row, 0) - running_max[0], max_value = min_value;
    for (size_t d = 1; d < layout->dims; ++d) {
        float x = load_float(row, d) - running_max[d];
        min_value = min_value < x ? min_value : x;
        max_value = max_value > x ? max_value : x;
    }
    const float scale = (max_value - min_value) / 255.0f;
    const float bias = min_value + 128.0f * (max_value - min_value) / 255.0f;
    store_float(group + key_codes(layout), slot, scale);
    store_float(group + key_codes(layout), layout->hP + slot, bias);
    *sum = 0.0f;
    for (size_t d = 0; d < layout->dims; ++d) {
        float x = load_float(row, d) - running_max[d] - min_value;
        int32_t code = to_int(roundf(x / (max_value - min_value) * 255.0f - 128.0f));
        group[key_code(layout, slot, d)] = (uint8_t)code;
        *sum += (float)code * scale + bias;
    }
}

void kvmnn_quantize_keys(const kvmnn_int8_layout *layout, uint8_t *head, float *sums, float *running_max,
                         size_t num_past, size_t count, const uint8_t *rows, size_t row_stride) {
    for (size_t i = 0; count > 1 && i < count; ++i)
        for (size_t d = 0; d < layout->dims; ++d) {
            float x = load_float(rows + i * row_stride, d);
            running_max[d] = running_max[d] > x ? running_max[d] : x;
        }
    for (size_t i = 0; i < count; ++i) {
        size_t t = num_past + i;
        quantize_key(layout, head + t / layout->hP * key_group(layout), t % layout->hP, rows + i * row_stride,
                     running_max, &sums[t]);
    }
}

void kvmnn_dequantize_keys(const kvmnn_int8_layout *layout, const uint8_t *head, size_t start, size_t count,
                           uint8_t *rows, size_t row_stride) {
    for (size_t i = 0; i < count; ++i) {
        const size_t slot = (start + i) % layout->hP;
        const uint8_t *group = head + (start + i) / layout->hP * key_group(layout);
        const float scale = load_float(group + key_codes(layout), slot),
                    bias = load_float(group + key_codes(layout), layout->hP + slot);
        for (size_t d = 0; d < layout->dims; ++d)
            store_float(rows + i * row_stride, d, (float)(int8_t)group[key_code(layout, slot, d)] * scale + bias);
    }
}

/* -- values: blocks of tokens, [dims / hP] times [block / lP][hP][lP] codes, hP scales, hP biases ----------------------- */

static size_t value_codes(const kvmnn_int8_layout *layout) {
    return ceil_div(layout->block_tokens, layout->lP) * layout->lP * layout->hP;
}
static size_t value_column(const kvmnn_int8_layout *layout) {
    return value_codes(layout) + 2 * sizeof(float) * layout->hP;
}
static size_t value_block(const kvmnn_int8_layout *layout) {
    return ceil_div(layout->dims, layout->hP) * value_column(layout);
}
static size_t value_code(const kvmnn_int8_layout *layout, size_t t, size_t d) {
    size_t r = t % layout->block_tokens;
    return t / layout->block_tokens * value_block(layout) + d / layout->hP * value_column(layout) +
           r / layout->lP * layout->lP * layout->hP + d % layout->hP * layout->lP + r % layout->lP;
}

/* Scale and bias of dim d in block b: at [0] and at [hP] from here, in floats. */
static size_t value_scale(const kvmnn_int8_layout *layout, size_t b, size_t d) {
    return b * value_block(layout) + d / layout->hP * value_column(layout) + value_codes(layout) +
           d % layout->hP * sizeof(float);
}

/* The engine compares with 1e-6 in double precision. */
static int is_negligible(float x) { return (double)x < 1e-6; }

static void compute_scales(const kvmnn_int8_layout *layout, uint8_t *head, size_t count, const uint8_t *rows,
                           size_t row_stride) {
    for (size_t d = 0; d < layout->dims; ++d) {
        float min_value = load_float(rows, d), max_value = min_value;
        for (size_t i = 0; i < count; ++i) {
            float x = load_float(rows + i * row_stride, d);
            max_value = max_value > x ? max_value : x;
            min_value = min_value < x ? min_value : x;
        }
        const float range = max_value - min_value;
        uint8_t *scale = head + value_scale(layout, 0, d);
        store_float(scale, 0, is_negligible(range) ? 0.0f : range / 255.0f);
        store_float(scale, layout->hP, is_negligible(range) ? max_value : range / 255.0f * 128.0f + min_value);
    }
}

void kvmnn_quantize_values(const kvmnn_int8_layout *layout, uint8_t *head, float *sums, size_t blocks, size_t num_past,
                           size_t count, const uint8_t *rows, size_t row_stride) {
    const size_t width = ceil_div(layout->dims, layout->hP) * layout->hP;
    if (num_past == 0) compute_scales(layout, head, count, rows, row_stride);
    for (size_t b = 1; num_past % layout->block_tokens == 0 && b < blocks; ++b)
        for (size_t d = 0; d < layout->dims; d += layout->hP)
            memcpy(head + value_scale(layout, b, d), head + value_scale(layout, 0, d), 2 * sizeof(float) * layout->hP);
    for (size_t d = 0; d < layout->dims; ++d) {
        const float scale = load_float(head + value_scale(layout, 0, d), 0),
                    bias = load_float(head + value_scale(layout, 0, d), layout->hP);
        const float factor = is_negligible(scale) ? 0.0f : 1.0f / scale;
        const float shift = is_negligible(scale) ? 0.0f : -bias / scale;
        for (size_t i = 0; i < count; ++i) {
            int32_t code = to_int(roundf(load_float(rows + i * row_stride, d) * factor + shift));
            code = code > 127 ? 127 : code < -128 ? -128 : code;
            head[value_code(layout, num_past + i, d)] = (uint8_t)code;
            sums[(num_past + i) / layout->block_tokens * width + d] += (float)code * scale + bias;
        }
    }
}

void kvmnn_dequantize_values(const kvmnn_int8_layout *layout, const uint8_t *head, size_t start, size_t count,
                             uint8_t *rows, size_t row_stride) {
    for (size_t t = start; t < start + count; ++t, rows += row_stride)
        for (size_t d = 0; d < layout->dims; ++d) {
            const uint8_t *scale = head + value_scale(layout, t / layout->block_tokens, d);
            store_float(
                rows, d,
                (float)(int8_t)head[value_code(layout, t, d)] * load_float(scale, 0) + load_float(scale, layout->hP));
        }
}
