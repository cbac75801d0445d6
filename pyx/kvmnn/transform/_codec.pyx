"""Transform streams (docs/format-transform.md): the loops of transform.c over arrays whose sizes the caller has checked."""

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from cpython.bytes cimport PyBytes_FromStringAndSize

from kvmnn._simd cimport active_level

cdef extern from "kvmnn/transform/transform.h" nogil:
    enum:
        TRANSFORM_LANES
        TRANSFORM_SYMBOLS
        TRANSFORM_TABLES

    ctypedef struct transform_rope:
        uint32_t dims, interleaved
        const uint64_t *frequencies

    ctypedef struct transform_kernels:
        const char *name
        void (*multiply)(
            const int16_t *in_, size_t in_stride, size_t rows, size_t depth, const int16_t *packed, size_t columns,
            int32_t *out, size_t out_stride) noexcept nogil
        void (*load_row)(
            const uint8_t *source, int dtype, size_t heads, size_t dim, size_t head_stride, const transform_rope *rope,
            const float *cosines, const float *sines, float *row) noexcept nogil
        void (*store_row)(
            float *row, int dtype, size_t heads, size_t dim, size_t head_stride, const transform_rope *rope,
            const float *cosines, const float *sines, uint8_t *target) noexcept nogil
        void (*compute_angles)(
            const transform_rope *rope, int64_t position, float *cosines, float *sines) noexcept nogil
        void (*normalize)(
            const float *row, const float *mean, const float *reciprocal, size_t n, int16_t *z) noexcept nogil
        void (*combine)(
            const float *mean, const int32_t *prediction, const float *gain, const int32_t *sums, float step, size_t n,
            float *row) noexcept nogil
        void (*compare)(
            const uint8_t *words, const uint8_t *others, int dtype, size_t n, double *power, double *error_power,
            float *largest) noexcept nogil

    const transform_kernels *kvmnn_transform_kernels_at(int level)

    ctypedef struct transform_side:
        size_t rows, n
        const int64_t *places
        const int32_t *levels
        const int8_t *exponents
        const uint16_t *frequencies

    int kvmnn_transform_tables_are_valid(const uint16_t *frequencies)
    size_t kvmnn_transform_encode_capacity(const transform_side *side)
    size_t kvmnn_transform_encode_scratch_bytes(const transform_side *side)
    size_t kvmnn_transform_decode_scratch_bytes()
    void kvmnn_transform_encode(
        const transform_side *side, const int16_t *coefficients, uint8_t *scratch, uint8_t *units, uint8_t *bits,
        size_t capacity, size_t *units_bytes, size_t *bits_bytes)
    int kvmnn_transform_decode(
        const transform_side *side, const uint8_t *units, size_t units_bytes, const uint8_t *bits, size_t bits_bytes,
        uint8_t *scratch, int16_t *coefficients)

LANES = TRANSFORM_LANES
NUM_SYMBOLS = TRANSFORM_SYMBOLS
NUM_TABLES = TRANSFORM_TABLES

cdef enum:
    TILE_ROWS = 48  # rows whose sums are in the cache when they are used; a multiple of 6, which is what registers hold


def get_level() -> str:
    """Return the name of the kernels in use."""
    return kvmnn_transform_kernels_at(active_level).name.decode()


def are_tables_valid(const uint16_t[:, ::1] frequencies not None) -> bool:
    """Return whether NUM_TABLES tables of NUM_SYMBOLS frequencies are ones that a decoder takes."""
    return kvmnn_transform_tables_are_valid(&frequencies[0, 0]) != 0


cdef class Rotation:
    """How K of a layer is rotated; V and K that is not: `Rotation(None)`."""

    cdef transform_rope rope
    cdef const uint64_t[::1] frequencies

    def __init__(self, rotation):
        self.rope.dims = self.rope.interleaved = 0
        self.rope.frequencies = NULL
        if rotation is not None:
            self.rope.dims, self.rope.interleaved, self.frequencies = rotation
            self.rope.frequencies = &self.frequencies[0]


