/* libFuzzer's door to the decoders of linear and transform streams, without Python: tools/fuzz/profile_streams.sh
 * builds it.
 *
 * KVMNN_FUZZ is "linear" or "transform". An input has options, up to four patches, and data. By the options the data is
 * either decoded as it is, or it is words (coefficients) which are encoded and decode to what went in; patched, they are
 * decoded again. One SIMD level does it, or all of them: the same bytes, and all take a damaged stream or none. At the
 * end it prints how many streams the decoders were called for.
 *
 * Built with KVMNN_PRINT_HASH it is a program that draws inputs itself and prints a hash of all streams, words and
 * verdicts: tools/test_aarch64.sh compares that of two machines. */
#include "kvmnn/linear/linear.h"
#include "kvmnn/transform/transform.h"

#include <stdio.h>
#include <stdlib.h>

#include "kvmnn/simd.h"

enum { OPTIONS = 8, PATCHES = 4, HEAD_BYTES = OPTIONS + 3 * PATCHES, SIDES = 4, MAX_TOKENS = 40 };

static enum { LINEAR, TRANSFORM } target;
static unsigned long long num_decoded;

static void print_count(void) { fprintf(stderr, "stat::decoded_streams: %llu\n", num_decoded); }

static void die(const char *what) {
    fprintf(stderr, "FOUND: %s\n", what);
    abort();
}

static uint64_t hash = 14695981039346656037u; /* FNV-1a */

static void add_to_hash(const void *data, size_t size) {
#ifdef KVMNN_PRINT_HASH
    for (const uint8_t *byte = data; size; --size) hash = (hash ^ *byte++) * 1099511628211u;
#else
    (void)data, (void)size, (void)hash;
#endif
}

static uint32_t draw(uint32_t *seed) { /* of xorshift */
    *seed ^= *seed << 13;
    *seed ^= *seed >> 17;
    return *seed ^= *seed << 5;
}

static int32_t draw_between(uint32_t *seed, int32_t low, int32_t high) {
    return low + (int32_t)(draw(seed) % (uint32_t)(high - low + 1));
}

static void apply_patches(const uint8_t *patches, uint8_t *bytes, size_t size) {
    for (int i = 0; i < PATCHES && size; ++i)
        bytes[(patches[3 * i] | (size_t)patches[3 * i + 1] << 8) % size] ^= patches[3 * i + 2];
}

/* -- linear streams ------------------------------------------------------------------------------------------------ */

static linear_side sides[SIDES];
static int16_t *regressors;

static int decode_linear(int level, const linear_job *job, const uint8_t *data, size_t size, void *scratch, void *words) {
    ++num_decoded;
    return linear_kernels_at(level)->decode(job, data, size, scratch, words);
}

/* A side with tables at random, small or at their limits. */
static void make_side(linear_side *side, uint32_t seed, uint32_t n, uint32_t head_dim, uint32_t rotated, uint32_t m,
                      int is_extreme) {
    int32_t *order = malloc(n * sizeof *order), *means = malloc(n * 4), *deviations = malloc(n * 4);
    int32_t *sigmas = malloc(n * 4), *base_factors = malloc(n * 4), *chain_factors = malloc(n * 4);
    int16_t *exponents = malloc(n), *correlations = malloc(n);
    uint64_t *frequencies = malloc((rotated / 2 + 1) * sizeof *frequencies);
    int8_t *base = malloc(n * m + 1), *chain = malloc(n * n);
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t head = i / head_dim * head_dim, in_head = i % head_dim;
        order[i] = (int32_t)(in_head < rotated ? head + in_head / 2 + in_head % 2 * (rotated / 2) : i);
        means[i] = is_extreme ? draw_between(&seed, -(1 << 30) + 1, (1 << 30) - 1) : draw_between(&seed, -99999, 99999);
        deviations[i] = is_extreme ? draw_between(&seed, 1024, 1 << 30) : draw_between(&seed, 100000, 400000);
        sigmas[i] = is_extreme ? draw_between(&seed, 256, (1 << 18) - 1) : draw_between(&seed, 130000, 262143);
        base_factors[i] = is_extreme ? (int32_t)draw(&seed) : draw_between(&seed, -300000, 300000);
        chain_factors[i] = is_extreme ? (int32_t)draw(&seed) : draw_between(&seed, -300000, 300000);
    }
    for (uint32_t i = 0; i < n / 2; ++i) {
        exponents[i] = (int16_t)(is_extreme ? draw_between(&seed, -1024, 1024) : draw_between(&seed, 12, 20));
        correlations[i] = (int16_t)draw_between(&seed, -16384, 16384);
    }
    for (uint32_t i = 0; i < rotated / 2; ++i) frequencies[i] = (uint64_t)draw(&seed) << 32 | draw(&seed);
    for (uint32_t i = 0; i < n * m; ++i) base[i] = (int8_t)draw(&seed);
    for (uint32_t i = 0; i < n * (n - 2) / 2; ++i) chain[i] = (int8_t)draw(&seed);
    side->shape = (linear_shape){n, head_dim, rotated, order, frequencies};
    side->scales = (linear_scales){exponents, means, deviations};
    side->regressors = m;
    side->sigmas = sigmas, side->correlations = correlations;
    side->base_factors = base_factors, side->chain_factors = chain_factors;
    side->base_weights = malloc((n * m + 1) * sizeof(int16_t));
    side->chain_weights = malloc(n * n * sizeof(int16_t));
    side->angles = malloc(n / 2 * sizeof *side->angles);
    linear_prepare(side, base, chain);
    free(base), free(chain);
}

