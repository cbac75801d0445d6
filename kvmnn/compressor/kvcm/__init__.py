"""The KVCM weight file (docs/compressor-weights.md): header, reading, writing."""

from .header import (
    DTYPES,
    FIELD_OFFSETS,
    HEADER_BYTES,
    MAGIC_BYTES,
    MAX_ELEMENTS,
    MAX_LAYERS,
    MAX_WEIGHTS,
    PREFIXES,
    SLOTS,
    TEXT_PREFIXES,
    Block,
    BlockPlace,
    Header,
)
from .weight_file import WeightFile, is_weight_file, is_weights, parse, read, write
from .words import float32_of

__all__ = [
    "DTYPES",
    "FIELD_OFFSETS",
    "HEADER_BYTES",
    "MAGIC_BYTES",
    "MAX_ELEMENTS",
    "MAX_LAYERS",
    "MAX_WEIGHTS",
    "PREFIXES",
    "SLOTS",
    "TEXT_PREFIXES",
    "Block",
    "BlockPlace",
    "Header",
    "WeightFile",
    "float32_of",
    "is_weight_file",
    "is_weights",
    "parse",
    "read",
    "write",
]
