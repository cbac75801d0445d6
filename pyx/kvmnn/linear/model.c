#include "linear.h"

#include <math.h>

const linear_dtype linear_dtypes[3] = {
    {.mantissa_bits = 10, .bias = 15, .boundary_mantissa_bits = 11, .half_ranks = 1 << 15, .floor = 8},
    {.mantissa_bits = 7, .bias = 127, .boundary_mantissa_bits = 8, .half_ranks = 1 << 15, .floor = 8},
    {.mantissa_bits = 23, .bias = 127, .is_wide = 1, .raw_bits = 13, .boundary_mantissa_bits = 10,
     .half_ranks = 1 << 18, .floor = 1},
};

/* Masses of Gaussians of deviations .25 .45 .75 1.2 2.2 4.5 in the buckets of one side, times 32,704. */
const uint16_t linear_masses[SCALES][BUCKETS] = {
    {6456, 6067, 5358, 4446, 3467, 2540, 1750, 1132, 1082, 318, 73, 13, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
     0, 0, 0, 0, 0, 0, 0},
    {3613, 3543, 3410, 3218, 2980, 2706, 2411, 2107, 3324, 2266, 1431, 836, 680, 151, 25, 3, 0, 0, 0, 0, 0, 0,
     0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {2172, 2157, 2127, 2084, 2026, 1957, 1878, 1788, 3281, 2857, 2419, 1992, 2840, 1638, 846, 391, 223, 26, 2,
     0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {1358, 1355, 1348, 1336, 1322, 1305, 1283, 1259, 2434, 2306, 2161, 2003, 3502, 2822, 2176, 1608, 1909, 811,
     290, 88, 27, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {741, 741, 739, 738, 735, 732, 729, 725, 1435, 1411, 1385, 1354, 2601, 2438, 2257, 2062, 3515, 2719, 1996,
     1393, 1504, 545, 161, 39, 9, 0, 0, 0, 0, 0, 0, 0},
    {362, 363, 362, 362, 362, 361, 361, 360, 720, 716, 713, 709, 1405, 1384, 1358, 1329, 2557, 2405, 2233, 2049,
     3517, 2750, 2048, 1451, 1608, 608, 190, 49, 12, 0, 0, 0},
};

/* 2^24 / (2 m + 257), rounded down: of a number whose bits after the first one are m, 7 of them. */
const uint16_t linear_reciprocals[128] = {
    65280, 64776, 64280, 63791, 63310, 62836, 62368, 61908, 61455, 61008, 60567, 60133, 59705, 59283, 58867,
    58457, 58052, 57653, 57260, 56871, 56488, 56111, 55738, 55370, 55007, 54648, 54295, 53946, 53601, 53261,
    52924, 52593, 52265, 51941, 51622, 51306, 50994, 50686, 50382, 50081, 49784, 49490, 49200, 48913, 48629,
    48349, 48072, 47798, 47527, 47259, 46995, 46733, 46474, 46218, 45964, 45714, 45466, 45221, 44979, 44739,
    44501, 44267, 44034, 43804, 43577, 43351, 43129, 42908, 42690, 42473, 42259, 42048, 41838, 41630, 41425,
    41221, 41020, 40820, 40622, 40427, 40233, 40041, 39850, 39662, 39475, 39290, 39107, 38926, 38746, 38568,
    38391, 38216, 38043, 37871, 37701, 37532, 37365, 37200, 37035, 36873, 36711, 36551, 36393, 36235, 36080,
    35925, 35772, 35620, 35469, 35320, 35172, 35025, 34879, 34735, 34592, 34450, 34309, 34169, 34030, 33893,
    33756, 33621, 33487, 33354, 33222, 33091, 32961, 32832,
};

static uint32_t square_root(uint64_t x) { /* x < 2^52: exact as a double */
    uint64_t root = (uint64_t)sqrt((double)x);
    while (root * root > x) --root;
    while ((root + 1) * (root + 1) <= x) ++root;
    return (uint32_t)root;
}

static int64_t at_least(int64_t x, int64_t limit) { return x > limit ? x : limit; }

/* At an angle: inverse deviation of the first word of a pair, slope of the second centre, its inverse deviation. */
static void rotate_covariance(int32_t sigma_a, int32_t sigma_b, int correlation, int angle, int32_t out[4]) {
    const int64_t a = sigma_a >> 4, b = sigma_b >> 4;
    const int64_t aa = a * a, bb = b * b, ab = a * b * correlation / (1 << 14);
    int32_t cosine, sine;
    int64_t v11, v12, v22, rest;
    linear_compute_rotation((uint64_t)angle << 57, &cosine, &sine);
    const int64_t c = cosine >> 16, s = sine >> 16;
    v11 = at_least((aa * c * c - 2 * ab * c * s + bb * s * s) >> 28, 1);
    v22 = at_least((aa * s * s + 2 * ab * c * s + bb * c * c) >> 28, 1);
    v12 = ((aa - bb) * c * s + ab * (c * c - s * s)) >> 28;
    rest = at_least(v22 - v12 * v12 / v11, at_least(v22 >> 12, 1));
    out[0] = (int32_t)(((int64_t)1 << 32) / square_root((uint64_t)v11 << 8));
    out[1] = (int32_t)(v12 * (1 << 14) / v11);
    out[2] = (int32_t)(((int64_t)1 << 32) / square_root((uint64_t)rest << 8));
    out[3] = 0;
}

void linear_prepare(linear_side *side, const int8_t *base, const int8_t *chain) {
    const size_t n = side->shape.elements;
    for (size_t i = 0; i < n * side->regressors; ++i) side->base_weights[i] = base[i];
    for (size_t row = 0; row < n; ++row)
        for (size_t i = 0; i < row / 2 * 2; ++i) side->chain_weights[row * n + i] = *chain++;
    for (size_t pair = 0; pair < n / 2; ++pair) {
        const size_t place = 2 * pair % side->shape.head_dim;
        const int num_angles = place < side->shape.rotated_dims ? ANGLES : 1;
        for (int angle = 0; angle < num_angles; ++angle)
            rotate_covariance(side->sigmas[2 * pair], side->sigmas[2 * pair + 1], side->correlations[pair], angle,
                              side->angles[pair][angle]);
    }
}

size_t linear_scratch_bytes(const linear_side *side) {
    const size_t n = side->shape.elements, half = side->shape.rotated_dims / 2;
    return (side->regressors + n) * GROUP * sizeof(int16_t) + n * (GROUP + 1) * sizeof(int32_t) +
           half * GROUP * (2 * sizeof(int32_t) + 1) + n / 2 * SCALES * sizeof(uint64_t) + n * GROUP * sizeof(uint32_t) + 9 * 64;
}

/* -- the entropy coder --------------------------------------------------------------------------------------------- */

size_t linear_count_symbols(const linear_dtype *dtype, size_t words) { return words * (dtype->raw_bits ? 2 : 1); }

#define KVMNN_SIMD_KERNELS "linear/coder_impl.h"
#define KVMNN_KERNEL_TABLE linear_kernels
#define KVMNN_USE_AVX512
#include "../simd.h"

const linear_kernels *linear_kernels_at(int level) { return isa_tables[level]; }
