/* Self-test of the dense stream's C files without Python: words of many kinds there and back at every SIMD level, the same
 * bytes at each, and damaged streams, which must be refused or give the words. Prints one line with a hash of all
 * streams, which is the same on every machine; exits 1 at a mismatch. */
#include "kvmnn/dense/codec.h"

#include <stdio.h>
#include <stdlib.h>

#include "kvmnn/simd.h"

enum { MAX_CASE_WORDS = 1 << 14, NUM_ROUNDS = 400 };

static uint64_t random_state = 0x9e3779b97f4a7c15u;

static size_t random_below(size_t n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (size_t)(random_state >> 33) % n;
}

static void die(const char *what, int round) {
    fprintf(stderr, "dense: %s in round %d\n", what, round);
    exit(1);
}

/* Words that repeat more or less: rows out of a few, some bits of them changed; all of it whole numbers. */
static void fill(uint8_t *words, size_t rows, size_t row_words, size_t bytes, int kind) {
    size_t row_bytes = row_words * bytes, kinds = 1 + random_below(9), spread = random_below(12);
    for (size_t i = 0; i < rows; ++i) {
        uint8_t *row = words + i * row_bytes;
        if (i >= kinds && kind) memcpy(row, words + random_below(i) * row_bytes, row_bytes);
        for (size_t j = 0; j < row_words; ++j) {
            uint32_t word = (uint32_t)random_below((size_t)1 << 31) * 2;
            word |= (uint32_t)random_below(2);
            if (kind && bytes == 2) word = (word & 0x83ff) | (uint32_t)(0x3000 + (random_below(6) << 10));
            if (kind && bytes == 4) word = (word & 0x807fffff) | (uint32_t)(120 + random_below(9)) << 23;
            if (i < kinds || !kind)
                memcpy(row + j * bytes, &word, bytes);
            else if (spread && random_below(12) < spread) {
                size_t offset = j * bytes + random_below(bytes);
                row[offset] ^= (uint8_t)(1u << random_below(kind == 2 ? 8 : 3));
            }
        }
    }
}

int main(void) {
    static uint64_t frequencies[MAX_ROTARY_PAIRS];
    static uint8_t words[4 * MAX_CASE_WORDS + PAD_BYTES], decoded_words[4 * MAX_CASE_WORDS + PAD_BYTES];
    static uint8_t stream[4 * MAX_CASE_WORDS + 16384], second_stream[4 * MAX_CASE_WORDS + 16384];
    static uint32_t positions[MAX_CASE_WORDS];
    uint64_t hash = 0;
    unsigned long streams = 0, num_damaged = 0, num_refused = 0;
    for (int round = 0; round < NUM_ROUNDS; ++round) {
        dense_input in;
        memset(&in, 0, sizeof in);
        int dtype = (int)random_below(3);
        size_t heads = 1 + random_below(4), dim = 1 + random_below(70), row_words = heads * dim,
               max_rows = MAX_CASE_WORDS / row_words;
        size_t num_rows = 1 + random_below(max_rows < 200 ? max_rows : 200),
               history = random_below(3) ? 0 : random_below(num_rows);
        in.shape = (dense_shape){dtype, 0, (uint32_t)heads, (uint32_t)dim, row_words, dtype == KVMNN_FP32 ? 4 : 2};
        size_t row_bytes = row_words * in.shape.word_bytes, rows = num_rows - history;
        fill(words, num_rows, row_words, in.shape.word_bytes, (int)random_below(3));
        in.rows = (dense_rows){words, words + history * row_bytes, history, rows, row_bytes};
        in.original_rows = in.rows.own;
        if (dim > 1 && random_below(2)) {
            in.rotary = (dense_rotary){(uint32_t)(2 + 2 * random_below(dim / 2)), 0, frequencies};
            in.positions = positions;
            for (size_t i = 0; i < in.rotary.dims / 2; ++i) {
                uint64_t turns = random_below((size_t)1 << 31);
                frequencies[i] = turns << (33 - random_below(30));
            }
            for (size_t i = 0, value = random_below(1000); i < num_rows; ++i) {
                positions[i] = (uint32_t)value;
                value += random_below(9) ? 1 : 1 + random_below(50);
            }
        }
        size_t size = 0;
        for (int level = 0; level < KVMNN_NUM_ISAS; ++level) {
            if (!kvmnn_simd_is_supported(level)) continue;
            in.kernels = kvmnn_dense_kernels_at(level);
            in.shape.base = dense_choose_base(&in);
            uint8_t *scratch = malloc(dense_encode_scratch_bytes(&in));
            size_t stream_bytes = dense_encode(&in, scratch, level ? second_stream : stream, SIZE_MAX, NULL);
            free(scratch);
            if (level && (stream_bytes != size || memcmp(second_stream, stream, size) != 0))
                die("other bytes at another level", round);
            size = stream_bytes;
        }
        if (size == 0) continue; /* not shorter than its words */
        ++streams;
        hash = kvmnn_xxh64(stream, size, hash);
        for (int attempt = 0; attempt < 40; ++attempt) {
            uint8_t *copy = malloc(size); /* of its exact size, for the sanitizers */
            memcpy(copy, stream, size);
            for (size_t change = 0; attempt && change < 1 + random_below(3); ++change) {
                size_t value = HEADER_BYTES + random_below(size - HEADER_BYTES);
                copy[value] ^= (uint8_t)(1 + random_below(255));
            }
            dense_stream s;
            memset(&s, 0, sizeof s);
            s.shape = in.shape, s.rows = rows, s.flags = copy[7];
            s.header = copy, s.payload = copy + HEADER_BYTES, s.payload_bytes = size - HEADER_BYTES;
            dense_error error = dense_parse(&s);
            if (!error && s.history != history) error = DENSE_SIZES;
            if (!error) {
                uint8_t *scratch = malloc(dense_decode_scratch_bytes(&s));
                error = dense_decode(&s, in.kernels, words, NULL, scratch, decoded_words);
                free(scratch);
            }
            if (error ? attempt == 0 : memcmp(decoded_words, in.original_rows, rows * row_bytes) != 0)
                die("other words", round);
            num_damaged += attempt != 0;
            num_refused += error != DENSE_OK;
            free(copy);
        }
    }
    printf("dense: %lu streams of %d arrays, %lu of %lu damaged ones refused, hash %016llx\n", streams, NUM_ROUNDS,
           num_refused, num_damaged, (unsigned long long)hash);
    return 0;
}
