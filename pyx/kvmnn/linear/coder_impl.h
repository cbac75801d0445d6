/* The model of a row's words and the entropy decoder: compiled once per SIMD level. Every step is integer arithmetic,
 * but for the decoder's first guess at a word, which is checked. */

typedef struct {
    uint32_t masses[BUCKETS], starts[BUCKETS + 1];
    float slopes[BUCKETS], begins[BUCKETS]; /* for the decoder's guess */
} ISA_FN(mixture);

/* What is kept between groups and pairs. */
typedef struct {
    int16_t *regressors, *innovations; /* [pair of regressors][token][2], [pair][token][2] */
    int32_t *base;                     /* [place][token] */
    int32_t *cosines, *sines;          /* [pair of a head][token] */
    uint8_t *angles;                   /* [pair of a head][token] */
    int32_t *sums;                     /* of innovations, [place] */
    uint64_t (*counts)[SCALES];        /* of pairs */
    uint32_t *columns;                 /* words of a group, [element][token]; two of 16 bits share one of 32 */
    int32_t spread[GROUP];             /* of tokens, times 2^16 */
    int32_t num_bias_tokens, bias_factor;
} ISA_FN(state);

static const uint16_t ISA_FN(weights)[SCALES] = {164, 410, 1024, 1434, 819, 245};
static const uint16_t ISA_FN(least_weights)[SCALES] = {3, 8, 20, 29, 16, 4};

static inline int32_t ISA_FN(clamp)(int64_t x, int32_t limit) {
    return (int32_t)(x > limit ? limit : x < -(int64_t)limit ? -limit : x);
}

/* The magnitude of a word without its sign in units; `shift` is the exponent of units less bias and mantissa bits. */
static inline int32_t ISA_FN(to_units)(uint32_t magnitude, int mantissa_bits, int shift) {
    const uint32_t exponent = magnitude >> mantissa_bits, fraction = magnitude & ((1u << mantissa_bits) - 1);
    const uint32_t digits = exponent ? fraction | 1u << mantissa_bits : fraction;
    int places = (int)(exponent ? exponent : 1) + shift;
    if (places >= 0) {
        places = places > 30 ? 30 : places;
        return (int32_t)(digits > (uint32_t)UNIT_LIMIT >> places ? (uint32_t)UNIT_LIMIT : digits << places);
    }
    return (int32_t)(digits >> (places < -31 ? 31 : -places));
}

static inline int32_t ISA_FN(word_to_units)(const linear_dtype *dtype, uint32_t word, int exponent) {
    const int sign_bit = dtype->is_wide ? 31 : 15;
    const int32_t x = ISA_FN(to_units)(word & ((1u << sign_bit) - 1), dtype->mantissa_bits,
                                       exponent - dtype->bias - dtype->mantissa_bits);
    return word >> sign_bit ? -x : x;
}

static inline uint32_t ISA_FN(load_word)(const linear_dtype *dtype, const void *words, size_t i) {
    return dtype->is_wide ? ((const uint32_t *)words)[i] : ((const uint16_t *)words)[i];
}

static inline void ISA_FN(store_word)(const linear_dtype *dtype, void *words, size_t i, uint32_t word) {
    if (dtype->is_wide)
        ((uint32_t *)words)[i] = word;
    else
        ((uint16_t *)words)[i] = (uint16_t)word;
}

/* Cells in ascending order of the reals that they hold: that of a word, and the word of one (its lowest, if raw bits
 * follow). */
static inline uint32_t ISA_FN(to_rank)(const linear_dtype *dtype, uint32_t word) {
    const int sign_bit = dtype->is_wide ? 31 : 15;
    const uint32_t magnitude = (word & ((1u << sign_bit) - 1)) >> dtype->raw_bits;
    return word >> sign_bit ? dtype->half_ranks - 1 - magnitude : dtype->half_ranks + magnitude;
}

static inline uint32_t ISA_FN(to_word)(const linear_dtype *dtype, uint32_t rank, uint32_t raw) {
    const int sign_bit = dtype->is_wide ? 31 : 15;
    if (rank >= dtype->half_ranks) return (rank - dtype->half_ranks) << dtype->raw_bits | raw;
    return 1u << sign_bit | (dtype->half_ranks - 1 - rank) << dtype->raw_bits | raw;
}

/* The lower boundary of a cell. */
static inline int32_t ISA_FN(boundary)(const linear_dtype *dtype, uint32_t rank, int exponent) {
    const int32_t distance = (int32_t)rank - (int32_t)dtype->half_ranks;
    const uint32_t steps = (uint32_t)(distance < 0 ? -distance : distance);
    int32_t x;
    if (!steps) return 0;
    x = ISA_FN(to_units)(dtype->raw_bits ? steps : 2 * steps - 1, dtype->boundary_mantissa_bits,
                         exponent - dtype->bias - dtype->boundary_mantissa_bits);
    return distance < 0 ? -x : x;
}

/* Deviations from the centre, times 2^16. */
static inline int32_t ISA_FN(normalize)(int32_t x, int32_t center, int32_t inverse) {
    return ISA_FN(clamp)((int64_t)(x - center) * inverse >> 16, Z_LIMIT);
}

static inline int ISA_FN(find_bucket)(uint32_t distance) {
    int log;
    if (distance < 1 << 15) return (int)(distance >> 12);
#if defined(__GNUC__)
    log = 31 - __builtin_clz(distance);
#else
    for (log = 15; distance >> (log + 1); ++log) {}
#endif
    return 8 + (log - 15) * 4 + (int)(distance >> (log - 2) & 3);
}

static inline int ISA_FN(bucket_bits)(int bucket) { return bucket < 8 ? 12 : 13 + (bucket - 8) / 4; }

static inline uint32_t ISA_FN(bucket_begin)(int bucket) {
    return bucket < 8 ? (uint32_t)bucket << 12 : (uint32_t)(4 + (bucket & 3)) << (13 + (bucket - 8) / 4);
}

