"""Packed K/V buffers: tokens moved by layout_kernels.c and quantize.c (docs/layout.md).

Every function works on the heads [first, last) of one buffer, K or V, without the GIL. kvmnn.packed.layout has checked
every size, that what is written to may be written, and that the last axis of `rows` is contiguous; nothing is checked
again here.
"""

from libc.stdint cimport uint8_t
from libc.stdlib cimport free, malloc

cdef extern from "kvmnn/packed/layout_kernels.h" nogil:
    ctypedef struct kvmnn_layout:
        size_t word_bytes, dims, lP, hP, block_tokens

    ctypedef struct kvmnn_layout_kernels:
        void (*gather)(const kvmnn_layout *, const uint8_t *, size_t, size_t, uint8_t *, size_t) noexcept nogil
        void (*gather_nontemporal)(
            const kvmnn_layout *, const uint8_t *, size_t, size_t, uint8_t *, size_t, uint8_t *, size_t) noexcept nogil
        void (*scatter)(const kvmnn_layout *, uint8_t *, size_t, size_t, const uint8_t *, size_t) noexcept nogil
        void (*scatter_nontemporal)(
            const kvmnn_layout *, uint8_t *, size_t, size_t, const uint8_t *, size_t, uint8_t *, size_t) noexcept nogil
        void (*zero)(const kvmnn_layout *, uint8_t *, size_t, size_t) noexcept nogil
        void (*pad)(const kvmnn_layout *, uint8_t *, size_t, size_t) noexcept nogil
        void (*shift)(const kvmnn_layout *, uint8_t *, size_t, size_t, size_t, uint8_t *, size_t) noexcept nogil

    const kvmnn_layout_kernels kvmnn_key_kernels
    const kvmnn_layout_kernels kvmnn_value_kernels

    const char *kvmnn_layout_isa_name()

cdef extern from "kvmnn/packed/quantize.h" nogil:
    ctypedef struct kvmnn_int8_layout:
        size_t dims, lP, hP, block_tokens

    void kvmnn_quantize_keys(
        const kvmnn_int8_layout *, uint8_t *, float *, float *, size_t, size_t, const uint8_t *, size_t)
    void kvmnn_quantize_values(
        const kvmnn_int8_layout *, uint8_t *, float *, size_t, size_t, size_t, const uint8_t *, size_t)
    void kvmnn_dequantize_keys(const kvmnn_int8_layout *, const uint8_t *, size_t, size_t, uint8_t *, size_t)
    void kvmnn_dequantize_values(const kvmnn_int8_layout *, const uint8_t *, size_t, size_t, uint8_t *, size_t)

cdef enum:
    MIN_NONTEMPORAL_BYTES = 8 << 20  # plain bytes from which on what is written will not stay in the caches
    MIN_SCRATCH = 16 << 10  # half of a first-level cache
    MAX_SCRATCH = 256 << 10  # a fraction of a second-level cache


cdef class NativeLayout:
    """The numbers of a float layout (`word_bytes` 2 or 4) or of an int8 one (`word_bytes` 1, with lP8 and hP8)."""

    cdef kvmnn_layout floats
    cdef kvmnn_int8_layout codes
    cdef size_t head_bytes, tile_bytes
    cdef bint is_keys
    cdef const kvmnn_layout_kernels *packing

    def __init__(
        self, bint is_keys, size_t word_bytes, size_t dims, size_t lP, size_t hP, size_t block_tokens,
        size_t head_bytes, size_t tile_bytes
    ) -> None:
        self.is_keys = is_keys
        self.packing = &kvmnn_key_kernels if is_keys else &kvmnn_value_kernels
        self.head_bytes = head_bytes
        self.floats.word_bytes, self.floats.dims, self.floats.lP, self.floats.hP = word_bytes, dims, lP, hP
        self.codes.dims, self.codes.lP, self.codes.hP = dims, lP, hP
        self.floats.block_tokens = self.codes.block_tokens = block_tokens
        self.tile_bytes = tile_bytes

    cdef size_t scratch_bytes(self) noexcept nogil:
        """Return the scratch size for a row, and for a tile of K or a block of V unless that is excessively large."""
        cdef size_t row = self.floats.dims * self.floats.word_bytes
        cdef size_t tile_bytes_that_fit = self.tile_bytes if self.tile_bytes <= MAX_SCRATCH else 0
        return max(row, tile_bytes_that_fit, <size_t>MIN_SCRATCH)


cdef uint8_t *allocate_scratch(NativeLayout layout) except NULL:
    cdef uint8_t *scratch = <uint8_t *>malloc(layout.scratch_bytes())
    if scratch == NULL:
        raise MemoryError("no memory for scratch")
    return scratch


cdef int move_tokens(
    NativeLayout layout, bint to_rows, uint8_t *packed, uint8_t *rows, size_t head_stride, size_t row_stride,
    size_t first, size_t last, size_t start, size_t count, size_t all_bytes
) except -1:
    """Copy packed tokens to plain rows, or back if `to_rows` is False; large copies bypass the caches."""
    cdef bint is_nontemporal = all_bytes >= MIN_NONTEMPORAL_BYTES
    cdef uint8_t *scratch = allocate_scratch(layout) if is_nontemporal else NULL
    cdef size_t h, scratch_bytes = layout.scratch_bytes()
    cdef uint8_t *head
    cdef uint8_t *row_start
    with nogil:
        for h in range(first, last):
            head, row_start = packed + h * layout.head_bytes, rows + h * head_stride
            if is_nontemporal and to_rows:
                layout.packing.gather_nontemporal(
                    &layout.floats, head, start, count, row_start, row_stride, scratch, scratch_bytes)
            elif is_nontemporal:
                layout.packing.scatter_nontemporal(
                    &layout.floats, head, start, count, row_start, row_stride, scratch, scratch_bytes)
            elif to_rows:
                layout.packing.gather(&layout.floats, head, start, count, row_start, row_stride)
            else:
                layout.packing.scatter(&layout.floats, head, start, count, row_start, row_stride)
        free(scratch)
    return 0


