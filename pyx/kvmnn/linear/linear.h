/* Linear streams (docs/format-linear.md): what the C files share.
 *
 * Nothing here allocates: callers hand over memory of the size that linear_scratch_bytes says.
 */
#ifndef KVMNN_LINEAR_H
#define KVMNN_LINEAR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    GROUP = 16, /* tokens that share the weights of a pair */
    LANES = 16, /* states of the entropy coder: one of each token of a group */
    SCALES = 6, /* Gaussians of a mixture */
    BUCKETS = 32,
    ANGLES = 64, /* of half a turn */
    MAX_BLOCKS = 5,
    TOTAL_BITS = 28,
    FLOOR_TOTAL = 1 << 19, /* of 2^28: what the floors of all cells take together */
    WEIGHT_SUM = 4096,
    HALF_MASS = (1 << (TOTAL_BITS - 1)) - FLOOR_TOTAL / 2, /* of a mixture on one side of its centre */
    UNIT_LIMIT = 1 << 30,                                  /* values in units lie from -UNIT_LIMIT to UNIT_LIMIT */
    CENTER_LIMIT = UNIT_LIMIT - 1,
    Z_LIMIT = (1 << 21) - 1, /* 32 deviations */
    REGRESSOR_LIMIT = 4095,  /* 16 deviations */
    DEVIATION = 256,         /* of a regressor and of an innovation */
};

/* How words are cut into cells. */
typedef struct {
    int mantissa_bits, bias;
    int is_wide;               /* 4 bytes a word */
    int raw_bits;              /* the lowest bits of a word, which are coded as they are */
    int boundary_mantissa_bits;
    uint32_t half_ranks;       /* half the number of cells */
    uint32_t floor;            /* what each of them has at least, of 2^28 */
} linear_dtype;

extern const linear_dtype linear_dtypes[3];

/* A row of K or V. Places are in the order of the profile's rows; `order` says which element of a row in memory has a
 * place. */
typedef struct {
    uint32_t elements, head_dim, rotated_dims; /* rotated_dims: of a head, 0 for none */
    const int32_t *order;
    const uint64_t *frequencies; /* rotated_dims / 2 */
} linear_shape;

/* Where an element stands: units of its pair, mean and deviation in these units. */
typedef struct {
    const int16_t *exponents; /* of pairs: a unit is 2^-exponent */
    const int32_t *means, *deviations;
} linear_scales;

typedef struct {
    linear_shape shape;
    linear_scales scales;
    uint32_t regressors;
    /* as in the profile */
    const int32_t *sigmas; /* deviations of innovations, in units */
    const int16_t *correlations; /* of pairs, times 2^14 */
    const int32_t *base_factors, *chain_factors;
    /* made of it: weights widened to 16 bits, [elements][regressors] and [elements][elements]; of each pair and angle
     * the inverse deviation of its first word, the slope of the second one's centre, its inverse deviation */
    int16_t *base_weights, *chain_weights;
    int32_t (*angles)[ANGLES][4];
} linear_side;

/* Regressors of one block: rows that the tokens select, or all in their order; negative ones are all 0. */
typedef struct {
    const int16_t *rows;
    uint32_t elements;
    const int32_t *selection;
} linear_block;

typedef struct {
    const linear_side *side;
    const linear_dtype *dtype;
    const int64_t *positions;
    size_t tokens;
    const linear_block *blocks;
    uint32_t num_blocks;
    const uint8_t *is_constant; /* of elements in memory order, or NULL */
} linear_job;

typedef struct {
    uint32_t start, size; /* of 2^28 */
} linear_symbol;

typedef struct {
    const char *name;
    /* The regressors of all tokens, [token][place]. */
    void (*regressors)(const linear_shape *shape, const linear_scales *scales, const linear_dtype *dtype,
                       const void *words, const int64_t *positions, size_t tokens, void *scratch, int16_t *out);
    /* The symbols of all words, in order; their number. */
    size_t (*model)(const linear_job *job, const void *words, void *scratch, linear_symbol *symbols);
    /* Writes states and units of the symbols of `tokens` tokens to the end of `out`, which has room for 4 bytes a symbol
     * and the states; where they begin. */
    size_t (*write)(const linear_symbol *symbols, size_t count, size_t tokens, int has_raw, uint8_t *out,
                    size_t capacity);
    /* Decodes to `words`, in which constant elements are filled in; 0 if states or units break the format. */
    int (*decode)(const linear_job *job, const uint8_t *data, size_t size, void *scratch, void *words);
} linear_kernels;

const linear_kernels *linear_kernels_at(int level);
void linear_prepare(linear_side *side, const int8_t *base, const int8_t *chain);
size_t linear_scratch_bytes(const linear_side *side);
size_t linear_count_symbols(const linear_dtype *dtype, size_t words);

extern const uint16_t linear_masses[SCALES][BUCKETS];
extern const uint16_t linear_reciprocals[128];

/* Cosine and sine of an angle in turns times 2^64, times 2^30. */
static inline void linear_compute_rotation(uint64_t angle, int32_t *cosine, int32_t *sine) {
    static const int64_t S[5] = {1686629713, -693598668, 85569306, -5026995, 172272};
    static const int64_t C[6] = {1073741824, -1324675879, 272375560, -22401992, 987048, -27060};
    const int32_t turned = (int32_t)(uint32_t)(angle >> 34) + (1 << 27); /* a turn is 2^30 */
    const int quadrant = turned >> 28 & 3;
    const int64_t x = ((int64_t)(turned & ((1 << 28) - 1)) - (1 << 27)) * 4, z = x * x >> 30;
    int64_t s = S[4], c = C[5];
    for (int i = 3; i >= 0; --i) s = S[i] + (s * z >> 30);
    for (int i = 4; i >= 0; --i) c = C[i] + (c * z >> 30);
    s = s * x >> 30;
    *cosine = (int32_t)(quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s);
    *sine = (int32_t)(quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c);
}

#endif
