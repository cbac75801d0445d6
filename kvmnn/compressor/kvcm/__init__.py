"""The KVCM weight file (docs/compressor-weights.md): header, reading, writing."""

from .header import (
    DEFAULT_PREFIXES,
    DEFAULT_SLOTS,
    DTYPES,
    FIELD_OFFSETS,
    HEADER_BYTES,
    MAGIC_BYTES,
    MAX_LAYERS,
    MAX_WEIGHT_ELEMENTS,
    MAX_WEIGHTS_PER_LAYER,
    TEXT_PREFIXES,
    BlockPlacement,
    WeightBlock,
    WeightFileHeader,
)
from .weight_file import (
    WeightFile,
    has_weight_file_magic,
    is_weight_file,
    parse_weight_file,
    read_weight_file,
    write_weight_file,
)
from .words import to_float32

__all__ = [
    "DEFAULT_PREFIXES",
    "DEFAULT_SLOTS",
    "DTYPES",
    "FIELD_OFFSETS",
    "HEADER_BYTES",
    "MAGIC_BYTES",
    "MAX_LAYERS",
    "MAX_WEIGHTS_PER_LAYER",
    "MAX_WEIGHT_ELEMENTS",
    "TEXT_PREFIXES",
    "BlockPlacement",
    "WeightBlock",
    "WeightFile",
    "WeightFileHeader",
    "has_weight_file_magic",
    "is_weight_file",
    "parse_weight_file",
    "read_weight_file",
    "to_float32",
    "write_weight_file",
]
