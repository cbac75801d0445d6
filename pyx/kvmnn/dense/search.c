/* The most similar earlier row: votes of a few columns choose candidates, which are compared whole.
 *
 * Each column that is looked at has a bitmap of rows for each kind of symbol, so that votes are counted for hundreds of
 * rows at once, bit by bit. Bitmaps are rings of blocks of rows. */
#include "coding.h"

enum {
    FEWER_LOOKS = LOOKS / 2, /* do where good rows are known already */
    BLOCK_BYTES = VOTED_ROWS / 8,
    BLOCK_WORDS = VOTED_ROWS / 64,
    KINDS = 64,  /* of symbols; two of a kind are hardly found in one column */
    SHORTER = 2, /* equal symbols worth what the row behind the last reference is shorter to write */
};

typedef struct {
    uint8_t *bitmaps; /* [LOOKS][KINDS], and one that stays empty */
    size_t blocks, bytes; /* of a bitmap */
    size_t looks;
    uint32_t columns[LOOKS];
} index_of_rows;

static size_t blocks_of(size_t rows) {
    size_t blocks = (rows + VOTED_ROWS - 1) / VOTED_ROWS;
    return blocks < VOTED_BLOCKS ? blocks : VOTED_BLOCKS;
}

size_t dense_search_room(size_t rows) { return (LOOKS * KINDS + 1) * blocks_of(rows) * BLOCK_BYTES; }

/* Where a row's bitmaps begin. */
static void look_up(const index_of_rows *x, const uint8_t *row, uint32_t *places) {
    for (size_t k = 0; k < x->looks; ++k) {
        uint32_t symbol = row[x->columns[k]];
        places[k] = ((uint32_t)k * KINDS + ((symbol ^ symbol >> 2) & (KINDS - 1))) * (uint32_t)x->bytes;
    }
}

static void put_row(index_of_rows *x, size_t n, const uint32_t *places) {
    uint8_t *at = x->bitmaps + n / VOTED_ROWS % x->blocks * BLOCK_BYTES;
    if (n % VOTED_ROWS == 0 && n / VOTED_ROWS >= x->blocks) /* in place of the oldest rows */
        for (size_t i = 0; i < x->looks * KINDS; ++i) memset(at + i * x->bytes, 0, BLOCK_BYTES);
    at += n % VOTED_ROWS / 8;
    for (size_t k = 0; k < x->looks; ++k) at[places[k]] |= (uint8_t)(1u << n % 8);
}

typedef struct {
    const dense_loops *loops;
    const uint8_t *symbols, *row;
    size_t words, best;
    size_t most; /* equal symbols of the best row */
} contest;

/* `more`: equal symbols that it may have less than the best row. */
static void compare(contest *c, size_t candidate, size_t more) {
    size_t same = c->loops->equal(c->row, c->symbols + candidate * c->words, c->words) + more;
    if (same > c->most) c->most = same, c->best = candidate;
}

static unsigned high_bit(uint64_t x) { /* x is not 0 */
    uint32_t upper = (uint32_t)(x >> 32);
    return upper ? 32 + dense_high_bit(upper) : dense_high_bit((uint32_t)x);
}

/* The rows before row n with most votes, of equal ones the last. */
static void elect(contest *c, const index_of_rows *x, const uint32_t *places, size_t n) {
    const uint8_t *bitmaps[LOOKS];
    dense_votes votes;
    uint64_t left[VOTED_BLOCKS * BLOCK_WORDS], most[VOTED_BLOCKS * BLOCK_WORDS];
    size_t last = (n - 1) / VOTED_ROWS, place = last % x->blocks;
    /* words of the last block, and of those before it in the ring */
    const uint64_t late = ((uint64_t)2 << (BLOCK_WORDS * (place + 1) - 1)) - 1;
    for (size_t k = 0; k < LOOKS; ++k)
        bitmaps[k] = x->bitmaps + (k < x->looks ? places[k] : LOOKS * KINDS * x->bytes);
    c->loops->vote(bitmaps, x->blocks, x->looks, &votes);
    memset(left, 255, x->bytes);
    uint64_t some = c->loops->most(&votes, x->blocks, left, most);
    for (int turn = 1; some; ++turn) {
        size_t w = high_bit(some & late ? some & late : some), bit = high_bit(most[w]);
        size_t back = (place + x->blocks - w / BLOCK_WORDS) % x->blocks;
        compare(c, (last - back) * VOTED_ROWS + w % BLOCK_WORDS * 64 + bit, 0);
        if (turn == CANDIDATES) return;
        most[w] ^= (uint64_t)1 << bit;
        if (most[w] == 0) some ^= (uint64_t)1 << w;
        if (!some) some = c->loops->most(&votes, x->blocks, left, most);
    }
}

void dense_search(const dense_loops *loops, const uint8_t *symbols, size_t words, size_t history, size_t rows,
                  const int32_t *known, uint8_t *room, uint32_t *references) {
    size_t most = known ? FEWER_LOOKS : LOOKS, blocks = blocks_of(history + rows);
    index_of_rows x = {room, blocks, blocks * BLOCK_BYTES, words < most ? words : most, {0}};
    uint32_t places[LOOKS];
    for (size_t k = 0; k < x.looks; ++k) x.columns[k] = (uint32_t)(k * words / x.looks);
    memset(room, 0, x.looks * KINDS * x.bytes);
    memset(room + LOOKS * KINDS * x.bytes, 0, x.bytes); /* the one that stays empty */
    for (size_t n = 0; n < history; ++n) {
        look_up(&x, symbols + n * words, places);
        put_row(&x, n, places);
    }
    for (size_t i = 0; i < rows; ++i) {
        size_t n = history + i;
        contest c = {loops, symbols, symbols + n * words, words, n - 1, 0};
        references[i] = 0;
        look_up(&x, c.row, places);
        if (n > 0) {
            compare(&c, n - 1, 0);
            if (known && known[i] >= 0 && (size_t)known[i] < n) compare(&c, (size_t)known[i], 0);
            if (i > 0 && references[i - 1] + 1 < n - 1) compare(&c, references[i - 1] + 1, SHORTER);
            elect(&c, &x, places, n);
            references[i] = (uint32_t)c.best;
        }
        put_row(&x, n, places);
    }
}
