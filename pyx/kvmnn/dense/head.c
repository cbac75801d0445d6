/* The head of a dense stream: rotary parameters, positions, and how rows refer back. */
#include "dense.h"

void dense_put_rotary(dense_writer *w, const dense_rotary *rotary) {
    dense_put(w, rotary->dims, 16);
    dense_put(w, (uint32_t)rotary->interleaved, 1);
    for (uint32_t i = 0; i < rotary->dims / 2; ++i) {
        dense_put(w, (uint32_t)rotary->frequencies[i], 32);
        dense_put(w, (uint32_t)(rotary->frequencies[i] >> 32), 32);
    }
}

dense_error dense_get_rotary(dense_reader *r, uint32_t dim, uint64_t *frequencies, dense_rotary *rotary) {
    rotary->dims = dense_get(r, 16);
    rotary->interleaved = (int)dense_get(r, 1);
    rotary->frequencies = frequencies;
    if (rotary->dims == 0 || rotary->dims % 2 || rotary->dims > dim) return DENSE_ROTARY;
    for (uint32_t i = 0; i < rotary->dims / 2; ++i) {
        uint64_t lower = dense_get(r, 32);
        frequencies[i] = lower | (uint64_t)dense_get(r, 32) << 32;
    }
    return r->over ? DENSE_HEAD : DENSE_OK;
}

void dense_put_positions(dense_writer *w, const uint32_t *positions, size_t n) {
    uint32_t expected = 0;
    for (size_t i = 0; i < n;) {
        size_t end = i + 1;
        while (end < n && positions[end] == positions[end - 1] + 1) ++end;
        int64_t gap = (int64_t)positions[i] - (int64_t)expected;
        dense_put_number(w, (uint32_t)(gap >= 0 ? 2 * gap : -2 * gap - 1));
        dense_put_number(w, (uint32_t)(end - i - 1));
        expected = positions[end - 1] + 1;
        i = end;
    }
}

dense_error dense_get_positions(dense_reader *r, uint32_t *positions, size_t n) {
    int64_t expected = 0;
    for (size_t i = 0; i < n;) {
        uint32_t gap = dense_get_number(r);
        uint64_t rows = (uint64_t)dense_get_number(r) + 1;
        if (r->over) return DENSE_HEAD;
        expected += gap & 1 ? -(int64_t)(gap / 2) - 1 : (int64_t)(gap / 2);
        if (rows > n - i || expected < 0 || expected + (int64_t)rows - 1 > MOST_POSITION) return DENSE_POSITION;
        for (uint64_t k = 0; k < rows; ++k) positions[i++] = (uint32_t)expected++;
    }
    return DENSE_OK;
}

void dense_put_rows(dense_writer *w, size_t history, size_t rows, const uint8_t *buckets, const uint32_t *references) {
    size_t last = 0;
    int first = 1;
    for (size_t i = 0; i < rows; ++i) {
        size_t n = history + i;
        if (n == 0) continue;
        size_t behind = first ? n - 1 : last + 1;
        first = 0;
        last = references[i];
        dense_put(w, buckets[i], 3);
        dense_put(w, last == behind, 1);
        if (last == behind) continue;
        uint32_t distance = (uint32_t)(n - last);
        unsigned k = dense_high_bit(distance);
        dense_put(w, k, dense_width(dense_high_bit((uint32_t)n)));
        dense_put(w, distance - ((uint32_t)1 << k), k);
    }
}

dense_error dense_get_rows(dense_reader *r, size_t history, size_t rows, uint8_t *buckets, uint32_t *references) {
    size_t last = 0;
    int first = 1;
    for (size_t i = 0; i < rows; ++i) {
        size_t n = history + i;
        buckets[i] = 0;
        references[i] = 0;
        if (n == 0) continue;
        buckets[i] = (uint8_t)dense_get(r, 3);
        if (buckets[i] >= BUCKETS && buckets[i] != COPY) return DENSE_REFERENCE;
        if (dense_get(r, 1)) {
            last = first ? n - 1 : last + 1;
        } else {
            unsigned most = dense_high_bit((uint32_t)n), k = dense_get(r, dense_width(most));
            if (k > most) return DENSE_REFERENCE;
            size_t distance = ((size_t)1 << k) + dense_get(r, k);
            if (distance > n) return DENSE_REFERENCE;
            last = n - distance;
        }
        if (r->over) return DENSE_HEAD;
        first = 0;
        references[i] = (uint32_t)last;
    }
    return DENSE_OK;
}