/* What lies below a cell, of 2^28. */
static inline uint32_t ISA_FN(cumulate)(const ISA_FN(mixture) *mixture, const linear_dtype *dtype, uint32_t rank,
                                        int exponent, int32_t center, int32_t inverse) {
    int32_t z;
    uint32_t distance, mass;
    int bucket;
    if (!rank) return 0;
    if (rank == 2 * dtype->half_ranks) return 1u << TOTAL_BITS;
    z = ISA_FN(normalize)(ISA_FN(boundary)(dtype, rank, exponent), center, inverse);
    distance = (uint32_t)(z < 0 ? -z : z);
    bucket = ISA_FN(find_bucket)(distance);
    mass = mixture->starts[bucket] +
           (uint32_t)((uint64_t)mixture->masses[bucket] * (distance - ISA_FN(bucket_begin)(bucket)) >>
                      ISA_FN(bucket_bits)(bucket));
    return (z < 0 ? HALF_MASS - mass : HALF_MASS + mass) + rank * dtype->floor;
}

/* -- sums of products ---------------------------------------------------------------------------------------------- */

/* out[row][token] = sum of vectors[i][token][0..1] * weights[row][2 i..2 i + 1], modulo 2^32, of 2 or 4 rows. */
static inline void ISA_FN(multiply)(const int16_t *vectors, const int16_t *weights, size_t stride, size_t pairs,
                                    int rows, int32_t *out) {
#if defined(ISA_AVX512)
    __m512i sums[4][2]; /* of even and of odd i: fewer products wait for one another */
    for (int row = 0; row < 4; ++row) sums[row][0] = sums[row][1] = _mm512_setzero_si512();
    for (size_t i = 0; i < pairs; ++i) {
        const __m512i v = _mm512_loadu_si512(vectors + 2 * GROUP * i);
        for (int row = 0; row < rows; ++row) {
            int32_t packed_pair;
            memcpy(&packed_pair, weights + row * stride + 2 * i, 4);
            sums[row][0] = _mm512_dpwssd_epi32(sums[row][0], v, _mm512_set1_epi32(packed_pair));
        }
        if (++i == pairs) break;
        const __m512i next = _mm512_loadu_si512(vectors + 2 * GROUP * i);
        for (int row = 0; row < rows; ++row) {
            int32_t packed_pair;
            memcpy(&packed_pair, weights + row * stride + 2 * i, 4);
            sums[row][1] = _mm512_dpwssd_epi32(sums[row][1], next, _mm512_set1_epi32(packed_pair));
        }
    }
    for (int row = 0; row < rows; ++row)
        _mm512_storeu_si512(out + GROUP * row, _mm512_add_epi32(sums[row][0], sums[row][1]));
#elif defined(ISA_F16C)
    __m256i low[4], high[4];
    for (int row = 0; row < 4; ++row) low[row] = high[row] = _mm256_setzero_si256();
    for (size_t i = 0; i < pairs; ++i) {
        const __m256i *at = (const __m256i *)(vectors + 2 * GROUP * i);
        const __m256i first = _mm256_loadu_si256(at), second = _mm256_loadu_si256(at + 1);
        for (int row = 0; row < rows; ++row) {
            int32_t packed_pair;
            memcpy(&packed_pair, weights + row * stride + 2 * i, 4);
            const __m256i w = _mm256_set1_epi32(packed_pair);
            low[row] = _mm256_add_epi32(low[row], _mm256_madd_epi16(first, w));
            high[row] = _mm256_add_epi32(high[row], _mm256_madd_epi16(second, w));
        }
    }
    for (int row = 0; row < rows; ++row) {
        _mm256_storeu_si256((__m256i *)(out + GROUP * row), low[row]);
        _mm256_storeu_si256((__m256i *)(out + GROUP * row + 8), high[row]);
    }
#else
    uint32_t sums[4][GROUP] = {{0}};
    for (size_t i = 0; i < pairs; ++i)
        for (int row = 0; row < rows; ++row)
            for (int t = 0; t < GROUP; ++t)
                sums[row][t] += (uint32_t)(vectors[2 * (GROUP * i + t)] * weights[row * stride + 2 * i] +
                                           vectors[2 * (GROUP * i + t) + 1] * weights[row * stride + 2 * i + 1]);
    memcpy(out, sums, (size_t)rows * sizeof sums[0]);
#endif
}

#if defined(ISA_F16C)
#include "products.h"
#endif
#if defined(ISA_AVX512)
#include "transpose512.h"
#endif

/* -- a group of tokens --------------------------------------------------------------------------------------------- */

static void ISA_FN(begin_side)(ISA_FN(state) *state, const linear_side *side, void *scratch) {
    const size_t n = side->shape.elements, half = side->shape.rotated_dims / 2;
    uint8_t *cursor = scratch;
    memset(state, 0, sizeof *state);
#define TAKE(field, bytes) state->field = (void *)cursor, cursor += ((size_t)(bytes) + 63) & ~(size_t)63
    TAKE(regressors, side->regressors * GROUP * sizeof(int16_t));
    TAKE(innovations, n * GROUP * sizeof(int16_t));
    TAKE(base, n * GROUP * sizeof(int32_t));
    TAKE(cosines, half * GROUP * sizeof(int32_t));
    TAKE(sines, half * GROUP * sizeof(int32_t));
    TAKE(angles, half * GROUP);
    TAKE(sums, n * sizeof(int32_t));
    TAKE(counts, n / 2 * sizeof *state->counts);
    TAKE(columns, n * GROUP * sizeof(uint32_t));
#undef TAKE
    memset(state->sums, 0, n * sizeof(int32_t));
    for (size_t pair = 0; pair < n / 2; ++pair)
        for (int j = 0; j < SCALES; ++j) state->counts[pair][j] = (uint64_t)ISA_FN(weights)[j] << 18;
}

