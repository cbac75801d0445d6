"""The KVCM weight file (docs/compressor-weights.md): header, reading, writing."""

from .header import (
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
    float32_of,
)
from .weight_file import DTYPES, WeightFile, parse, read, write

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
    "parse",
    "read",
    "write",
]
