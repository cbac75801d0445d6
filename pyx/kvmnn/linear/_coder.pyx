"""Code the words of K or V by the linear model of a profile: calls of the C files (docs/format-linear.md).

kvmnn.linear.model has checked shapes, types and limits of tables; sizes are checked again here.
"""

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from cpython.bytes cimport PyBytes_FromStringAndSize

from kvmnn._simd cimport active_level

cdef extern from "kvmnn/linear/linear.h" nogil:
    enum:
        ANGLES
        MAX_BLOCKS
        LANES

    ctypedef struct linear_dtype:
        int is_wide

    const linear_dtype linear_dtypes[3]

    ctypedef struct linear_shape:
        uint32_t elements, head_dim, rotated_dims
        const int32_t *order
        const uint64_t *frequencies

    ctypedef struct linear_scales:
        const int16_t *exponents
        const int32_t *means
        const int32_t *deviations

    ctypedef struct linear_side:
        linear_shape shape
        linear_scales scales
        uint32_t regressors
        const int32_t *sigmas
        const int16_t *correlations
        const int32_t *base_factors
        const int32_t *chain_factors
        int16_t *base_weights
        int16_t *chain_weights
        int32_t (*angles)[64][4]

    ctypedef struct linear_block:
        const int16_t *rows
        uint32_t elements
        const int32_t *selection

    ctypedef struct linear_job:
        const linear_side *side
        const linear_dtype *dtype
        const int64_t *positions
        size_t tokens
        const linear_block *blocks
        uint32_t num_blocks
        const uint8_t *is_constant

    ctypedef struct linear_symbol:
        uint32_t start, size

    ctypedef struct linear_kernels:
        const char *name
        void (*regressors)(const linear_shape *shape, const linear_scales *scales, const linear_dtype *dtype,
                           const void *words, const int64_t *positions, size_t tokens, void *scratch,
                           int16_t *out) noexcept nogil
        size_t (*model)(const linear_job *job, const void *words, void *scratch,
                        linear_symbol *symbols) noexcept nogil
        size_t (*write)(const linear_symbol *symbols, size_t count, size_t tokens, int has_raw, uint8_t *out,
                        size_t capacity) noexcept nogil
        int (*decode)(const linear_job *job, const uint8_t *data, size_t size, void *scratch,
                      void *words) noexcept nogil

    const linear_kernels *linear_kernels_at(int level)
    void linear_prepare(linear_side *side, const int8_t *base, const int8_t *chain)
    size_t linear_scratch_bytes(const linear_side *side)
    size_t linear_count_symbols(const linear_dtype *dtype, size_t words)

cdef uint64_t NO_FREQUENCY = 0


def get_level() -> str:
    """Return the name of the kernels in use."""
    return linear_kernels_at(active_level).name.decode()