static void ISA_FN(gather_regressors)(ISA_FN(state) *state, const linear_job *job, size_t begin, size_t tokens) {
    int16_t *out = state->regressors;
    for (uint32_t b = 0; b < job->num_blocks; ++b) {
        const linear_block *block = &job->blocks[b];
        const int16_t *from[GROUP];
        for (size_t t = 0; t < GROUP; ++t) {
            const int64_t at = block->selection ? block->selection[(begin + t) % job->tokens] : (int64_t)(begin + t);
            const int64_t row = t < tokens ? at : -1;
            from[t] = row < 0 ? NULL : block->rows + (size_t)row * block->elements;
        }
        size_t i = 0;
#if defined(ISA_AVX512)
        i = ISA_FN(gather512)(from, block->elements / 2, out);
#endif
        for (; i < block->elements / 2; ++i)
            for (size_t t = 0; t < GROUP; ++t) {
                int32_t packed_pair = 0;
                if (from[t]) memcpy(&packed_pair, from[t] + 2 * i, 4);
                memcpy(out + 2 * (GROUP * i + t), &packed_pair, 4);
            }
        out += (size_t)block->elements * GROUP;
    }
}

static void ISA_FN(begin_group)(ISA_FN(state) *state, const linear_job *job, size_t begin, size_t tokens) {
    const linear_side *side = job->side;
    const size_t n = side->shape.elements, m = side->regressors;
    ISA_FN(gather_regressors)(state, job, begin, tokens);
    for (size_t place = 0; place < n; place += 4) {
        int32_t *out = state->base + place * GROUP;
        const int rows = n - place >= 4 ? 4 : 2;
        if (rows == 4)
            ISA_FN(multiply)(state->regressors, side->base_weights + place * m, m, m / 2, 4, out);
        else
            ISA_FN(multiply)(state->regressors, side->base_weights + place * m, m, m / 2, 2, out);
        for (int row = 0; row < rows; ++row) {
            const int64_t factor = side->base_factors[place + row], mean = side->scales.means[place + row];
#if defined(ISA_F16C)
            for (int t = 0; t < GROUP; t += 8)
                STORE_LANES(out + row * GROUP + t, ISA_FN(scale8)(_mm256_set1_epi32((int32_t)mean),
                                                                  out + row * GROUP + t, (int32_t)factor));
#else
            for (int t = 0; t < GROUP; ++t)
                out[row * GROUP + t] =
                    ISA_FN(clamp)(mean + ((out[row * GROUP + t] * factor + (1 << 15)) >> 16), CENTER_LIMIT);
#endif
        }
    }
#if defined(ISA_AVX512)
    int64_t positions[GROUP] = {0};
    memcpy(positions, job->positions + begin, tokens * sizeof *positions);
    for (size_t i = 0; i < side->shape.rotated_dims / 2; ++i)
        compute_group_rotations512(positions, side->shape.frequencies[i], state->cosines + i * GROUP,
                                   state->sines + i * GROUP, state->angles + i * GROUP);
#else
    for (size_t i = 0; i < side->shape.rotated_dims / 2; ++i)
        for (size_t t = 0; t < GROUP; ++t) {
            const size_t at = i * GROUP + t;
            const uint64_t angle =
                t < tokens ? (uint64_t)job->positions[begin + t] * side->shape.frequencies[i] : 0;
            linear_compute_rotation(angle, &state->cosines[at], &state->sines[at]);
            state->angles[at] = (uint8_t)((angle + ((uint64_t)1 << 56)) >> 57 & (ANGLES - 1));
        }
#endif
    for (int t = 0; t < GROUP; ++t) state->spread[t] = 1 << 16;
    state->bias_factor = (1 << 20) / (state->num_bias_tokens + 30);
}

static void ISA_FN(end_group)(ISA_FN(state) *state) {
    state->num_bias_tokens += GROUP - (state->num_bias_tokens >> 2);
}

/* Centres of a pair's words, and what follows from them. */
typedef struct {
    int32_t predictions[2][GROUP]; /* un-rotated, without the bias */
    int32_t centers[2][GROUP], inverses[2][GROUP], slopes[GROUP];
    const int32_t *cosines, *sines; /* NULL where the pair is not rotated */
    ISA_FN(mixture) mixture;
} ISA_FN(pair);

static void ISA_FN(mix)(ISA_FN(mixture) *mixture, const uint64_t counts[SCALES], uint32_t weights[SCALES]) {
    uint64_t total = 0, factor;
    uint32_t start = 0;
    for (int j = 0; j < SCALES; ++j) total += counts[j];
    factor = ((uint64_t)4016 << 40) / total;
    for (int j = 0; j < SCALES; ++j) weights[j] = (uint32_t)(counts[j] * factor >> 40) + ISA_FN(least_weights)[j];
    for (int k = 0; k < BUCKETS; ++k) {
        uint32_t mass = 0;
        for (int j = 0; j < SCALES; ++j) mass += weights[j] * linear_masses[j][k];
        mixture->masses[k] = mass;
    }
    for (int k = 0; k < BUCKETS; ++k) {
        mixture->starts[k] = start;
        start += mixture->masses[k];
    }
    mixture->starts[BUCKETS] = start;
#if defined(ISA_F16C)
    for (int k = 0; k < BUCKETS; ++k) {
        mixture->slopes[k] = (float)(1 << ISA_FN(bucket_bits)(k)) / ((float)(int32_t)mixture->masses[k] + 0.5f);
        mixture->begins[k] = (float)(int32_t)ISA_FN(bucket_begin)(k);
    }
#endif
}

#if defined(ISA_F16C)
#include "vectors.h"
#endif