static int is_supported[KVMNN_NUM_ISAS];

/* Whether a level is not tried: all are for 0, the fastest one for 4 to 7. */
static int is_left_out(int level, int only) {
    int chosen = only > 3 ? KVMNN_NUM_ISAS - 1 : only - 1;
    while (only && !is_supported[chosen]) --chosen;
    return !is_supported[level] || (only && level != chosen);
}

static void run_linear(const uint8_t *options, const uint8_t *patches, const uint8_t *data, size_t size) {
    const linear_side *side = &sides[options[1] & 15 ? options[1] % 3 : 3];
    const int dtype = options[2] % 3, only = options[0] >> 1 & 7;
    const int max_tokens = options[1] & 16 && side != &sides[3] ? MAX_TOKENS : 18; /* few words, for many executions */
    const size_t n = side->shape.elements, tokens = 1 + options[3] % max_tokens, word_bytes = dtype == 2 ? 4 : 2;
    const size_t bytes = tokens * n * word_bytes;
    int64_t positions[MAX_TOKENS];
    int32_t selection[MAX_TOKENS];
    uint8_t *is_constant = NULL;
    for (size_t t = 0; t < tokens; ++t) {
        positions[t] = (int64_t)t * (1 + options[4] % 5) + (options[4] >> 4 << 20);
        selection[t] = (int32_t)((t * 7 + options[5]) % (MAX_TOKENS + 1)) - 1;
    }
    linear_block block = {regressors, side->regressors, options[5] & 1 ? selection : NULL};
    if (options[6] & 1) {
        is_constant = calloc(n, 1);
        is_constant[options[5] % n] = 1;
    }
    linear_job job = {side, &linear_dtypes[dtype], positions, tokens, &block, side->regressors ? 1 : 0, is_constant};
    void *scratch = malloc(linear_scratch_bytes(side));
    uint8_t *words = calloc(1, bytes), *back = malloc(bytes), *other = malloc(bytes);
    const size_t count = linear_count_symbols(job.dtype, tokens * n), capacity = 4 * count + 8 * LANES;
    uint8_t *stream = malloc(capacity), *first = malloc(capacity);
    size_t first_size = 0;
    if (options[0] & 1) {
        first_size = size < capacity ? size : capacity;
        memcpy(first, data, first_size);
    } else {
        linear_symbol *symbols = malloc(count * sizeof *symbols);
        if (options[6] & 4) { /* words as the tables foresee them, but for some: few guesses of the decoder are wrong */
            uint32_t seed = 1u + options[7];
            for (size_t i = 0; i < capacity / 4; ++i) {
                const uint32_t unit = draw(&seed);
                memcpy(stream + 4 * i, &unit, 4);
            }
            (void)decode_linear(KVMNN_BASELINE, &job, stream, capacity, scratch, words);
            for (size_t i = 0; i + 2 < size; i += 3) words[(data[i] | (size_t)data[i + 1] << 8) % bytes] ^= data[i + 2];
        } else
            for (size_t i = 0; i < bytes && size; ++i) words[i] = data[i % size];
        for (size_t t = 0; t < tokens && is_constant; ++t)
            memset(words + (t * n + options[5] % n) * word_bytes, 0, word_bytes);
        for (int level = 0; level < KVMNN_NUM_ISAS; ++level) {
            if (is_left_out(level, only)) continue;
            const linear_kernels *kernels = linear_kernels_at(level);
            const size_t made = kernels->model(&job, words, scratch, symbols);
            const size_t begin = kernels->write(symbols, made, tokens, dtype == 2, stream, capacity);
            if (!first_size)
                first_size = capacity - begin, memcpy(first, stream + begin, first_size);
            else if (capacity - begin != first_size || memcmp(first, stream + begin, first_size) != 0)
                die("other bytes at another SIMD level");
            memset(back, 0, bytes);
            if (!decode_linear(level, &job, first, first_size, scratch, back)) die("a stream of the encoder is refused");
            if (memcmp(back, words, bytes) != 0) die("other words");
        }
        free(symbols);
    }
    if (options[6] & 2) { /* what the layers above are predicted from */
        int16_t *rows = malloc(tokens * n * sizeof *rows), *expected = malloc(tokens * n * sizeof *rows);
        for (int level = 0; level < KVMNN_NUM_ISAS; ++level) {
            if (!is_supported[level]) continue;
            linear_kernels_at(level)->regressors(&side->shape, &side->scales, job.dtype, words, positions, tokens, scratch,
                                                 level ? rows : expected);
            if (level && memcmp(rows, expected, tokens * n * sizeof *rows) != 0) die("other regressors");
        }
        add_to_hash(expected, tokens * n * sizeof *expected);
        free(rows), free(expected);
    }
    add_to_hash(first, first_size);
    apply_patches(patches, first, first_size);
    uint8_t *exact = malloc(first_size + 1); /* so that reading beyond its end is seen */
    memcpy(exact, first, first_size);
    int was_taken = -1;
    for (int level = 0; level < KVMNN_NUM_ISAS; ++level) {
        if (is_left_out(level, only)) continue;
        memset(back, 0, bytes);
        const int is_taken = decode_linear(level, &job, exact, first_size, scratch, back);
        if (was_taken < 0)
            was_taken = is_taken, memcpy(other, back, bytes);
        else if (is_taken != was_taken || (is_taken && memcmp(back, other, bytes) != 0))
            die("another SIMD level decodes a damaged stream to something else");
    }
    add_to_hash(&was_taken, sizeof was_taken);
    if (was_taken) add_to_hash(other, bytes);
    free(exact), free(is_constant), free(scratch), free(words), free(back), free(other), free(stream), free(first);
}

