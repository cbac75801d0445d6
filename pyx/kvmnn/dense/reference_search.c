/* The most similar earlier row: votes of a few columns choose candidates, which are compared whole.
 *
 * Each column that is looked at has a bitmap of rows for each kind of symbol, so that votes are counted for hundreds of
 * rows at once, bit by bit. Bitmaps are rings of blocks of rows. */

/* The search counts votes instead of comparing rows. Each column of a row votes for the earlier rows that hold the
 * same symbol there. A column has a bitmap of rows for each symbol; adding bitmaps bit by bit counts the votes of 512
 * rows in the time that comparing two rows took. */
#include "codec.h"

enum {
    NUM_COLUMNS_WITH_HINTS = NUM_COLUMNS / 2, /* do where good rows are known already */
    BLOCK_BYTES = VOTE_BLOCK_ROWS / 8,
    BLOCK_WORDS = VOTE_BLOCK_ROWS / 64,
    NUM_SYMBOL_KINDS = 64,       /* of symbols; two of a kind are hardly found in one column */
    IMPLIED_REFERENCE_BONUS = 2, /* equal symbols worth what the row after the last reference is shorter to write */
};

typedef struct {
    uint8_t *bitmaps; /* [NUM_COLUMNS][NUM_SYMBOL_KINDS], and one that stays empty */
    size_t blocks, bitmap_bytes;
    size_t num_columns;
    uint32_t columns[NUM_COLUMNS];
} row_index;

static size_t count_blocks(size_t rows) {
    size_t blocks = (rows + VOTE_BLOCK_ROWS - 1) / VOTE_BLOCK_ROWS;
    return blocks < MAX_VOTE_BLOCKS ? blocks : MAX_VOTE_BLOCKS;
}

size_t dense_search_scratch_bytes(size_t rows) {
    return (NUM_COLUMNS * NUM_SYMBOL_KINDS + 1) * count_blocks(rows) * BLOCK_BYTES;
}

/* Where a row's bitmaps begin. */
static void find_bitmaps(const row_index *index, const uint8_t *row, uint32_t *offsets) {
    for (size_t k = 0; k < index->num_columns; ++k) {
        uint32_t symbol = row[index->columns[k]];
        offsets[k] = ((uint32_t)k * NUM_SYMBOL_KINDS + ((symbol ^ symbol >> 2) & (NUM_SYMBOL_KINDS - 1))) *
                     (uint32_t)index->bitmap_bytes;
    }
}

static void insert_row(row_index *index, size_t n, const uint32_t *offsets) {
    uint8_t *bitmap = index->bitmaps + n / VOTE_BLOCK_ROWS % index->blocks * BLOCK_BYTES;
    if (n % VOTE_BLOCK_ROWS == 0 && n / VOTE_BLOCK_ROWS >= index->blocks) /* in place of the oldest rows */
        for (size_t i = 0; i < index->num_columns * NUM_SYMBOL_KINDS; ++i)
            memset(bitmap + i * index->bitmap_bytes, 0, BLOCK_BYTES);
    bitmap += n % VOTE_BLOCK_ROWS / 8;
    for (size_t k = 0; k < index->num_columns; ++k) bitmap[offsets[k]] |= (uint8_t)(1u << n % 8);
}

typedef struct {
    const dense_kernels *kernels;
    const uint8_t *symbols, *row;
    size_t words, best_row;
    size_t best_num_equal; /* equal symbols of the best row */
} reference_contest;

/* `bonus`: equal symbols that it may have less than the best row. */
static void consider_candidate(reference_contest *contest_state, size_t candidate, size_t bonus) {
    const uint8_t *symbols = contest_state->symbols + candidate * contest_state->words;
    size_t num_equal = contest_state->kernels->count_equal(contest_state->row, symbols, contest_state->words) + bonus;
    if (num_equal > contest_state->best_num_equal)
        contest_state->best_num_equal = num_equal, contest_state->best_row = candidate;
}

static unsigned high_bit(uint64_t x) { /* x is not 0 */
    uint32_t upper = (uint32_t)(x >> 32);
    return upper ? 32 + dense_high_bit(upper) : dense_high_bit((uint32_t)x);
}