static void ISA_FN(predict)(ISA_FN(state) *state, const linear_job *job, size_t p, ISA_FN(pair) *pair) {
    const linear_side *side = job->side;
    const size_t n = side->shape.elements, pair_in_head = 2 * p % side->shape.head_dim / 2;
    int32_t sums[2 * GROUP], biases[2];
    ISA_FN(multiply)(state->innovations, side->chain_weights + 2 * p * n, n, p, 2, sums);
    for (size_t row = 0; row < 2; ++row) {
        const int64_t mean = state->sums[2 * p + row] * state->bias_factor >> 8;
        biases[row] = (int32_t)(mean * side->sigmas[2 * p + row] >> 20);
    }
    pair->cosines = pair->sines = NULL;
    if (2 * pair_in_head < side->shape.rotated_dims) {
        pair->cosines = state->cosines + pair_in_head * GROUP;
        pair->sines = state->sines + pair_in_head * GROUP;
    }
#if defined(ISA_F16C)
    ISA_FN(predict8)(state, side, p, pair_in_head, 0, sums, biases, pair);
    ISA_FN(predict8)(state, side, p, pair_in_head, 8, sums, biases, pair);
#else
    for (int row = 0; row < 2; ++row) {
        const int64_t factor = side->chain_factors[2 * p + row];
        const int32_t *base = state->base + (2 * p + row) * GROUP;
        for (int t = 0; t < GROUP; ++t) {
            const int64_t step = (sums[row * GROUP + t] * factor + (1 << 15)) >> 16;
            pair->predictions[row][t] = ISA_FN(clamp)(base[t] + step, CENTER_LIMIT);
            pair->centers[row][t] = ISA_FN(clamp)((int64_t)pair->predictions[row][t] + biases[row], CENTER_LIMIT);
        }
    }
    for (int t = 0; t < GROUP; ++t) {
        const int32_t *row = side->angles[p][pair->cosines ? state->angles[pair_in_head * GROUP + t] : 0];
        const int64_t inverse_spread = (int64_t)(((uint64_t)1 << 32) / (uint32_t)state->spread[t]);
        if (pair->cosines) {
            const int64_t a = pair->centers[0][t], b = pair->centers[1][t], c = pair->cosines[t], s = pair->sines[t];
            pair->centers[0][t] = ISA_FN(clamp)((a * c - b * s + (1 << 29)) >> 30, CENTER_LIMIT);
            pair->centers[1][t] = ISA_FN(clamp)((b * c + a * s + (1 << 29)) >> 30, CENTER_LIMIT);
        }
        pair->inverses[0][t] = (int32_t)(row[0] * inverse_spread >> 16);
        pair->slopes[t] = row[1];
        pair->inverses[1][t] = (int32_t)(row[2] * inverse_spread >> 16);
    }
#endif
}

/* The second word's centre, given the first one. */
static inline int32_t ISA_FN(shift_center)(const ISA_FN(pair) *pair, int t, int32_t first) {
    const int64_t residual = ISA_FN(clamp)((int64_t)first - pair->centers[0][t], 1 << 21);
    return ISA_FN(clamp)(pair->centers[1][t] + (residual * pair->slopes[t] >> 14), CENTER_LIMIT);
}

/* What is learned of a pair: innovations, bias, spread of tokens, weights. */
static void ISA_FN(learn)(ISA_FN(state) *state, const linear_job *job, size_t p, const ISA_FN(pair) *pair,
                          size_t tokens, int32_t units[2][GROUP], int is_constant, const uint32_t weights[SCALES]) {
    const linear_side *side = job->side;
    int16_t *innovations = state->innovations + 2 * p * GROUP;
    int64_t inverse[2];
    uint32_t histogram[BUCKETS] = {0};
    for (int row = 0; row < 2; ++row) inverse[row] = ((int64_t)1 << 32) / side->sigmas[2 * p + row];
#if defined(ISA_F16C)
    ISA_FN(innovate8)(pair, 0, inverse, units, innovations);
    ISA_FN(innovate8)(pair, 8, inverse, units, innovations);
#else
    for (int t = 0; t < GROUP; ++t) {
        int64_t a = units[0][t], b = units[1][t];
        if (pair->cosines) {
            const int64_t c = pair->cosines[t], s = pair->sines[t], x = a;
            a = (x * c + b * s + (1 << 29)) >> 30;
            b = (b * c - x * s + (1 << 29)) >> 30;
        }
        a = (int32_t)ISA_FN(clamp)(a - pair->predictions[0][t], UNIT_LIMIT) * inverse[0];
        b = (int32_t)ISA_FN(clamp)(b - pair->predictions[1][t], UNIT_LIMIT) * inverse[1];
        innovations[2 * t] = (int16_t)ISA_FN(clamp)((a + (1 << 23)) >> 24, REGRESSOR_LIMIT);
        innovations[2 * t + 1] = (int16_t)ISA_FN(clamp)((b + (1 << 23)) >> 24, REGRESSOR_LIMIT);
    }
#endif
    int32_t totals[2] = {0, 0};
#if defined(ISA_F16C)
    if (tokens == GROUP)
        ISA_FN(sum_innovations)(innovations, totals);
    else
#endif
        for (size_t t = 0; t < tokens; ++t)
            for (int row = 0; row < 2; ++row) totals[row] += ISA_FN(clamp)(innovations[2 * t + row], 1024);
    for (int row = 0; row < 2; ++row) state->sums[2 * p + row] += totals[row] - (state->sums[2 * p + row] >> 2);
    if (is_constant) return;
    size_t first = 0;
#if defined(ISA_F16C)
    for (; first + 8 <= tokens; first += 8) ISA_FN(measure8)(state, pair, (int)first, units, histogram);
#endif
    for (size_t t = first; t < tokens; ++t) {
        int32_t sum = 0;
        for (int row = 0; row < 2; ++row) {
            const int32_t z = ISA_FN(normalize)(units[row][t], pair->centers[row][t], pair->inverses[row][t]);
            const int32_t distance = z < 0 ? -z : z;
            histogram[ISA_FN(find_bucket)((uint32_t)distance)]++;
            sum += distance > 1 << 18 ? 1 << 18 : distance;
        }
        state->spread[t] += (state->spread[t] * (5 * (sum >> 9) - 1024)) >> 15;
        if (state->spread[t] < 26214) state->spread[t] = 26214;
        if (state->spread[t] > 196608) state->spread[t] = 196608;
    }
    uint64_t gains[SCALES] = {0};
    for (int k = 0; k < BUCKETS; ++k) {
        const uint32_t mass = pair->mixture.masses[k];
        uint32_t digits = 0;
        uint64_t reciprocal;
        if (!histogram[k] || !mass) continue;
#if defined(__GNUC__)
        digits = 32 - (uint32_t)__builtin_clz(mass);
#else
        while (mass >> digits) ++digits;
#endif
        reciprocal = linear_reciprocals[(digits > 8 ? mass >> (digits - 8) : mass << (8 - digits)) & 127];
        reciprocal = digits <= 25 ? reciprocal << (25 - digits) : reciprocal >> (digits - 25);
        for (int j = 0; j < SCALES; ++j) gains[j] += histogram[k] * linear_masses[j][k] * reciprocal;
    }
    for (int j = 0; j < SCALES; ++j)
        state->counts[p][j] = (state->counts[p][j] * 29 >> 5) + (gains[j] >> 16) * weights[j] + 1;
}

