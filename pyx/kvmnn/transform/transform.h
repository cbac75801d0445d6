/* Transform streams (docs/format-transform.md): sums of products, rows of binary32 and words, and the entropy coder.
 *
 * No allocation, no Python. Sums are modulo 2^32, and every operation on binary32 is rounded alone, so every SIMD level
 * gives the same bits. Words are little-endian and rows in the order of the words of a token.
 */
#ifndef KVMNN_TRANSFORM_H
#define KVMNN_TRANSFORM_H

#include <stddef.h>
#include <stdint.h>

enum {
    TRANSFORM_FP16,
    TRANSFORM_BF16,
    TRANSFORM_FP32,

    TRANSFORM_LANES = 16,         /* packed matrices have rows of so many columns, or a multiple */
    TRANSFORM_SYMBOLS = 64,       /* of a table; the last one is the escape */
    TRANSFORM_CENTRE = 31,        /* symbol of coefficient 0 */
    TRANSFORM_SCALE_BITS = 12,    /* frequencies of a table have the sum 4096 */
    TRANSFORM_TABLES = 57,        /* eight for each doubling of a coefficient's scale */
    TRANSFORM_MAX_SHIFT = 10,     /* low bits of a coefficient that are stored as they are */
    TRANSFORM_BLOCK_ROWS = 256,   /* rows whose coefficients alternate: all of coefficient 0, then of 1 ... */
    TRANSFORM_MIN_EXPONENT = -16, /* of a token's step, in quarters of a doubling */
    TRANSFORM_EXPONENTS = 32
};

/* How pairs of a head lie, and how far they turn. */
typedef struct {
    uint32_t dims, interleaved; /* words of a head that are rotated, 0 for none */
    const uint64_t *frequencies; /* turns a position times 2^64, one a pair */
} transform_rope;

typedef struct {
    const char *name;

    /* out[t][j] = sum over k of in[t][k] x matrix[k][j]; `packed` is [j / LANES][k / 2][j % LANES][2], the last axis the
     * two k of a pair. `columns` is a multiple of TRANSFORM_LANES, `depth` is even; strides count elements. */
    void (*multiply)(const int16_t *in, size_t in_stride, size_t rows, size_t depth, const int16_t *packed,
                     size_t columns, int32_t *out, size_t out_stride);

    /* Words of a token to binary32: `source` has `heads` heads of `dim` words, `head_stride` words apart. */
    void (*load_row)(const uint8_t *source, int dtype, size_t heads, size_t dim, size_t head_stride,
                     const transform_rope *rope, const float *cosines, const float *sines, float *row);
    /* The inverse; `row` is changed. */
    void (*store_row)(float *row, int dtype, size_t heads, size_t dim, size_t head_stride, const transform_rope *rope,
                      const float *cosines, const float *sines, uint8_t *target);

    /* Cosines and sines of a position, which may be below 0. */
    void (*compute_angles)(const transform_rope *rope, int64_t position, float *cosines, float *sines);

    /* z = nearest integer to (row - mean) x reciprocal, within 16 bits. */
    void (*normalize)(const float *row, const float *mean, const float *reciprocal, size_t n, int16_t *z);

    /* row = mean + (prediction x gain + sums x step); `prediction` may be NULL. */
    void (*combine)(const float *mean, const int32_t *prediction, const float *gain, const int32_t *sums, float step,
                    size_t n, float *row);

    /* Adds up squares of the words and of their differences, and finds the largest difference. Words that dense streams
     * do not rotate count as 0. */
    void (*compare)(const uint8_t *words, const uint8_t *others, int dtype, size_t n, double *power,
                    double *error_power, float *largest);
} transform_kernels;

const transform_kernels *kvmnn_transform_kernels_at(int level);

/* Coefficients of one side, [row][n], and what decides their tables. */
typedef struct {
    size_t rows, n;
    const int64_t *places;    /* [row]: where the coefficients of a row are in memory, in rows; or NULL for 0, 1, 2 ... */
    const int32_t *levels;    /* [n], of exponent 0 */
    const int8_t *exponents;  /* [row], or NULL for 0 */
    const uint16_t *frequencies; /* [TRANSFORM_TABLES][TRANSFORM_SYMBOLS], valid */
} transform_side;

/* Whether each table has the sum 4096 and no frequency of 4096, and can code an escape. */
int kvmnn_transform_tables_are_valid(const uint16_t *frequencies);

/* Bytes that `kvmnn_transform_encode` may write to each of its outputs, and of its scratch memory. */
size_t kvmnn_transform_encode_capacity(const transform_side *side);
size_t kvmnn_transform_encode_scratch_bytes(const transform_side *side);
size_t kvmnn_transform_decode_scratch_bytes(void);

/* Writes units at the END of `units` (`capacity` bytes) and raw bits at the beginning of `bits`; 0 on success. */
void kvmnn_transform_encode(const transform_side *side, const int16_t *coefficients, uint8_t *scratch, uint8_t *units,
                            uint8_t *bits, size_t capacity, size_t *units_bytes, size_t *bits_bytes);

/* Decodes; 0 for sections that do not hold exactly these coefficients. */
int kvmnn_transform_decode(const transform_side *side, const uint8_t *units, size_t units_bytes, const uint8_t *bits,
                           size_t bits_bytes, uint8_t *scratch, int16_t *coefficients);

#endif
