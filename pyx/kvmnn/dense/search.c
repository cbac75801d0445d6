/* The most similar earlier row: votes of a few columns choose candidates, which are compared whole.
 *
 * Each look at a column and each symbol seen there has a bitmap of the rows that have it: votes are counted for many
 * rows at once, bit by bit. Bitmaps are rings of blocks of rows, and come into being where a symbol is first seen. */
#include "coding.h"

enum {
    FEWER_LOOKS = LOOKS / 2, /* do where good rows are known already */
    BLOCK_BYTES = VOTED_ROWS / 8,
    BLOCK_WORDS = VOTED_ROWS / 64,
    MOST_BITMAPS = 3072, /* symbols that come later have none: words that are nothing but noise */
};

typedef struct {
    size_t blocks, bytes; /* of a bitmap */
    uint8_t *bitmaps;     /* the first is empty */
    size_t count;
    uint16_t of[LOOKS][256]; /* 0: none yet */
} index_of_looks;

static size_t blocks_of(size_t rows) {
    size_t blocks = (rows + VOTED_ROWS - 1) / VOTED_ROWS;
    return blocks < VOTED_BLOCKS ? blocks : VOTED_BLOCKS;
}

size_t dense_search_room(size_t rows) {
    size_t most = LOOKS * rows + 1;
    if (most > MOST_BITMAPS) most = MOST_BITMAPS;
    return dense_aligned(sizeof(index_of_looks)) + most * blocks_of(rows) * BLOCK_BYTES;
}

/* The bitmaps of a row's symbols, by number. */
static void look_up(const index_of_looks *x, const uint8_t *row, const uint32_t *chosen, size_t looks,
                    uint16_t *numbers) {
    for (size_t k = 0; k < looks; ++k) numbers[k] = x->of[k][row[chosen[k]]];
}

static void put_row(index_of_looks *x, const uint8_t *row, const uint32_t *chosen, size_t looks, size_t n,
                    uint16_t *numbers) {
    size_t place = n / VOTED_ROWS % x->blocks * BLOCK_BYTES;
    if (n % VOTED_ROWS == 0 && n / VOTED_ROWS >= x->blocks) /* in place of the oldest rows */
        for (size_t i = 0; i < x->count; ++i) memset(x->bitmaps + i * x->bytes + place, 0, BLOCK_BYTES);
    place += n % VOTED_ROWS / 8;
    for (size_t k = 0; k < looks; ++k) {
        if (numbers[k] == 0) {
            if (x->count == MOST_BITMAPS) continue;
            x->of[k][row[chosen[k]]] = numbers[k] = (uint16_t)x->count++;
            for (size_t i = 0; i < x->blocks; ++i)
                memset(x->bitmaps + (numbers[k] * x->blocks + i) * BLOCK_BYTES, 0, BLOCK_BYTES);
        }
        x->bitmaps[numbers[k] * x->bytes + place] |= (uint8_t)(1u << n % 8);
    }
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

static unsigned high_bit(uint64_t x) { /* x is not 0 */
    uint32_t upper = (uint32_t)(x >> 32);
    return upper ? 32 + dense_high_bit(upper) : dense_high_bit((uint32_t)x);
}

/* The rows before row n with most votes, of equal ones the last. */
static void elect(contest *c, const index_of_looks *x, const uint16_t *numbers, size_t looks, size_t n) {
    const uint8_t *bitmaps[LOOKS];
    dense_votes votes;
    uint64_t left[VOTED_BLOCKS * BLOCK_WORDS], most[VOTED_BLOCKS * BLOCK_WORDS];
    size_t last = (n - 1) / VOTED_ROWS, place = last % x->blocks;
    /* words of the last block, and of those before it in the ring */
    const uint64_t late = ((uint64_t)2 << (BLOCK_WORDS * (place + 1) - 1)) - 1;
    for (size_t k = 0; k < LOOKS; ++k) bitmaps[k] = x->bitmaps + (k < looks ? numbers[k] * x->bytes : 0);
    c->loops->vote(bitmaps, x->blocks, looks, &votes);
    memset(left, 255, x->bytes);
    uint64_t some = c->loops->most(&votes, x->blocks, left, most);
    for (int turn = 1; some; ++turn) {
        size_t w = high_bit(some & late ? some & late : some), bit = high_bit(most[w]);
        size_t back = (place + x->blocks - w / BLOCK_WORDS) % x->blocks;
        compare(c, (last - back) * VOTED_ROWS + w % BLOCK_WORDS * 64 + bit);
        if (turn == CANDIDATES) return;
        most[w] ^= (uint64_t)1 << bit;
        if (most[w] == 0) some ^= (uint64_t)1 << w;
        if (!some) some = c->loops->most(&votes, x->blocks, left, most);
    }
}

void dense_search(const dense_loops *loops, const uint8_t *symbols, size_t words, size_t history, size_t rows,
                  const int32_t *known, uint8_t *room, uint32_t *references) {
    size_t all = history + rows, most = known ? FEWER_LOOKS : LOOKS, looks = words < most ? words : most;
    index_of_looks *x = (index_of_looks *)(void *)room;
    uint32_t chosen[LOOKS];
    uint16_t numbers[LOOKS];
    for (size_t k = 0; k < looks; ++k) chosen[k] = (uint32_t)(k * words / looks);
    x->blocks = blocks_of(all), x->bytes = x->blocks * BLOCK_BYTES, x->count = 1;
    x->bitmaps = room + dense_aligned(sizeof *x);
    memset(x->bitmaps, 0, x->bytes);
    memset(x->of, 0, sizeof x->of);
    for (size_t n = 0; n < history; ++n) {
        look_up(x, symbols + n * words, chosen, looks, numbers);
        put_row(x, symbols + n * words, chosen, looks, n, numbers);
    }
    for (size_t i = 0; i < rows; ++i) {
        size_t n = history + i;
        contest c = {loops, symbols, symbols + n * words, words, n - 1, 0};
        references[i] = 0;
        look_up(x, c.row, chosen, looks, numbers);
        if (n > 0) {
            compare(&c, n - 1);
            if (known && known[i] >= 0 && (size_t)known[i] < n) compare(&c, (size_t)known[i]);
            elect(&c, x, numbers, looks, n);
            references[i] = (uint32_t)c.best;
        }
        if (i + 1 < rows) put_row(x, c.row, chosen, looks, n, numbers);
    }
}