static inline linear_symbol ISA_FN(raw_symbol)(const linear_dtype *dtype, uint32_t word) {
    const int places = TOTAL_BITS - dtype->raw_bits;
    return (linear_symbol){(word & ((1u << dtype->raw_bits) - 1)) << places, 1u << places};
}

#if defined(ISA_AVX512)
static linear_symbol *ISA_FN(model_group)(ISA_FN(state) *state, const linear_job *job, const void *words,
                                          linear_symbol *symbols);
#endif

static size_t ISA_FN(model)(const linear_job *job, const void *words, void *scratch, linear_symbol *symbols) {
    const linear_side *side = job->side;
    const linear_dtype *dtype = job->dtype;
    const size_t n = side->shape.elements;
    const uint32_t raw_mask = (1u << dtype->raw_bits) - 1;
    size_t count = 0;
    ISA_FN(state) state;
    ISA_FN(pair) pair;
    uint32_t weights[SCALES];
    int32_t units[2][GROUP] = {{0}};
    ISA_FN(begin_side)(&state, side, scratch);
    for (size_t begin = 0; begin < job->tokens; begin += GROUP) {
        const size_t tokens = job->tokens - begin < GROUP ? job->tokens - begin : GROUP;
        ISA_FN(begin_group)(&state, job, begin, tokens);
#if defined(ISA_AVX512)
        if (tokens == GROUP) {
            const uint8_t *row = (const uint8_t *)words + begin * n * (dtype->is_wide ? 4 : 2);
            count = (size_t)(ISA_FN(model_group)(&state, job, row, symbols + count) - symbols);
            ISA_FN(end_group)(&state);
            continue;
        }
#endif
        for (size_t p = 0; p < n / 2; ++p) {
            const int exponent = side->scales.exponents[p];
            int is_constant = 0;
            ISA_FN(predict)(&state, job, p, &pair);
            ISA_FN(mix)(&pair.mixture, state.counts[p], weights);
            for (int row = 0; row < 2; ++row) {
                const int32_t element = side->shape.order[2 * p + row];
                const int is_fixed = job->is_constant && job->is_constant[element];
                size_t first = 0;
                is_constant |= is_fixed;
#if defined(ISA_F16C)
                for (; !is_fixed && first + 8 <= tokens; first += 8) {
                    const __m256i at = ISA_FN(load_words8)(dtype, words, (begin + first) * n + (size_t)element, n);
                    const __m256i x = ISA_FN(words_to_units8)(dtype, at, exponent);
                    const __m256i inverses = LANES_OF(pair.inverses[row] + first);
                    if (row)
                        STORE_LANES(pair.centers[1] + first,
                                    ISA_FN(shift_centers8)(&pair, (int)first, LANES_OF(units[0] + first)));
                    STORE_LANES(units[row] + first, x);
                    const __m256i centers = LANES_OF(pair.centers[row] + first), ranks = ISA_FN(to_ranks8)(dtype, at);
                    const __m256i start = ISA_FN(cumulate8)(&pair.mixture, dtype, ranks, exponent, centers, inverses);
                    const __m256i next = _mm256_add_epi32(ranks, _mm256_set1_epi32(1));
                    const __m256i end = ISA_FN(cumulate8)(&pair.mixture, dtype, next, exponent, centers, inverses);
                    const __m256i size = _mm256_sub_epi32(end, start);
                    const __m256i low = _mm256_unpacklo_epi32(start, size), high = _mm256_unpackhi_epi32(start, size);
                    linear_symbol both[8];
                    uint32_t lane_words[8];
                    STORE_LANES(both, _mm256_permute2x128_si256(low, high, 0x20));
                    STORE_LANES(both + 4, _mm256_permute2x128_si256(low, high, 0x31));
                    STORE_LANES(lane_words, at);
                    for (int i = 0; i < 8; ++i) {
                        symbols[count++] = both[i];
                        if (raw_mask) symbols[count++] = ISA_FN(raw_symbol)(dtype, lane_words[i]);
                    }
                }
#endif
                for (size_t t = first; t < tokens; ++t) {
                    const uint32_t word = ISA_FN(load_word)(dtype, words, (begin + t) * n + (size_t)element);
                    units[row][t] = ISA_FN(word_to_units)(dtype, word, exponent);
                    if (row) pair.centers[1][t] = ISA_FN(shift_center)(&pair, (int)t, units[0][t]);
                    if (is_fixed) continue;
                    const uint32_t rank = ISA_FN(to_rank)(dtype, word);
                    const int32_t center = pair.centers[row][t], inverse = pair.inverses[row][t];
                    const uint32_t start = ISA_FN(cumulate)(&pair.mixture, dtype, rank, exponent, center, inverse);
                    const uint32_t end = ISA_FN(cumulate)(&pair.mixture, dtype, rank + 1, exponent, center, inverse);
                    symbols[count++] = (linear_symbol){start, end - start};
                    if (raw_mask) symbols[count++] = ISA_FN(raw_symbol)(dtype, word);
                }
            }
            ISA_FN(learn)(&state, job, p, &pair, tokens, units, is_constant, weights);
        }
        ISA_FN(end_group)(&state);
    }
    return count;
}

/* -- decoding ------------------------------------------------------------------------------------------------------ */