/* -- transform streams --------------------------------------------------------------------------------------------- */

static uint16_t tables[TRANSFORM_TABLES][TRANSFORM_SYMBOLS];

static void make_tables(void) {
    for (int i = 0; i < TRANSFORM_TABLES; ++i) { /* the wider the later, as the profile's are */
        const int width = 1 + i / 2 < TRANSFORM_CENTRE ? 1 + i / 2 : TRANSFORM_CENTRE;
        int sum = 0;
        for (int s = TRANSFORM_CENTRE - width; s <= TRANSFORM_CENTRE + width; ++s)
            sum += tables[i][s] = (uint16_t)(4000 / (2 * width + 1));
        tables[i][TRANSFORM_SYMBOLS - 1] = 1 + i % 3;
        tables[i][TRANSFORM_CENTRE] = (uint16_t)(tables[i][TRANSFORM_CENTRE] + 4096 - sum - (1 + i % 3));
    }
    if (!kvmnn_transform_tables_are_valid(&tables[0][0])) die("tables");
}

static void run_transform(const uint8_t *options, const uint8_t *patches, const uint8_t *data, size_t size) {
    enum { MAX_N = 12 };
    static uint8_t scratch[TRANSFORM_TABLES << (TRANSFORM_SCALE_BITS + 2)];
    const size_t rows = options[1] >= 250 ? options[1] + 8u : 1 + options[1] % 24;
    const size_t n = 1 + options[2] % (options[6] & 8 ? MAX_N : 3);
    int64_t *places = malloc(rows * sizeof *places);
    int32_t levels[MAX_N];
    int8_t *exponents = options[3] & 1 ? malloc(rows) : NULL;
    uint32_t seed = 1u + options[4] + 256u * options[5];
    for (size_t t = 0; t < rows; ++t) {
        places[t] = (int64_t)(rows - 1 - t);
        if (exponents) exponents[t] = (int8_t)draw_between(&seed, -16, 15);
    }
    for (size_t i = 0; i < n; ++i) levels[i] = draw_between(&seed, -40, options[6] & 1 ? 200 : 60);
    transform_side side = {rows, n, places, levels, exponents, &tables[0][0]};
    const size_t count = rows * n, capacity = kvmnn_transform_encode_capacity(&side);
    int16_t *numbers = calloc(count + 1, sizeof *numbers), *back = calloc(count + 1, sizeof *back);
    uint8_t *units = NULL, *bits = NULL;
    size_t units_bytes, bits_bytes;
    if (options[0] & 1) {
        units_bytes = size / 4 * 3, bits_bytes = size - units_bytes;
        units = malloc(units_bytes + 1), bits = malloc(bits_bytes + 1);
        memcpy(units, data, units_bytes), memcpy(bits, data + units_bytes, bits_bytes);
    } else {
        uint8_t *room = malloc(kvmnn_transform_encode_scratch_bytes(&side)), *out = malloc(2 * capacity);
        for (size_t i = 0; i < count && size; ++i) {
            const int high = (int8_t)data[i % size];
            numbers[i] = (int16_t)(high == 127 ? 32767 : high == -128 ? -32768 : high >> (i % 6));
        }
        kvmnn_transform_encode(&side, numbers, room, out, out + capacity, capacity, &units_bytes, &bits_bytes);
        units = malloc(units_bytes + 1), bits = malloc(bits_bytes + 1);
        memcpy(units, out + capacity - units_bytes, units_bytes), memcpy(bits, out + capacity, bits_bytes);
        ++num_decoded;
        if (!kvmnn_transform_decode(&side, units, units_bytes, bits, bits_bytes, scratch, back))
            die("sections of the encoder are refused");
        if (memcmp(back, numbers, count * sizeof *back) != 0) die("other coefficients");
        free(room), free(out);
    }
    add_to_hash(units, units_bytes);
    add_to_hash(bits, bits_bytes);
    apply_patches(patches, units, units_bytes);
    if (options[6] & 2) apply_patches(patches, bits, bits_bytes);
    ++num_decoded;
    const int is_taken = kvmnn_transform_decode(&side, units, units_bytes - (units_bytes && (options[6] & 4)), bits,
                                                bits_bytes, scratch, back);
    add_to_hash(&is_taken, sizeof is_taken);
    if (is_taken) add_to_hash(back, count * sizeof *back);
    /* the same sums at all levels */
    const size_t depth = n / 2 * 2, columns = TRANSFORM_LANES * (1 + options[7] % 3);
    if (depth && rows <= 24 && options[7] & 128) {
        int16_t *packed = malloc(columns * depth * sizeof *packed);
        int32_t *sums = malloc(rows * columns * sizeof *sums), *expected = malloc(rows * columns * sizeof *sums);
        for (size_t i = 0; i < columns * depth; ++i) packed[i] = (int16_t)(draw(&seed) >> 8);
        for (int level = 0; level < KVMNN_NUM_ISAS; ++level) {
            if (!is_supported[level]) continue;
            kvmnn_transform_kernels_at(level)->multiply(back, n, rows, depth, packed, columns, level ? sums : expected,
                                                        columns);
            if (level && memcmp(sums, expected, rows * columns * sizeof *sums) != 0)
                die("other sums at another SIMD level");
        }
        add_to_hash(expected, rows * columns * sizeof *expected);
        free(packed), free(sums), free(expected);
    }
    free(places), free(exponents), free(numbers), free(back), free(units), free(bits);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    atexit(print_count);
    for (int level = 0; level < KVMNN_NUM_ISAS; ++level) is_supported[level] = kvmnn_simd_is_supported(level);
    const char *wanted = getenv("KVMNN_FUZZ");
    if (wanted && !strcmp(wanted, "linear")) target = LINEAR;
    else if (wanted && !strcmp(wanted, "transform")) target = TRANSFORM;
    else die("KVMNN_FUZZ: expected linear or transform");
    make_side(&sides[0], 1, 4, 4, 4, 0, 0);
    make_side(&sides[1], 2, 8, 4, 2, 6, 0);
    make_side(&sides[2], 3, 6, 6, 0, 10, 1);
    make_side(&sides[3], 4, 36, 36, 36, 34, 0);
    uint32_t seed = 5;
    regressors = malloc(MAX_TOKENS * 64 * sizeof *regressors);
    for (size_t i = 0; i < MAX_TOKENS * 64; ++i) regressors[i] = (int16_t)draw_between(&seed, -4095, 4095);
    make_tables();
    if (kvmnn_transform_decode_scratch_bytes() > TRANSFORM_TABLES << (TRANSFORM_SCALE_BITS + 2)) die("scratch");
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < HEAD_BYTES) return 0;
    if (target == LINEAR) run_linear(data, data + OPTIONS, data + HEAD_BYTES, size - HEAD_BYTES);
    else run_transform(data, data + OPTIONS, data + HEAD_BYTES, size - HEAD_BYTES);
    return 0;
}

#ifdef KVMNN_PRINT_HASH
int main(int argc, char **argv) {
    enum { NUM_INPUTS = 4000 };
    uint32_t seed = 77;
    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 0; i < NUM_INPUTS; ++i) {
        uint8_t input[400];
        const size_t size = 40 + draw(&seed) % 360;
        for (size_t k = 0; k < size; ++k) input[k] = (uint8_t)(draw(&seed) >> 9);
        if (i % 2) input[0] &= 0xfe; /* encoded, not decoded as it is */
        if (i % 4 == 1) input[6] |= 4;
        if (i % 3 == 0) memset(input + OPTIONS, 0, 3 * PATCHES);
        (void)LLVMFuzzerTestOneInput(input, size);
    }
    printf("%d inputs of %s streams: %016llx\n", NUM_INPUTS, target == LINEAR ? "linear" : "transform",
           (unsigned long long)hash);
    return 0;
}
#endif
