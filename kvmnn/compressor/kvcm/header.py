"""What a KVCM weight file is made of: its constants, its header, its blocks."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import NamedTuple

from ...dtypes import BF16, FP16, FP32, DType, Elements, Floats
from ...errors import KvmnnError
from .words import to_float32

MAGIC = 0x4B56434D
MAGIC_BYTES = MAGIC.to_bytes(4, "little")
VERSION = 1
DTYPES: tuple[DType, ...] = (FP16, BF16, FP32)
"""Element types by their code in the header."""

MAX_LAYERS = 10_000
MAX_WEIGHTS_PER_LAYER = 4_096
MAX_WEIGHT_ELEMENTS = 100_000_000
"""What the runtime's loader allows: layers, weights in a layer, elements in a weight."""

DEFAULT_PREFIXES = ("compress_tk", "compress_tv", "compress_ik", "compress_iv")
"""Order in which the runtime takes the blocks of a layer: text K, text V, image K, image V."""
TEXT_PREFIXES = DEFAULT_PREFIXES[:2]
DEFAULT_SLOTS = (0, 3, 6)
"""Positions of the three Linear layers among the modules of one compressor."""
SLOTS_PER_PREFIX = 3

HEADER_STRUCT = struct.Struct("<IIHHIIIIIIII")
BLOCK_HEADER_STRUCT = struct.Struct("<III")
HEADER_BYTES = HEADER_STRUCT.size
BLOCK_HEADER_BYTES = BLOCK_HEADER_STRUCT.size
MAX_U32 = 0xFFFF_FFFF


@dataclass(frozen=True, kw_only=True)
class WeightFileHeader:
    """The 44 bytes at the start; fields are named as in the format's own document.

    Parameters
    ----------
    dtype_code
        0 fp16, 1 bf16, 2 fp32: the type of all weights and biases.
    num_layers, weight_count_per_layer
        How many blocks follow; biases are not counted.
    num_heads, head_dim, hidden_size
        For information; 0 means that the file does not say. `hidden_size` is the width of the first Linear layer,
        head_dim x compression_factor, and not the hidden size of the model.
    compression_factor, min_seq_len
        Tokens that become one, and the least number of such groups that is compressed at all.
    metadata_size_bytes
        Bytes between the header and the first block.
    """

    magic: int = MAGIC
    version: int = VERSION
    dtype_code: int
    reserved: int = 0
    num_layers: int
    num_heads: int = 0
    head_dim: int = 0
    hidden_size: int = 0
    compression_factor: int
    min_seq_len: int = 2
    weight_count_per_layer: int
    metadata_size_bytes: int = 0

    @property
    def dtype(self) -> DType:
        """The element type that `dtype_code` stands for."""
        return DTYPES[self.dtype_code]

    def pack(self) -> bytes:
        """The 44 bytes.

        Raises
        ------
        KvmnnError
            For a number that its field cannot hold.
        """
        for name, value in self.to_dict().items():
            limit = 0xFFFF if name in ("dtype_code", "reserved") else MAX_U32
            if not 0 <= value <= limit:
                value_text = value if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"
                raise KvmnnError(f"header field {name} is {value_text}: expected 0 to {limit}")
        return HEADER_STRUCT.pack(*self.to_dict().values())

    def to_dict(self) -> dict[str, int]:
        """Field names and values in file order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


FIELD_OFFSETS = dict(
    zip((f.name for f in fields(WeightFileHeader)), (0, 4, 8, 10, 12, 16, 20, 24, 28, 32, 36, 40), strict=True)
)
"""Where each header field lies (bytes)."""


@dataclass(frozen=True, eq=False)
class WeightBlock:
    """One Linear layer: ``y = x @ weight.T + bias``.

    Parameters
    ----------
    layer, index
        Which block: `index` counts within the layer, prefix by prefix and slot by slot.
    offset
        Where the block begins in the file (bytes).
    weight
        ``[rows, cols]`` (out, in) words as stored: float16, float32, or uint16 for bf16; a view, possibly unaligned.
    bias
        ``[rows]`` words, or None.
    """

    layer: int
    index: int
    offset: int
    weight: Elements
    bias: Elements | None

    @property
    def rows(self) -> int:
        """Outputs of the layer."""
        return int(self.weight.shape[0])

    @property
    def cols(self) -> int:
        """Inputs of the layer."""
        return int(self.weight.shape[1])

    @property
    def prefix(self) -> int:
        """Position of the compressor within the layer: 0 text K, 1 text V, 2 image K, 3 image V."""
        return self.index // SLOTS_PER_PREFIX

    @property
    def slot(self) -> int:
        """Position within the compressor: 0, 1, 2."""
        return self.index % SLOTS_PER_PREFIX

    @property
    def nbytes(self) -> int:
        """Bytes of the block in the file, its own 12 byte head included."""
        return BLOCK_HEADER_BYTES + self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def convert_weight_to_float32(self) -> Floats:
        """The weight as float32 ``[rows, cols]``; a view where the file holds fp32."""
        return to_float32(self.weight)

    def convert_bias_to_float32(self) -> Floats | None:
        """The bias as float32 ``[rows]``, or None."""
        return None if self.bias is None else to_float32(self.bias)


class BlockPlacement(NamedTuple):
    """Where a block lies and what its head says."""

    offset: int
    rows: int
    cols: int
    has_bias: bool
