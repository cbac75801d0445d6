"""Dequantise blocks of ggml's types, by the kernels of the SIMD level that `kvmnn._simd` has chosen.

Shapes are checked; the contents may be anything.
"""

from libc.stdint cimport uint8_t

from kvmnn._simd cimport active_level

cdef extern from "kvmnn/formats/llama/blocks.h" nogil:
    enum: KVMNN_BLOCK_VALUES
    enum: KVMNN_BLOCK_KINDS
    ctypedef struct kvmnn_block_rows:
        const uint8_t *source
        size_t rows, count, stride
    ctypedef struct kvmnn_block_kernels:
        const char *name
        void (*dequantize[6])(const kvmnn_block_rows *blocks, float *to) noexcept nogil

    const kvmnn_block_kernels *kvmnn_block_kernels_at(int level)
    size_t kvmnn_block_bytes(int kind)

def get_level() -> str:
    """Return the name of the kernels in use."""
    return kvmnn_block_kernels_at(active_level).name.decode()


def dequantize(int kind, const uint8_t[:, :, :] blocks not None, float[:, ::1] out not None) -> None:
    """Write number i of block blocks[r, b, :] to out[r, 32 * b + i]; the blocks of a row are contiguous.

    kind: index of the type in q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl.
    """
    cdef const kvmnn_block_kernels *table = kvmnn_block_kernels_at(active_level)
    cdef Py_ssize_t count = blocks.shape[1], size = blocks.shape[2]
    cdef kvmnn_block_rows rows
    if not 0 <= kind < KVMNN_BLOCK_KINDS or <size_t>size != kvmnn_block_bytes(kind):
        raise ValueError(f"blocks of {size} bytes are not of type {kind}")
    if blocks.shape[0] != out.shape[0] or count * KVMNN_BLOCK_VALUES != out.shape[1]:
        raise ValueError("there are other numbers than blocks")
    if count and (blocks.strides[2] != 1 or blocks.strides[1] != size):
        raise ValueError("the blocks of a row do not lie together")
    if count == 0 or blocks.shape[0] == 0:
        return
    rows.source, rows.rows, rows.count, rows.stride = &blocks[0, 0, 0], blocks.shape[0], count, blocks.strides[0]
    with nogil:
        table.dequantize[kind](&rows, &out[0, 0])
