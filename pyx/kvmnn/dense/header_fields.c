/* The head of a dense stream: rotary parameters, positions, and how rows refer back. */
#include "dense.h"

void dense_write_rotary(bitwriter *w, const dense_rotary *rotary) {
    bitwriter_put(w, rotary->dims, 16);
    bitwriter_put(w, (uint32_t)rotary->interleaved, 1);
    for (uint32_t i = 0; i < rotary->dims / 2; ++i) {
        bitwriter_put(w, (uint32_t)rotary->frequencies[i], 32);
        bitwriter_put(w, (uint32_t)(rotary->frequencies[i] >> 32), 32);
    }
}

dense_error dense_read_rotary(bitreader *r, uint32_t dim, uint64_t *frequencies, dense_rotary *rotary) {
    rotary->dims = bitreader_get(r, 16);
    rotary->interleaved = (int)bitreader_get(r, 1);
    rotary->frequencies = frequencies;
    if (rotary->dims == 0 || rotary->dims % 2 || rotary->dims > dim) return DENSE_ROTARY;
    for (uint32_t i = 0; i < rotary->dims / 2; ++i) {
        uint64_t lower = bitreader_get(r, 32);
        frequencies[i] = lower | (uint64_t)bitreader_get(r, 32) << 32;
    }
    return r->overrun ? DENSE_HEAD : DENSE_OK;
}

void dense_write_positions(bitwriter *w, const uint32_t *positions, size_t n) {
    uint32_t next_position = 0;
    for (size_t i = 0; i < n;) {
        size_t end = i + 1;
        while (end < n && positions[end] == positions[end - 1] + 1) ++end;
        int64_t gap = (int64_t)positions[i] - (int64_t)next_position;
        bitwriter_put_number(w, (uint32_t)(gap >= 0 ? 2 * gap : -2 * gap - 1));
        bitwriter_put_number(w, (uint32_t)(end - i - 1));
        next_position = positions[end - 1] + 1;
        i = end;
    }
}

dense_error dense_read_positions(bitreader *r, uint32_t *positions, size_t n) {
    int64_t next_position = 0;
    for (size_t i = 0; i < n;) {
        uint32_t gap = bitreader_get_number(r);
        uint64_t rows = (uint64_t)bitreader_get_number(r) + 1;
        if (r->overrun) return DENSE_HEAD;
        next_position += gap & 1 ? -(int64_t)(gap / 2) - 1 : (int64_t)(gap / 2);
        if (rows > n - i || next_position < 0 || next_position + (int64_t)rows - 1 > MAX_POSITION)
            return DENSE_POSITION;
        for (uint64_t k = 0; k < rows; ++k) positions[i++] = (uint32_t)next_position++;
    }
    return DENSE_OK;
}

void dense_write_row_references(bitwriter *w, size_t history, size_t rows, const uint8_t *similarity_classes,
                                const uint32_t *references) {
    size_t previous = 0;
    int is_first = 1;
    for (size_t i = 0; i < rows; ++i) {
        size_t n = history + i;
        if (n == 0) continue;
        size_t implied = is_first ? n - 1 : previous + 1;
        is_first = 0;
        previous = references[i];
        bitwriter_put(w, similarity_classes[i], 3);
        bitwriter_put(w, previous == implied, 1);
        if (previous == implied) continue;
        uint32_t distance = (uint32_t)(n - previous);
        unsigned k = dense_high_bit(distance);
        bitwriter_put(w, k, dense_bit_width(dense_high_bit((uint32_t)n)));
        bitwriter_put(w, distance - ((uint32_t)1 << k), k);
    }
}

dense_error dense_read_row_references(bitreader *r, size_t history, size_t rows, uint8_t *similarity_classes,
                                      uint32_t *references) {
    size_t previous = 0;
    int is_first = 1;
    for (size_t i = 0; i < rows; ++i) {
        size_t n = history + i;
        similarity_classes[i] = 0;
        references[i] = 0;
        if (n == 0) continue;
        similarity_classes[i] = (uint8_t)bitreader_get(r, 3);
        if (similarity_classes[i] >= SIMILARITY_CLASSES && similarity_classes[i] != COPY_CLASS) return DENSE_REFERENCE;
        if (bitreader_get(r, 1)) {
            previous = is_first ? n - 1 : previous + 1;
        } else {
            unsigned max_width = dense_high_bit((uint32_t)n), k = bitreader_get(r, dense_bit_width(max_width));
            if (k > max_width) return DENSE_REFERENCE;
            size_t distance = ((size_t)1 << k) + bitreader_get(r, k);
            if (distance > n) return DENSE_REFERENCE;
            previous = n - distance;
        }
        if (r->overrun) return DENSE_HEAD;
        is_first = 0;
        references[i] = (uint32_t)previous;
    }
    return DENSE_OK;
}