/* Where the real `x`, in units, may lie. */
static inline uint32_t ISA_FN(guess_rank)(const linear_dtype *dtype, float x, int exponent) {
    const float size = x < 0 ? -x : x;
    uint32_t bits, steps;
    int shift;
    memcpy(&bits, &size, 4);
    shift = (int)(bits >> 23) - 127 - exponent + dtype->bias; /* the exponent of the word */
    const int mantissa_bits = dtype->raw_bits ? dtype->mantissa_bits - dtype->raw_bits : dtype->mantissa_bits;
    if (bits >> 23 == 0 || shift < -30)
        steps = 0;
    else if (shift >= 1)
        steps = shift > 511 ? dtype->half_ranks - 1
                            : ((uint32_t)shift << mantissa_bits) +
                                  (((bits & 0x7fffff) + (dtype->raw_bits ? 0 : 1u << (22 - mantissa_bits))) >>
                                   (23 - mantissa_bits));
    else
        steps = ((bits & 0x7fffff) | 0x800000) >> (8 - mantissa_bits - shift > 15 ? 31 : 24 - mantissa_bits - shift);
    if (steps > dtype->half_ranks - 1) steps = dtype->half_ranks - 1;
    return x < 0 ? dtype->half_ranks - 1 - steps : dtype->half_ranks + steps;
}

/* The cell in which `target`, of 2^28, lies, sought from `rank` on. Most guesses are wrong by one. Others get to where the
 * mass that is missing would be, were the mixture as dense as here, less the floors on the way; close to 0, where cells
 * are thinner than their floors, that converges and steps of ranks do not. */
static inline uint32_t ISA_FN(seek_cell)(const ISA_FN(mixture) *mixture, const linear_dtype *dtype, uint32_t target,
                                         int exponent, int32_t center, int32_t inverse, uint32_t rank,
                                         linear_symbol *symbol) {
    uint32_t low = 0, high = 2 * dtype->half_ranks - 1; /* the cell is one of these */
    uint32_t start = ISA_FN(cumulate)(mixture, dtype, rank, exponent, center, inverse);
    uint32_t end = ISA_FN(cumulate)(mixture, dtype, rank + 1, exponent, center, inverse);
    for (int tries = 0; target < start || target >= end; ++tries) {
        const int is_above = target >= end;
        const uint32_t size = end - start;
        uint32_t next;
        if (is_above)
            low = rank + 1;
        else
            high = rank - 1;
        if ((is_above ? target - end : start - target) < size)
            next = is_above ? low : high;
        else if (tries % 4 == 3)
            next = low + (high - low) / 2;
        else {
            const int32_t boundary = ISA_FN(boundary)(dtype, rank, exponent);
            const int32_t z = ISA_FN(normalize)(boundary, center, inverse);
            const int bucket = ISA_FN(find_bucket)((uint32_t)(z < 0 ? -z : z));
            const float width = 65536.0f * (float)(int32_t)(1u << ISA_FN(bucket_bits)(bucket));
            const float unit = width / (((float)(int32_t)mixture->masses[bucket] + 0.5f) * (float)inverse);
            const float near = (float)boundary, mass = (float)((int32_t)target - (int32_t)start);
            next = ISA_FN(guess_rank)(dtype, near + mass * unit, exponent);
            const float floors = (float)(((int32_t)next - (int32_t)rank) * (int32_t)dtype->floor);
            next = ISA_FN(guess_rank)(dtype, near + (mass - floors) * unit, exponent);
        }
        next = next < low ? low : next > high ? high : next;
        const uint32_t old_start = start;
        start = next == rank + 1 ? end : ISA_FN(cumulate)(mixture, dtype, next, exponent, center, inverse);
        end = next + 1 == rank ? old_start : ISA_FN(cumulate)(mixture, dtype, next + 1, exponent, center, inverse);
        rank = next;
    }
    *symbol = (linear_symbol){start, end - start};
    return rank;
}

/* The same from the center on: once for its floor, then for the guess's own. */
static inline uint32_t ISA_FN(find_cell)(const ISA_FN(mixture) *mixture, const linear_dtype *dtype, uint32_t target,
                                         int exponent, int32_t center, int32_t inverse, linear_symbol *symbol) {
    uint32_t rank = ISA_FN(guess_rank)(dtype, (float)center, exponent);
    const int64_t mass = (int64_t)target - (int64_t)rank * dtype->floor - HALF_MASS;
    const uint32_t size = (uint32_t)(mass < 0 ? -mass : mass);
    int bucket = 0;
    for (int half = BUCKETS / 2; half; half /= 2)
        if (mixture->starts[bucket + half] <= size) bucket += half;
    float distance = (float)(int32_t)ISA_FN(bucket_begin)(bucket);
    if (mixture->masses[bucket])
        distance += (float)(int32_t)(size - mixture->starts[bucket]) *
                    (float)(int32_t)(1u << ISA_FN(bucket_bits)(bucket)) / (float)(int32_t)mixture->masses[bucket];
    distance = distance * 65536.0f / (float)inverse;
    rank = ISA_FN(guess_rank)(dtype, (float)center + (mass < 0 ? -distance : distance), exponent);
    return ISA_FN(seek_cell)(mixture, dtype, target, exponent, center, inverse, rank, symbol);
}

typedef struct {
    uint64_t states[LANES];
    const uint8_t *cursor, *end;
    int is_short;
} ISA_FN(reader);

static inline uint64_t ISA_FN(advance)(ISA_FN(reader) *reader, uint64_t x, linear_symbol symbol) {
    x = (x >> TOTAL_BITS) * symbol.size + (x & ((1u << TOTAL_BITS) - 1)) - symbol.start;
    const int is_small = x < (uint64_t)1 << 32;
    uint32_t unit = 0;
    if (reader->end - reader->cursor >= 4) { /* without a branch: whether a unit follows cannot be foreseen */
        memcpy(&unit, reader->cursor, 4);
        reader->cursor += 4 * is_small;
    } else
        reader->is_short |= is_small;
    return is_small ? x << 32 | unit : x;
}

/* The state after the raw bits of a word. */
static inline uint64_t ISA_FN(take_raw)(ISA_FN(reader) *reader, const linear_dtype *dtype, uint64_t x, uint32_t *raw) {
    const int places = TOTAL_BITS - dtype->raw_bits;
    *raw = ((uint32_t)x & ((1u << TOTAL_BITS) - 1)) >> places;
    return ISA_FN(advance)(reader, x, (linear_symbol){*raw << places, 1u << places});
}

#if defined(ISA_AVX512)
#include "vectors512.h"
#endif