def gather(
    NativeLayout layout not None, const uint8_t[::1] packed not None, uint8_t[:, :, :] rows not None, size_t first,
    size_t last, size_t start
) -> None:
    """Copy tokens from `start` on to `rows`, shaped [heads, tokens, row bytes]."""
    move_tokens(
        layout, True, <uint8_t *>&packed[0], &rows[0, 0, 0], rows.strides[0], rows.strides[1], first, last, start,
                rows.shape[1], rows.shape[0] * rows.shape[1] * rows.shape[2])


def scatter(
    NativeLayout layout not None, uint8_t[::1] packed not None, const uint8_t[:, :, :] rows not None, size_t first,
    size_t last, size_t start
) -> None:
    """Copy `rows`, shaped [heads, tokens, row bytes], over the tokens from `start` on."""
    move_tokens(
        layout, False, &packed[0], <uint8_t *>&rows[0, 0, 0], rows.strides[0], rows.strides[1], first, last, start,
                rows.shape[1], rows.shape[0] * rows.shape[1] * rows.shape[2])


def zero(
    NativeLayout layout not None, uint8_t[::1] packed not None, size_t first, size_t last, size_t start, size_t count
) -> None:
    """Zero the words of `count` tokens from `start` on."""
    cdef uint8_t *head = &packed[0]
    cdef size_t h
    with nogil:
        for h in range(first, last):
            layout.packing.zero(&layout.floats, head + h * layout.head_bytes, start, count)


def pad(
    NativeLayout layout not None, uint8_t[::1] packed not None, size_t first, size_t last, size_t num_valid
) -> None:
    """Zero every byte that belongs to no word of the first `num_valid` tokens."""
    cdef uint8_t *head = &packed[0]
    cdef size_t h
    with nogil:
        for h in range(first, last):
            layout.packing.pad(&layout.floats, head + h * layout.head_bytes, num_valid, layout.head_bytes)


def shift(
    NativeLayout layout not None, uint8_t[::1] packed not None, size_t first, size_t last,
    const size_t[:, ::1] moves not None
) -> None:
    """Copy tokens inside each head: rows (source, destination, count) of `moves` one after the other."""
    cdef uint8_t *head = &packed[0]
    cdef size_t h, m, scratch_bytes = layout.scratch_bytes()
    cdef uint8_t *scratch = allocate_scratch(layout)
    with nogil:
        for h in range(first, last):
            for m in range(<size_t>moves.shape[0]):
                layout.packing.shift(
                    &layout.floats, head + h * layout.head_bytes, moves[m, 0], moves[m, 1], moves[m, 2], scratch,
                    scratch_bytes)
        free(scratch)


def quantize_keys(
    NativeLayout layout not None, uint8_t[::1] packed not None, float[:, ::1] sums not None,
    float[:, ::1] running_max not None, const uint8_t[:, :, :] rows not None, size_t first, size_t last, size_t num_past
) -> None:
    """Append `rows` of floats at `num_past` as int8; `sums` is [heads, token slots], `running_max` [heads, dims]."""
    cdef uint8_t *head = &packed[0]
    cdef size_t h
    with nogil:
        for h in range(first, last):
            kvmnn_quantize_keys(
                &layout.codes, head + h * layout.head_bytes, &sums[h, 0], &running_max[h, 0], num_past,
                <size_t>rows.shape[1], &rows[h, 0, 0], <size_t>rows.strides[1])


def quantize_values(
    NativeLayout layout not None, uint8_t[::1] packed not None, float[:, :, ::1] sums not None,
    const uint8_t[:, :, :] rows not None, size_t first, size_t last, size_t num_past
) -> None:
    """Append `rows` of floats at `num_past` as int8; `sums` is [heads, blocks, dims rounded up to hP8]."""
    cdef uint8_t *head = &packed[0]
    cdef size_t h
    with nogil:
        for h in range(first, last):
            kvmnn_quantize_values(
                &layout.codes, head + h * layout.head_bytes, &sums[h, 0, 0], <size_t>sums.shape[1], num_past,
                <size_t>rows.shape[1], &rows[h, 0, 0], <size_t>rows.strides[1])


def dequantize(
    NativeLayout layout not None, const uint8_t[::1] packed not None, uint8_t[:, :, :] rows not None, size_t first,
    size_t last, size_t start
) -> None:
    """Write code * scale + bias of the tokens from `start` on to `rows` of floats."""
    cdef const uint8_t *head = &packed[0]
    cdef size_t h, count = rows.shape[1]
    with nogil:
        for h in range(first, last):
            if layout.is_keys:
                kvmnn_dequantize_keys(
                    &layout.codes, head + h * layout.head_bytes, start, count, &rows[h, 0, 0], <size_t>rows.strides[1])
            else:
                kvmnn_dequantize_values(
                    &layout.codes, head + h * layout.head_bytes, start, count, &rows[h, 0, 0], <size_t>rows.strides[1])


def simd_level() -> str:
    """Return the SIMD level that the layout kernels were compiled for: the baseline of the architecture."""
    return (<bytes>kvmnn_layout_isa_name()).decode()