cdef class Side:
    """The model of K or V of a layer, and what the kernels make of its tables.

    Rows of `base` are the weights of one place, [place, regressor]; `chain` has for each place, in order, one weight
    for every place of the pairs before its own.
    """

    cdef linear_side native
    cdef object arrays
    cdef readonly uint32_t elements
    cdef readonly uint32_t regressors

    def __cinit__(
        self,
        uint32_t head_dim,
        const int32_t[::1] order not None,
        const uint64_t[::1] frequencies not None,
        const int16_t[::1] exponents not None,
        const int32_t[::1] means not None,
        const int32_t[::1] deviations not None,
        const int32_t[::1] sigmas not None,
        const int16_t[::1] correlations not None,
        const int8_t[:, ::1] base not None,
        const int32_t[::1] base_factors not None,
        const int8_t[::1] chain not None,
        const int32_t[::1] chain_factors not None,
    ):
        cdef size_t n = order.shape[0], m = base.shape[1]
        cdef const int8_t *base_start = NULL
        cdef const int8_t *chain_start = NULL
        self.native.base_weights = self.native.chain_weights = NULL
        self.native.angles = NULL
        sizes = [means.shape[0], deviations.shape[0], sigmas.shape[0], base.shape[0], base_factors.shape[0],
                 chain_factors.shape[0], 2 * exponents.shape[0], 2 * correlations.shape[0]]
        is_even = n > 0 and head_dim > 0 and n % 2 == 0 and m % 2 == 0 and head_dim % 2 == 0
        if not is_even or n % head_dim or any(size != n for size in sizes):
            raise ValueError(f"tables of {sizes} elements do not fit rows of {n}")
        if <size_t>chain.shape[0] != n * (n - 2) // 2 or 2 * <size_t>frequencies.shape[0] > head_dim:
            raise ValueError(f"{chain.shape[0]} weights, {frequencies.shape[0]} frequencies do not fit rows of {n}")
        self.arrays = (order, frequencies, exponents, means, deviations, sigmas, correlations, base_factors,
                       chain_factors)
        self.elements, self.regressors = n, m
        self.native.shape.elements, self.native.shape.head_dim = n, head_dim
        self.native.shape.rotated_dims = 2 * frequencies.shape[0]
        self.native.shape.order = &order[0]
        self.native.shape.frequencies = &frequencies[0] if frequencies.shape[0] else &NO_FREQUENCY
        self.native.scales.exponents = &exponents[0]
        self.native.scales.means = &means[0]
        self.native.scales.deviations = &deviations[0]
        self.native.regressors = m
        self.native.sigmas = &sigmas[0]
        self.native.correlations = &correlations[0]
        self.native.base_factors = &base_factors[0]
        self.native.chain_factors = &chain_factors[0]
        self.native.base_weights = <int16_t *>malloc((n * m + 1) * sizeof(int16_t))
        self.native.chain_weights = <int16_t *>malloc(n * n * sizeof(int16_t))
        self.native.angles = <int32_t (*)[64][4]>malloc(n // 2 * sizeof(self.native.angles[0]))
        if self.native.base_weights == NULL or self.native.chain_weights == NULL or self.native.angles == NULL:
            raise MemoryError()
        if m:
            base_start = &base[0, 0]
        if chain.shape[0]:
            chain_start = &chain[0]
        with nogil:
            linear_prepare(&self.native, base_start, chain_start)

    def __dealloc__(self):
        free(self.native.base_weights)
        free(self.native.chain_weights)
        free(self.native.angles)

    def compute_regressors(
        self, int dtype, const uint8_t[::1] words not None, const int64_t[::1] positions not None,
        int16_t[:, ::1] out not None
    ) -> None:
        """Write the regressors of rows of words to `out`, [token, place]."""
        cdef size_t tokens = positions.shape[0]
        cdef const linear_kernels *kernels = linear_kernels_at(active_level)
        cdef void *scratch
        self._check(dtype, words.shape[0], tokens)
        if <size_t>out.shape[0] != tokens or <size_t>out.shape[1] != self.native.shape.elements:
            raise ValueError("regressors of another shape")
        if not tokens:
            return
        scratch = malloc(linear_scratch_bytes(&self.native))
        if scratch == NULL:
            raise MemoryError()
        with nogil:
            kernels.regressors(&self.native.shape, &self.native.scales, &linear_dtypes[dtype], &words[0],
                               &positions[0], tokens, scratch, &out[0, 0])
        free(scratch)

    def encode(
        self, int dtype, const uint8_t[::1] words not None, const int64_t[::1] positions not None, list blocks not None,
        const uint8_t[::1] is_constant
    ) -> bytes:
        """Return states and units of rows of words, one or more."""
        cdef size_t tokens = positions.shape[0], capacity, count, begin
        cdef const linear_kernels *kernels = linear_kernels_at(active_level)
        cdef _Job job = _Job(self, dtype, words.shape[0], positions, blocks, is_constant)
        cdef void *scratch = malloc(linear_scratch_bytes(&self.native))
        cdef linear_symbol *symbols
        cdef uint8_t *out
        count = linear_count_symbols(&linear_dtypes[dtype], tokens * self.native.shape.elements)
        capacity = 4 * count + 8 * LANES
        symbols = <linear_symbol *>malloc(count * sizeof(linear_symbol))
        out = <uint8_t *>malloc(capacity)
        try:
            if scratch == NULL or symbols == NULL or out == NULL:
                raise MemoryError()
            with nogil:
                count = kernels.model(&job.native, &words[0], scratch, symbols)
                begin = kernels.write(symbols, count, tokens, dtype == 2, out, capacity)
            return PyBytes_FromStringAndSize(<const char *>out + begin, capacity - begin)
        finally:
            free(scratch)
            free(symbols)
            free(out)

    def decode(
        self, int dtype, const uint8_t[::1] data not None, const int64_t[::1] positions not None, list blocks not None,
        const uint8_t[::1] is_constant, uint8_t[::1] words not None
    ) -> bool:
        """Decode rows to `words`, in which constant elements are filled in; False if the data breaks the format."""
        cdef const linear_kernels *kernels = linear_kernels_at(active_level)
        cdef _Job job = _Job(self, dtype, words.shape[0], positions, blocks, is_constant)
        cdef void *scratch
        cdef int is_valid
        if data.shape[0] == 0:
            return False
        scratch = malloc(linear_scratch_bytes(&self.native))
        if scratch == NULL:
            raise MemoryError()
        with nogil:
            is_valid = kernels.decode(&job.native, &data[0], data.shape[0], scratch, &words[0])
        free(scratch)
        return is_valid != 0

    cdef int _check(self, int dtype, size_t size, size_t tokens) except -1:
        if not 0 <= dtype < 3 or size != tokens * self.native.shape.elements * (4 if dtype == 2 else 2):
            raise ValueError(f"{size} bytes of words do not fit {tokens} rows of {self.native.shape.elements}")
        return 0


cdef class _Job:
    cdef linear_job native
    cdef linear_block blocks[5]
    cdef object arrays

    def __cinit__(
        self, Side side not None, int dtype, size_t size, const int64_t[::1] positions not None, list blocks not None,
        const uint8_t[::1] is_constant
    ):
        cdef const int16_t[:, ::1] rows
        cdef const int32_t[::1] selection
        cdef size_t tokens = positions.shape[0], t, width = 0
        cdef int i = 0
        side._check(dtype, size, tokens)
        if not tokens or len(blocks) > MAX_BLOCKS:
            raise ValueError("no tokens, or too many blocks")
        kept = [side, positions, is_constant]
        for block_rows, block_selection in blocks:
            rows = block_rows
            self.blocks[i].rows = &rows[0, 0] if rows.shape[0] and rows.shape[1] else NULL
            self.blocks[i].elements = rows.shape[1]
            self.blocks[i].selection = NULL
            if block_selection is None:
                if <size_t>rows.shape[0] != tokens:
                    raise ValueError("a block of other tokens")
            else:
                selection = block_selection
                if <size_t>selection.shape[0] != tokens:
                    raise ValueError("a selection of other tokens")
                for t in range(tokens):
                    if selection[t] >= rows.shape[0]:
                        raise ValueError("a selection beyond its block")
                self.blocks[i].selection = &selection[0]
                kept.append(selection)
            width += rows.shape[1]
            kept.append(rows)
            i += 1
        if is_constant is not None and <size_t>is_constant.shape[0] != side.elements:
            raise ValueError("a mask of other elements")
        if width != side.native.regressors:
            raise ValueError(f"blocks of {width} regressors: expected {side.native.regressors}")
        self.arrays = kept
        self.native.side = &side.native
        self.native.dtype = &linear_dtypes[dtype]
        self.native.positions = &positions[0]
        self.native.tokens = tokens
        self.native.blocks = self.blocks
        self.native.num_blocks = i
        self.native.is_constant = &is_constant[0] if is_constant is not None else NULL