#if defined(ISA_F16C)
/* Words of eight tokens, one of each state. */
static inline __m256i ISA_FN(decode8)(ISA_FN(reader) *reader, ISA_FN(pair) *pair, const linear_dtype *dtype, int row,
                                      int t, int exponent, int32_t units[2][GROUP]) {
    const __m256i one = _mm256_set1_epi32(1), inverses = LANES_OF(pair->inverses[row] + t);
    uint64_t *states = reader->states + t;
    const __m256i low = LANES_OF(states), high = LANES_OF(states + 4);
    const __m256i halves = _mm256_castps_si256(
        _mm256_shuffle_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), _MM_SHUFFLE(2, 0, 2, 0)));
    const __m256i targets = _mm256_and_si256(_mm256_permute4x64_epi64(halves, _MM_SHUFFLE(3, 1, 2, 0)),
                                             _mm256_set1_epi32((1 << TOTAL_BITS) - 1));
    int32_t starts[8], sizes[8];
    uint32_t raw[8] = {0};
    if (row) STORE_LANES(pair->centers[1] + t, ISA_FN(shift_centers8)(pair, t, LANES_OF(units[0] + t)));
    const __m256i centers = LANES_OF(pair->centers[row] + t);
    __m256i ranks = ISA_FN(guess_ranks8)(dtype, _mm256_cvtepi32_ps(centers), exponent);
    ranks = ISA_FN(guess_cells8)(&pair->mixture, dtype, targets, ranks, exponent, centers, inverses);
    const __m256i start = ISA_FN(cumulate8)(&pair->mixture, dtype, ranks, exponent, centers, inverses);
    const __m256i end =
        ISA_FN(cumulate8)(&pair->mixture, dtype, _mm256_add_epi32(ranks, one), exponent, centers, inverses);
    const __m256i is_inside =
        _mm256_andnot_si256(_mm256_cmpgt_epi32(start, targets), _mm256_cmpgt_epi32(end, targets));
    STORE_LANES(starts, start);
    STORE_LANES(sizes, _mm256_sub_epi32(end, start));
    unsigned is_wrong = 0xff ^ (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(is_inside));
    if (is_wrong) {
        uint32_t cells[8];
        STORE_LANES(cells, ranks);
        for (; is_wrong; is_wrong &= is_wrong - 1) {
            const int i = __builtin_ctz(is_wrong);
            linear_symbol symbol;
            cells[i] = ISA_FN(seek_cell)(&pair->mixture, dtype, (uint32_t)states[i] & ((1u << TOTAL_BITS) - 1), exponent,
                                         pair->centers[row][t + i], pair->inverses[row][t + i], cells[i], &symbol);
            starts[i] = (int32_t)symbol.start;
            sizes[i] = (int32_t)symbol.size;
        }
        ranks = LANES_OF(cells);
    }
    for (int i = 0; i < 8; ++i) {
        uint64_t x =
            ISA_FN(advance)(reader, states[i], (linear_symbol){(uint32_t)starts[i], (uint32_t)sizes[i]});
        if (dtype->raw_bits) x = ISA_FN(take_raw)(reader, dtype, x, &raw[i]);
        states[i] = x;
    }
    const __m256i far = _mm256_sub_epi32(ranks, _mm256_set1_epi32((int32_t)dtype->half_ranks));
    const __m256i sign = _mm256_srai_epi32(far, 31);
    const __m256i sign_bit = _mm256_slli_epi32(sign, dtype->is_wide ? 31 : 15);
    const __m256i cells = _mm256_slli_epi32(_mm256_xor_si256(far, sign), dtype->raw_bits);
    const __m256i magnitude = _mm256_or_si256(cells, LANES_OF(raw));
    const __m256i words = _mm256_or_si256(magnitude, sign_bit);
    STORE_LANES(units[row] + t, ISA_FN(words_to_units8)(dtype, words, exponent));
    return words;
}
#endif

static int ISA_FN(decode)(const linear_job *job, const uint8_t *data, size_t size, void *scratch, void *words) {
    const linear_side *side = job->side;
    const linear_dtype *dtype = job->dtype;
    const size_t n = side->shape.elements;
    const uint32_t mask = (1u << TOTAL_BITS) - 1;
    ISA_FN(state) state;
    ISA_FN(pair) pair;
    ISA_FN(reader) reader;
    uint32_t weights[SCALES];
    int32_t units[2][GROUP] = {{0}};
    if (size < sizeof reader.states || size % 4) return 0;
    memcpy(reader.states, data, sizeof reader.states);
    reader.cursor = data + sizeof reader.states;
    reader.end = data + size;
    reader.is_short = 0;
    for (int lane = 0; lane < LANES; ++lane)
        if (reader.states[lane] < (uint64_t)1 << 32) return 0;
    ISA_FN(begin_side)(&state, side, scratch);
    for (size_t begin = 0; begin < job->tokens; begin += GROUP) {
        const size_t tokens = job->tokens - begin < GROUP ? job->tokens - begin : GROUP;
        ISA_FN(begin_group)(&state, job, begin, tokens);
#if defined(ISA_AVX512)
        if (tokens == GROUP) {
            ISA_FN(decode_group)(&state, &reader, job, (uint8_t *)words + begin * n * (dtype->is_wide ? 4 : 2));
            ISA_FN(end_group)(&state);
            if (reader.is_short) return 0;
            continue;
        }
#endif
        for (size_t p = 0; p < n / 2; ++p) {
            const int exponent = side->scales.exponents[p];
            int is_constant = 0;
            ISA_FN(predict)(&state, job, p, &pair);
            ISA_FN(mix)(&pair.mixture, state.counts[p], weights);
            for (int row = 0; row < 2; ++row) {
                const int32_t element = side->shape.order[2 * p + row];
                const int is_fixed = job->is_constant && job->is_constant[element];
                size_t first = 0;
                is_constant |= is_fixed;
#if defined(ISA_F16C)
                for (; !is_fixed && first + 8 <= tokens; first += 8) {
                    const __m256i decoded = ISA_FN(decode8)(&reader, &pair, dtype, row, (int)first, exponent, units);
                    uint32_t lane_words[8];
                    STORE_LANES(lane_words, decoded);
                    for (size_t t = 0; t < 8; ++t)
                        ISA_FN(store_word)(dtype, words, (begin + first + t) * n + (size_t)element, lane_words[t]);
                }
#endif
                for (size_t t = first; t < tokens; ++t) {
                    const size_t at = (begin + t) * n + (size_t)element;
                    uint32_t word;
                    if (row) pair.centers[1][t] = ISA_FN(shift_center)(&pair, (int)t, units[0][t]);
                    if (is_fixed)
                        word = ISA_FN(load_word)(dtype, words, at);
                    else {
                        uint64_t x = reader.states[t];
                        linear_symbol symbol;
                        uint32_t raw = 0;
                        const uint32_t rank =
                            ISA_FN(find_cell)(&pair.mixture, dtype, (uint32_t)x & mask, exponent,
                                              pair.centers[row][t], pair.inverses[row][t], &symbol);
                        x = ISA_FN(advance)(&reader, x, symbol);
                        if (dtype->raw_bits) x = ISA_FN(take_raw)(&reader, dtype, x, &raw);
                        reader.states[t] = x;
                        word = ISA_FN(to_word)(dtype, rank, raw);
                        ISA_FN(store_word)(dtype, words, at, word);
                    }
                    units[row][t] = ISA_FN(word_to_units)(dtype, word, exponent);
                }
            }
            ISA_FN(learn)(&state, job, p, &pair, tokens, units, is_constant, weights);
        }
        ISA_FN(end_group)(&state);
        if (reader.is_short) return 0;
    }
    for (int lane = 0; lane < LANES; ++lane)
        if (reader.states[lane] != (uint64_t)1 << 32) return 0;
    return reader.cursor == reader.end;
}

