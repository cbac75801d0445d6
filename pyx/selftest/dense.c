/* Self-test of the dense stream's C files without Python: words of many kinds there and back at every SIMD level, the same
 * bytes at each, and damaged streams, which must be refused or give the words. Prints one line with a hash of all
 * streams, which is the same on every machine; exits 1 at a mismatch. */
#include "kvmnn/dense/coding.h"

#include <stdio.h>
#include <stdlib.h>

#include "kvmnn/simd.h"

enum { MOST_CASE_WORDS = 1 << 14, ROUNDS = 400 };

static uint64_t state = 0x9e3779b97f4a7c15u;

static size_t below(size_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (size_t)(state >> 33) % n;
}

static void die(const char *what, int round) {
    fprintf(stderr, "dense: %s in round %d\n", what, round);
    exit(1);
}

/* Words that repeat more or less: rows out of a few, some bits of them changed; all of it whole numbers. */
static void fill(uint8_t *words, size_t rows, size_t row_words, size_t bytes, int kind) {
    size_t row_bytes = row_words * bytes, kinds = 1 + below(9), spread = below(12);
    for (size_t i = 0; i < rows; ++i) {
        uint8_t *row = words + i * row_bytes;
        if (i >= kinds && kind) memcpy(row, words + below(i) * row_bytes, row_bytes);
        for (size_t j = 0; j < row_words; ++j) {
            uint32_t word = (uint32_t)below((size_t)1 << 31) * 2;
            word |= (uint32_t)below(2);
            if (kind && bytes == 2) word = (word & 0x83ff) | (uint32_t)(0x3000 + (below(6) << 10));
            if (kind && bytes == 4) word = (word & 0x807fffff) | (uint32_t)(120 + below(9)) << 23;
            if (i < kinds || !kind)
                memcpy(row + j * bytes, &word, bytes);
            else if (spread && below(12) < spread) {
                size_t at = j * bytes + below(bytes);
                row[at] ^= (uint8_t)(1u << below(kind == 2 ? 8 : 3));
            }
        }
    }
}

int main(void) {
    static uint64_t frequencies[MOST_PAIRS];
    static uint8_t words[4 * MOST_CASE_WORDS + PAD], back[4 * MOST_CASE_WORDS + PAD];
    static uint8_t stream[4 * MOST_CASE_WORDS + 16384], other[4 * MOST_CASE_WORDS + 16384];
    static uint32_t positions[MOST_CASE_WORDS];
    uint64_t hash = 0;
    unsigned long streams = 0, damaged = 0, refused = 0;
    for (int round = 0; round < ROUNDS; ++round) {
        dense_input in;
        memset(&in, 0, sizeof in);
        int dtype = (int)below(3);
        size_t heads = 1 + below(4), dim = 1 + below(70), row_words = heads * dim, most = MOST_CASE_WORDS / row_words;
        size_t all = 1 + below(most < 200 ? most : 200), history = below(3) ? 0 : below(all);
        in.shape = (dense_shape){dtype, 0, (uint32_t)heads, (uint32_t)dim, row_words, dtype == KVMNN_FP32 ? 4 : 2};
        size_t row_bytes = row_words * in.shape.word_bytes, rows = all - history;
        fill(words, all, row_words, in.shape.word_bytes, (int)below(3));
        in.rows = (dense_rows){words, words + history * row_bytes, history, rows, row_bytes};
        in.own = in.rows.own;
        if (dim > 1 && below(2)) {
            in.rotary = (dense_rotary){(uint32_t)(2 + 2 * below(dim / 2)), 0, frequencies};
            in.positions = positions;
            for (size_t i = 0; i < in.rotary.dims / 2; ++i) {
                uint64_t turns = below((size_t)1 << 31);
                frequencies[i] = turns << (33 - below(30));
            }
            for (size_t i = 0, at = below(1000); i < all; ++i) {
                positions[i] = (uint32_t)at;
                at += below(9) ? 1 : 1 + below(50);
            }
        }
        size_t size = 0;
        for (int level = 0; level < KVMNN_LEVELS; ++level) {
            if (!kvmnn_simd_runs(level)) continue;
            in.loops = kvmnn_dense_loops_at(level);
            in.shape.base = dense_choose_base(&in);
            uint8_t *room = malloc(dense_encode_room(&in));
            size_t made = dense_encode(&in, room, level ? other : stream, SIZE_MAX, NULL);
            free(room);
            if (level && (made != size || memcmp(other, stream, size) != 0)) die("other bytes at another level", round);
            size = made;
        }
        if (size == 0) continue; /* not shorter than its words */
        ++streams;
        hash = kvmnn_xxh64(stream, size, hash);
        for (int attempt = 0; attempt < 40; ++attempt) {
            uint8_t *copy = malloc(size); /* of its exact size, for the sanitizers */
            memcpy(copy, stream, size);
            for (size_t change = 0; attempt && change < 1 + below(3); ++change) {
                size_t at = HEADER_BYTES + below(size - HEADER_BYTES);
                copy[at] ^= (uint8_t)(1 + below(255));
            }
            dense_stream s;
            memset(&s, 0, sizeof s);
            s.shape = in.shape, s.rows = rows, s.flags = copy[7];
            s.header = copy, s.payload = copy + HEADER_BYTES, s.payload_bytes = size - HEADER_BYTES;
            dense_error error = dense_parse(&s);
            if (!error && s.history != history) error = DENSE_SIZES;
            if (!error) {
                uint8_t *room = malloc(dense_decode_room(&s));
                error = dense_decode(&s, in.loops, words, NULL, room, back);
                free(room);
            }
            if (error ? attempt == 0 : memcmp(back, in.own, rows * row_bytes) != 0) die("other words", round);
            damaged += attempt != 0;
            refused += error != DENSE_OK;
            free(copy);
        }
    }
    printf("dense: %lu streams of %d arrays, %lu of %lu damaged ones refused, hash %016llx\n", streams, ROUNDS, refused,
           damaged, (unsigned long long)hash);
    return 0;
}
