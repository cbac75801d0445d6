/* The most similar earlier row: votes of a few columns choose candidates, which are compared whole. */
#include "coding.h"

enum { STRIDE_STEP = SCANNED_ROWS, FEWER_LOOKS = LOOKS / 2 }; /* fewer do where good rows are known already */

static size_t stride_of(size_t rows) { return (rows + 2 * STRIDE_STEP - 1) / STRIDE_STEP * STRIDE_STEP; }

size_t dense_search_room(size_t rows) {
    return dense_aligned((size_t)LOOKS * stride_of(rows)) + dense_aligned(WINDOW_ROWS + 2 * SCANNED_ROWS);
}

/* Symbols of the chosen columns, column by column. */
static void gather(const uint8_t *symbols, size_t words, size_t rows, const uint32_t *chosen, size_t looks,
                   uint8_t *columns, size_t stride) {
    for (size_t i = 0; i < rows; ++i, symbols += words)
        for (size_t k = 0; k < looks; ++k) columns[k * stride + i] = symbols[chosen[k]];
}

typedef struct {
    const dense_loops *loops;
    const uint8_t *symbols, *row;
    size_t words, best;
    size_t most; /* equal symbols of the best row */
} contest;

static void compare(contest *c, size_t candidate) {
    size_t same = c->loops->equal(c->row, c->symbols + candidate * c->words, c->words);
    if (same > c->most) c->most = same, c->best = candidate;
}

/* The rows with most votes, of equal ones the last. */
static void elect(contest *c, uint8_t *votes, uint8_t *maxima, size_t first, size_t rows) {
    size_t blocks = (rows + SCANNED_ROWS - 1) / SCANNED_ROWS;
    if (rows % SCANNED_ROWS) {
        memset(votes + rows, 0, blocks * SCANNED_ROWS - rows);
        maxima[blocks - 1] = c->loops->largest(votes + (blocks - 1) * SCANNED_ROWS);
    }
    for (int turn = 0; turn < CANDIDATES; ++turn) {
        size_t block = 0;
        for (size_t b = 1; b < blocks; ++b)
            if (maxima[b] >= maxima[block]) block = b;
        if (maxima[block] == 0) return;
        uint8_t *of_block = votes + block * SCANNED_ROWS;
        size_t i = c->loops->last(of_block, maxima[block]);
        of_block[i] = 0;
        if (turn + 1 < CANDIDATES) maxima[block] = c->loops->largest(of_block);
        compare(c, first + block * SCANNED_ROWS + i);
    }
}

void dense_search(const dense_loops *loops, const uint8_t *symbols, size_t words, size_t history, size_t rows,
                  const int32_t *known, uint8_t *room, uint32_t *references) {
    size_t all = history + rows, stride = stride_of(all), most = known ? FEWER_LOOKS : LOOKS;
    size_t looks = words < most ? words : most;
    uint8_t *columns = room, *votes = room + dense_aligned((size_t)LOOKS * stride);
    uint8_t look[LOOKS], maxima[WINDOW_ROWS / SCANNED_ROWS + 1];
    uint32_t chosen[LOOKS];
    for (size_t k = 0; k < looks; ++k) chosen[k] = (uint32_t)(k * words / looks);
    gather(symbols, words, all, chosen, looks, columns, stride);
    for (size_t i = 0; i < rows; ++i) {
        size_t n = history + i;
        references[i] = 0;
        if (n == 0) continue;
        contest c = {loops, symbols, symbols + n * words, words, n - 1, 0};
        compare(&c, n - 1);
        if (known && known[i] >= 0 && (size_t)known[i] < n) compare(&c, (size_t)known[i]);
        size_t first = n > WINDOW_ROWS ? n - WINDOW_ROWS : 0;
        for (size_t k = 0; k < looks; ++k) look[k] = c.row[chosen[k]];
        loops->scan(columns + first, stride, n - first, look, looks, votes, maxima);
        elect(&c, votes, maxima, first, n - first);
        references[i] = (uint32_t)c.best;
    }
}