def load_rows(
    const uint8_t[::1] words not None, int dtype, size_t heads, size_t dim, Rotation rotation not None,
    const int64_t[::1] positions not None, float[:, ::1] rows not None
) -> None:
    """Write words ``[head, token, dim]``, turned back by their positions, to rows ``[token, heads x dim]``."""
    cdef const transform_kernels *kernels = kvmnn_transform_kernels_at(active_level)
    cdef size_t tokens = positions.shape[0], t, word_bytes = 4 if dtype == 2 else 2
    cdef float *angles = <float *>malloc((rotation.rope.dims + 1) * sizeof(float))
    if angles == NULL:
        raise MemoryError("no memory for angles")
    with nogil:
        for t in range(tokens):
            kernels.compute_angles(&rotation.rope, -positions[t], angles, angles + rotation.rope.dims // 2)
            kernels.load_row(
                &words[t * dim * word_bytes], dtype, heads, dim, tokens * dim, &rotation.rope, angles,
                angles + rotation.rope.dims // 2, &rows[t, 0])
    free(angles)


def load_normalized(
    const uint8_t[::1] words not None, int dtype, size_t heads, size_t dim, Rotation rotation not None,
    const int64_t[::1] positions not None, const float[::1] mean not None, const float[::1] reciprocal not None,
    int16_t[:, ::1] normalized not None
) -> None:
    """Write the rows of `load_rows`, normalised, to the first columns of `normalized`."""
    cdef const transform_kernels *kernels = kvmnn_transform_kernels_at(active_level)
    cdef size_t tokens = positions.shape[0], t, word_bytes = 4 if dtype == 2 else 2, pairs = rotation.rope.dims // 2
    cdef float *row = <float *>malloc((heads * dim + rotation.rope.dims) * sizeof(float))
    cdef float *angles = row + heads * dim
    if row == NULL:
        raise MemoryError("no memory for a row")
    with nogil:
        for t in range(tokens):
            kernels.compute_angles(&rotation.rope, -positions[t], angles, angles + pairs)
            kernels.load_row(
                &words[t * dim * word_bytes], dtype, heads, dim, tokens * dim, &rotation.rope, angles, angles + pairs, row)
            kernels.normalize(row, &mean[0], &reciprocal[0], heads * dim, &normalized[t, 0])
    free(row)


def multiply(const int16_t[:, ::1] rows not None, const int16_t[:, :, :, ::1] packed not None, int32_t[:, ::1] sums not None):
    """Write ``rows @ matrix`` modulo 2^32 to sums ``[token, column]``; `packed` is ``[column / 16, depth / 2, 16, 2]``."""
    cdef const transform_kernels *kernels = kvmnn_transform_kernels_at(active_level)
    if rows.shape[0] == 0:
        return
    with nogil:
        kernels.multiply(
            &rows[0, 0], rows.shape[1], rows.shape[0], 2 * packed.shape[1], &packed[0, 0, 0, 0],
            TRANSFORM_LANES * packed.shape[0],
            &sums[0, 0], sums.shape[1])


def reconstruct(
    const int16_t[::1] coefficients not None, size_t blocks, const int16_t[:, :, :, :, ::1] basis,
    const int16_t[::1] diagonal, const float[::1] mean not None, const int32_t[:, ::1] prediction,
    const float[::1] gain, const float[::1] steps not None, int dtype, size_t heads, size_t dim,
    Rotation rotation not None, const int64_t[::1] positions not None, uint8_t[::1] words not None
) -> None:
    """Write the words ``[head, token, dim]`` of coefficients.

    coefficients: rows of `mean.shape[0]` numbers, and one more at the end; basis: ``[block, column / 16, depth / 2, 16, 2]``,
    or None for one factor a coefficient, `diagonal`; prediction: sums ``[token, column]`` or None, with their gain.
    """
    cdef const transform_kernels *kernels = kvmnn_transform_kernels_at(active_level)
    cdef size_t n = mean.shape[0], tokens = positions.shape[0], word_bytes = 4 if dtype == 2 else 2
    cdef size_t size = n // blocks, columns = 0 if basis is None else TRANSFORM_LANES * basis.shape[1], b, t, i, begin, count
    cdef size_t sums_stride = n if basis is None else blocks * columns
    cdef int32_t *sums = <int32_t *>malloc(TILE_ROWS * sums_stride * sizeof(int32_t))
    cdef float *row = <float *>malloc((n + rotation.rope.dims + 1) * sizeof(float))
    cdef float *cosines
    cdef float *sines
    cdef const int32_t *predicted
    if sums == NULL or row == NULL:
        free(sums)
        free(row)
        raise MemoryError("no memory for rows")
    cosines, sines = row + n, row + n + rotation.rope.dims // 2
    with nogil:
        begin = 0
        while begin < tokens:
            count = min(<size_t>TILE_ROWS, tokens - begin)
            if basis is None:
                for t in range(count):
                    for i in range(n):
                        sums[t * n + i] = coefficients[(begin + t) * n + i] * <int32_t>diagonal[i]
            else:
                for b in range(blocks):
                    kernels.multiply(
                        &coefficients[begin * n + b * size], n, count, 2 * basis.shape[2],
                        &basis[b, 0, 0, 0, 0], columns,
                        sums + b * columns, sums_stride)
            for t in range(count):
                predicted = NULL if prediction is None else &prediction[begin + t, 0]
                if basis is None or blocks == 1:
                    kernels.combine(
                        &mean[0], predicted, NULL if predicted == NULL else &gain[0], sums + t * sums_stride,
                        steps[begin + t], n, row)
                else:
                    for b in range(blocks):
                        kernels.combine(
                            &mean[b * size], NULL if predicted == NULL else predicted + b * size,
                            NULL if predicted == NULL else &gain[b * size], sums + t * sums_stride + b * columns,
                            steps[begin + t], size, row + b * size)
                kernels.compute_angles(&rotation.rope, positions[begin + t], cosines, sines)
                kernels.store_row(
                    row, dtype, heads, dim, tokens * dim, &rotation.rope, cosines, sines,
                    &words[(begin + t) * dim * word_bytes])
            begin += TILE_ROWS
    free(sums)
    free(row)


def compare_words(const uint8_t[::1] words not None, const uint8_t[::1] others not None, int dtype) -> tuple:
    """Return the sum of squares of words, that of their errors in `others`, and the largest error."""
    cdef double power = 0, error_power = 0
    cdef float largest = 0
    cdef size_t n = words.shape[0] // (4 if dtype == 2 else 2)
    if n:
        with nogil:
            kvmnn_transform_kernels_at(active_level).compare(
                &words[0], &others[0], dtype, n, &power, &error_power, &largest)
    return power, error_power, largest


cdef transform_side make_side(
    const int64_t[::1] places, const int32_t[::1] levels, const int8_t[::1] exponents,
    const uint16_t[:, ::1] frequencies
) noexcept:
    cdef transform_side side
    side.rows, side.n = places.shape[0], levels.shape[0]
    side.places = &places[0]
    side.levels, side.frequencies = &levels[0], &frequencies[0, 0]
    side.exponents = NULL if exponents is None or exponents.shape[0] == 0 else &exponents[0]
    return side


def encode_coefficients(
    const int16_t[::1] coefficients not None, const int64_t[::1] places not None, const int32_t[::1] levels not None,
    const int8_t[::1] exponents, const uint16_t[:, ::1] frequencies not None
) -> tuple:
    """Return units and raw bits of the rows of coefficients at `places`, at least one, each of ``levels.shape[0]``."""
    cdef transform_side side = make_side(places, levels, exponents, frequencies)
    cdef size_t capacity = kvmnn_transform_encode_capacity(&side), units_bytes, bits_bytes
    cdef size_t scratch_bytes = kvmnn_transform_encode_scratch_bytes(&side)
    cdef uint8_t *memory = <uint8_t *>malloc(scratch_bytes + 2 * capacity)
    cdef uint8_t *units = memory + scratch_bytes
    if memory == NULL:
        raise MemoryError("no memory to encode coefficients")
    with nogil:
        kvmnn_transform_encode(
            &side, &coefficients[0], memory, units, units + capacity, capacity, &units_bytes, &bits_bytes)
    try:
        return (
            PyBytes_FromStringAndSize(<char *>(units + capacity - units_bytes), units_bytes),
            PyBytes_FromStringAndSize(<char *>(units + capacity), bits_bytes),
        )
    finally:
        free(memory)


def decode_coefficients(
    const uint8_t[::1] units not None, const uint8_t[::1] bits not None, const int64_t[::1] places not None,
    const int32_t[::1] levels not None, const int8_t[::1] exponents, const uint16_t[:, ::1] frequencies not None,
    int16_t[::1] coefficients not None
) -> bool:
    """Write rows of coefficients to their places; False for sections that do not hold them exactly."""
    cdef transform_side side = make_side(places, levels, exponents, frequencies)
    cdef uint8_t *scratch = <uint8_t *>malloc(kvmnn_transform_decode_scratch_bytes())
    cdef uint8_t placeholder = 0
    cdef int is_valid
    if scratch == NULL:
        raise MemoryError("no memory to decode coefficients")
    with nogil:
        is_valid = kvmnn_transform_decode(
            &side, &units[0] if units.shape[0] else &placeholder, units.shape[0],
            &bits[0] if bits.shape[0] else &placeholder, bits.shape[0], scratch, &coefficients[0])
    free(scratch)
    return is_valid != 0
