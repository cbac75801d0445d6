/* libFuzzer's door to the decoder of dense streams, without Python: tools/fuzz/dense.sh builds it.
 *
 * KVMNN_FUZZ says what inputs are; their first bytes are options. "streams": decoded, whatever they are, with history and
 * a table set or without. "sets": read as table sets. "words", with all that goes with them: encoded and decoded, which
 * must give the words, at both SIMD levels the same bytes. */
#include "kvmnn/dense/codec.h"

#include <stdio.h>
#include <stdlib.h>

#include "kvmnn/simd.h"

enum { OPTIONS = 8 };

static enum { STREAMS, SETS, WORDS } target;

static uint8_t history[MAX_HISTORY_ROWS * 4096 + PAD_BYTES];
static dense_table_set *set, *read_set;
static uint64_t frequencies[MAX_ROTARY_PAIRS];

static void die(const char *what) {
    fprintf(stderr, "FOUND: %s\n", what);
    abort();
}

static const dense_kernels *loops_of(uint8_t option) {
    int level = option % KVMNN_NUM_ISAS;
    return kvmnn_dense_kernels_at(kvmnn_simd_is_supported(level) ? level : KVMNN_BASELINE);
}

/* What Python checks of a header is taken from the options: shapes that decode within the time of a run. */
static void decode(const uint8_t *options, const uint8_t *data, size_t size) {
    if (size < HEADER_BYTES) return;
    dense_stream s;
    memset(&s, 0, sizeof s);
    uint32_t heads = 1 + (options[1] & 3), dim = 1 + options[2] % 40;
    int dtype = options[1] >> 2 & 3;
    if (dtype > KVMNN_FP32) return;
    s.shape = (dense_shape){dtype, 0, heads, dim, (size_t)heads * dim, dtype == KVMNN_FP32 ? 4 : 2};
    s.rows = 1 + options[3] % 96, s.flags = options[1] >> 4 & 3;
    s.header = data, s.payload = data + HEADER_BYTES, s.payload_bytes = size - HEADER_BYTES;
    if (dense_parse(&s)) return;
    const dense_table_set *given = s.flags & 2 ? set : NULL;
    if (given) {
        s.set_id = set->id;
        set->dtype = dtype, set->base = s.shape.base;
        if (set->rotary.dims > dim) return;
    }
    size_t raw = s.rows * s.shape.words * s.shape.word_bytes;
    uint8_t *room = malloc(dense_decode_scratch_bytes(&s)), *words = malloc(raw);
    (void)dense_decode(&s, loops_of(options[0]), history, given, room, words);
    free(room);
    free(words);
}

static void round_trip(const uint8_t *options, const uint8_t *data, size_t size) {
    dense_input in;
    memset(&in, 0, sizeof in);
    int dtype = options[1] >> 2 & 3;
    uint32_t heads = 1 + (options[1] & 3), dim = 1 + options[2] % 24;
    if (dtype > KVMNN_FP32) return;
    in.shape = (dense_shape){dtype, 0, heads, dim, (size_t)heads * dim, dtype == KVMNN_FP32 ? 4 : 2};
    size_t row_bytes = in.shape.words * in.shape.word_bytes, rows = 1 + options[3] % 40, before = options[4] % 20;
    uint8_t *words = malloc((rows + before) * row_bytes), *back = malloc(rows * row_bytes);
    static uint32_t positions[300];
    for (size_t i = 0; i < (rows + before) * row_bytes; ++i) words[i] = size ? data[i % size] : 0;
    uint32_t step = options[5] & 4 ? 0x9e3779b9u : 1 + options[5] % 4; /* there and back, or on and on */
    for (size_t i = 0; i < rows + before; ++i) positions[i] = (uint32_t)(i * step) % 0x7fffffffu;
    in.rows = (dense_rows){words, words + before * row_bytes, before, rows, row_bytes};
    in.original_rows = in.rows.own;
    if (dim > 1 && options[6] & 1) {
        in.rotary = (dense_rotary){dim / 2 * 2, 0, frequencies};
        in.positions = positions;
    }
    uint8_t *made[KVMNN_NUM_ISAS];
    size_t sizes[KVMNN_NUM_ISAS];
    for (int level = 0; level < KVMNN_NUM_ISAS; ++level) {
        in.kernels = loops_of((uint8_t)level);
        in.shape.base = dense_choose_base(&in);
        uint8_t *room = malloc(dense_encode_scratch_bytes(&in));
        made[level] = malloc(dense_encode_capacity(&in) + PAD_BYTES);
        sizes[level] = dense_encode(&in, room, made[level], rows * row_bytes + HEADER_BYTES, NULL);
        free(room);
        if (sizes[level] != sizes[0] || memcmp(made[level], made[0], sizes[0]) != 0)
            die("other bytes at another SIMD level");
    }
    if (sizes[0]) {
        dense_stream s;
        memset(&s, 0, sizeof s);
        s.shape = in.shape, s.rows = rows, s.flags = made[0][7];
        s.header = made[0], s.payload = made[0] + HEADER_BYTES, s.payload_bytes = sizes[0] - HEADER_BYTES;
        if (dense_parse(&s)) die("a stream of the encoder does not parse");
        uint8_t *room = malloc(dense_decode_scratch_bytes(&s));
        if (dense_decode(&s, in.kernels, words, NULL, room, back)) die("a stream of the encoder does not decode");
        if (memcmp(back, in.original_rows, rows * row_bytes) != 0) die("other words");
        free(room);
    }
    for (int level = 0; level < KVMNN_NUM_ISAS; ++level) free(made[level]);
    free(words), free(back);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    const char *wanted = getenv("KVMNN_FUZZ");
    if (wanted && !strcmp(wanted, "streams")) target = STREAMS;
    else if (wanted && !strcmp(wanted, "sets")) target = SETS;
    else if (wanted && !strcmp(wanted, "words")) target = WORDS;
    else die("KVMNN_FUZZ: expected streams, sets or words");
    set = calloc(1, sizeof *set), read_set = calloc(1, sizeof *read_set);
    dense_counts *counts = calloc(1, sizeof *counts);
    for (size_t i = 0; i < sizeof history; ++i) history[i] = (uint8_t)(i * i >> 7);
    for (int c = 0; c < CONTEXTS; c += 3)
        for (int s = 0; s < 256; ++s) counts->is_seen[c] = 1, counts->contexts[c][s] = (uint32_t)((c * s) & 63);
    for (int b = 0; b < SIMILARITY_CLASSES; ++b) counts->low[b][3] = 1000;
    for (size_t i = 0; i < MAX_ROTARY_PAIRS; ++i) frequencies[i] = (uint64_t)(i + 3) * 0x123456789abcdefu;
    void *room = malloc(dense_cluster_scratch_bytes());
    uint8_t *bytes = malloc(SET_HEADER_BYTES + MAX_MODEL_BYTES);
    dense_rotary rotary = {0, 0, NULL};
    size_t size =
        dense_write_table_set(kvmnn_dense_kernels_at(KVMNN_BASELINE), counts, KVMNN_FP16, 0, &rotary, room, bytes);
    if (dense_read_table_set(bytes, size, set)) die("a table set of the encoder is refused");
    free(room), free(bytes), free(counts);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < OPTIONS) return 0;
    const uint8_t *options = data;
    data += OPTIONS, size -= OPTIONS;
    if (target == STREAMS) decode(options, data, size);
    else if (target == WORDS) round_trip(options, data, size);
    else if (size > SET_HEADER_BYTES) (void)dense_read_table_set(data, size, read_set);
    return 0;
}