static void ISA_FN(regressors)(const linear_shape *shape, const linear_scales *scales, const linear_dtype *dtype,
                               const void *words, const int64_t *positions, size_t tokens, void *scratch,
                               int16_t *out) {
    const size_t n = shape->elements;
    size_t first = 0;
#if defined(ISA_AVX512)
    for (; first + GROUP <= tokens; first += GROUP)
        regressors512(shape, scales, dtype, (const uint8_t *)words + first * n * (dtype->is_wide ? 4 : 2),
                      positions + first, scratch, out + first * n);
#else
    (void)scratch;
#endif
    for (size_t t = first; t < tokens; ++t)
        for (size_t pair_in_head = 0; pair_in_head < shape->head_dim / 2; ++pair_in_head) {
            int32_t cosine = 0, sine = 0;
            const int is_rotated = 2 * pair_in_head < shape->rotated_dims;
            if (is_rotated)
                linear_compute_rotation((uint64_t)positions[t] * shape->frequencies[pair_in_head], &cosine, &sine);
            for (size_t place = 2 * pair_in_head; place < n; place += shape->head_dim) {
                const int exponent = scales->exponents[place / 2];
                int64_t x[2];
                for (int row = 0; row < 2; ++row)
                    x[row] = ISA_FN(word_to_units)(
                        dtype, ISA_FN(load_word)(dtype, words, t * n + (size_t)shape->order[place + row]), exponent);
                if (is_rotated) {
                    const int64_t a = x[0];
                    x[0] = (a * cosine + x[1] * sine + (1 << 29)) >> 30;
                    x[1] = (x[1] * cosine - a * sine + (1 << 29)) >> 30;
                }
                for (int row = 0; row < 2; ++row) {
                    const int64_t inverse = ((int64_t)1 << 40) / scales->deviations[place + row];
                    const int64_t distance = ISA_FN(clamp)(x[row] - scales->means[place + row], UNIT_LIMIT);
                    out[t * n + place + row] =
                        (int16_t)ISA_FN(clamp)((distance * inverse + ((int64_t)1 << 31)) >> 32, REGRESSOR_LIMIT);
                }
            }
        }
}

/* The symbols of a group, each lane's own, from the last on. */
static uint8_t *ISA_FN(write_group)(uint64_t states[LANES], const linear_symbol *symbols, size_t count, size_t tokens,
                                    size_t word_symbols, uint8_t *cursor) {
    size_t lane = tokens, is_next = 0; /* whether the next symbol is of the same word */
    while (count-- > 0) {
        const linear_symbol symbol = symbols[count];
        lane = is_next ? lane : lane ? lane - 1 : tokens - 1;
        is_next = word_symbols == 2 && !is_next;
        uint64_t x = states[lane];
        if (x >= (uint64_t)symbol.size << (64 - TOTAL_BITS)) {
            const uint32_t unit = (uint32_t)x;
            cursor -= 4;
            memcpy(cursor, &unit, 4);
            x >>= 32;
        }
        states[lane] = (x / symbol.size << TOTAL_BITS) + x % symbol.size + symbol.start;
    }
    return cursor;
}

static size_t ISA_FN(write)(const linear_symbol *symbols, size_t count, size_t tokens, int has_raw, uint8_t *out,
                            size_t capacity) {
    const size_t word_symbols = has_raw ? 2 : 1, rest = count / tokens * (tokens % GROUP);
    uint64_t states[LANES];
    uint8_t *cursor = out + capacity;
    for (int lane = 0; lane < LANES; ++lane) states[lane] = (uint64_t)1 << 32;
    count -= rest;
    cursor = ISA_FN(write_group)(states, symbols + count, rest, tokens % GROUP, word_symbols, cursor);
#if defined(ISA_AVX512)
    if (!has_raw) {
        __m512i low = load512(states), high = load512(states + 8);
        for (; count; count -= GROUP) {
            high = retreat512(high, symbols + count - 8, &cursor);
            low = retreat512(low, symbols + count - 16, &cursor);
        }
        _mm512_storeu_si512(states, low);
        _mm512_storeu_si512(states + 8, high);
    }
#endif
    cursor = ISA_FN(write_group)(states, symbols, count, GROUP, word_symbols, cursor);
    cursor -= sizeof states;
    memcpy(cursor, states, sizeof states);
    return (size_t)(cursor - out);
}

static const linear_kernels ISA_FN(table) = {ISA_NAME, ISA_FN(regressors), ISA_FN(model), ISA_FN(write),
                                             ISA_FN(decode)};
