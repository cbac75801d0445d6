"""Dequantise MLX's groups, by the kernels of the SIMD level that `kvmnn._simd` has chosen.

Shapes are checked; the contents may be anything.
"""

from libc.stdint cimport uint8_t

from kvmnn._simd cimport active_level

cdef extern from "kvmnn/formats/mlx/groups.h" nogil:
    enum: KVMNN_GROUPS_TYPES
    ctypedef struct kvmnn_group_rows:
        const uint8_t *codes
        const uint8_t *scales
        const uint8_t *biases
        uint8_t *out
        size_t rows, values, groups
        int bits
    ctypedef struct kvmnn_group_kernels:
        const char *name
        void (*dequantize[3])(const kvmnn_group_rows *groups) noexcept nogil

    const kvmnn_group_kernels *kvmnn_group_kernels_at(int level)

def get_level() -> str:
    """Return the name of the kernels in use."""
    return kvmnn_group_kernels_at(active_level).name.decode()


def dequantize(int kind, int bits, const uint8_t[:, ::1] codes not None, const uint8_t[:, ::1] scales not None,
               const uint8_t[:, ::1] biases not None, uint8_t[:, ::1] out not None) -> None:
    """Write code times scale plus bias of row r to out[r]; all are bytes, with words in native order.

    kind: index of the words' type in f16, bf16, f32. bits: of a code; 2, 3, 4, 5, 6 or 8.
    """
    cdef const kvmnn_group_kernels *table = kvmnn_group_kernels_at(active_level)
    cdef size_t word_bytes = 4 if kind == 2 else 2
    cdef kvmnn_group_rows groups
    if not 0 <= kind < KVMNN_GROUPS_TYPES or bits not in (2, 3, 4, 5, 6, 8):
        raise ValueError(f"type {kind} and codes of {bits} bits are none that are known")
    groups.rows, groups.values = codes.shape[0], out.shape[1] // word_bytes
    groups.groups = scales.shape[1] // word_bytes
    groups.bits = bits
    if (scales.shape[0] != codes.shape[0] or biases.shape[0] != codes.shape[0] or out.shape[0] != codes.shape[0]
            or biases.shape[1] != scales.shape[1] or scales.shape[1] % word_bytes or out.shape[1] % word_bytes):
        raise ValueError("scales, biases and numbers do not go with the codes")
    if groups.values * bits != <size_t>codes.shape[1] * 8 or (bits != 8 and groups.values % 8):
        raise ValueError("there are other numbers than codes")
    if groups.rows == 0 or groups.values == 0:
        return
    if groups.groups == 0 or groups.values % groups.groups:
        raise ValueError("the codes of a row are no whole groups")
    groups.codes, groups.scales, groups.biases, groups.out = &codes[0, 0], &scales[0, 0], &biases[0, 0], &out[0, 0]
    with nogil:
        table.dequantize[kind](&groups)