/* The rows before row n with most votes, of equal ones the last. */
static void vote_candidates(reference_contest *contest_state, const row_index *index, const uint32_t *offsets,
                            size_t n) {
    const uint8_t *bitmaps[NUM_COLUMNS];
    dense_votes votes;
    uint64_t candidate_bits[MAX_VOTE_BLOCKS * BLOCK_WORDS], top_bits[MAX_VOTE_BLOCKS * BLOCK_WORDS];
    size_t last_block = (n - 1) / VOTE_BLOCK_ROWS, ring_place = last_block % index->blocks;
    /* words of the last block, and of those before it in the ring */
    const uint64_t recent_mask = ((uint64_t)2 << (BLOCK_WORDS * (ring_place + 1) - 1)) - 1;
    for (size_t k = 0; k < NUM_COLUMNS; ++k)
        bitmaps[k] = index->bitmaps +
                     (k < index->num_columns ? offsets[k] : NUM_COLUMNS * NUM_SYMBOL_KINDS * index->bitmap_bytes);
    contest_state->kernels->vote(bitmaps, index->blocks, index->num_columns, &votes);
    memset(candidate_bits, 255, index->bitmap_bytes);
    uint64_t nonzero_words = contest_state->kernels->select_top(&votes, index->blocks, candidate_bits, top_bits);
    for (int attempt = 1; nonzero_words; ++attempt) {
        size_t w = high_bit(nonzero_words & recent_mask ? nonzero_words & recent_mask : nonzero_words);
        size_t bit = high_bit(top_bits[w]);
        size_t block_distance = (ring_place + index->blocks - w / BLOCK_WORDS) % index->blocks;
        consider_candidate(contest_state, (last_block - block_distance) * VOTE_BLOCK_ROWS + w % BLOCK_WORDS * 64 + bit,
                           0);
        if (attempt == NUM_CANDIDATES) return;
        top_bits[w] ^= (uint64_t)1 << bit;
        if (top_bits[w] == 0) nonzero_words ^= (uint64_t)1 << w;
        if (!nonzero_words)
            nonzero_words = contest_state->kernels->select_top(&votes, index->blocks, candidate_bits, top_bits);
    }
}

void dense_search_references(const dense_kernels *kernels, const uint8_t *symbols, size_t words, size_t history,
                             size_t rows, const int32_t *reference_hints, uint8_t *scratch, uint32_t *references) {
    size_t max_columns = reference_hints ? NUM_COLUMNS_WITH_HINTS : NUM_COLUMNS, blocks = count_blocks(history + rows);
    row_index index = {scratch, blocks, blocks * BLOCK_BYTES, words < max_columns ? words : max_columns, {0}};
    uint32_t offsets[NUM_COLUMNS];
    for (size_t k = 0; k < index.num_columns; ++k) index.columns[k] = (uint32_t)(k * words / index.num_columns);
    memset(scratch, 0, index.num_columns * NUM_SYMBOL_KINDS * index.bitmap_bytes);
    /* the one that stays empty */
    memset(scratch + NUM_COLUMNS * NUM_SYMBOL_KINDS * index.bitmap_bytes, 0, index.bitmap_bytes);
    for (size_t n = 0; n < history; ++n) {
        find_bitmaps(&index, symbols + n * words, offsets);
        insert_row(&index, n, offsets);
    }
    for (size_t i = 0; i < rows; ++i) {
        size_t n = history + i;
        reference_contest contest_state = {kernels, symbols, symbols + n * words, words, n - 1, 0};
        references[i] = 0;
        find_bitmaps(&index, contest_state.row, offsets);
        if (n > 0) {
            consider_candidate(&contest_state, n - 1, 0);
            if (reference_hints && reference_hints[i] >= 0 && (size_t)reference_hints[i] < n)
                consider_candidate(&contest_state, (size_t)reference_hints[i], 0);
            if (i > 0 && references[i - 1] + 1 < n - 1)
                consider_candidate(&contest_state, references[i - 1] + 1, IMPLIED_REFERENCE_BONUS);
            vote_candidates(&contest_state, &index, offsets, n);
            references[i] = (uint32_t)contest_state.best_row;
        }
        insert_row(&index, n, offsets);
    }
}
