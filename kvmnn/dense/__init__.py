"""Dense streams: lossless coding of K and V, smaller than MNN's frames and only for kvmnn (docs/format-v2.md)."""

from .decoder import decode
from .encoder import encode, encode_many
from .inspection import DenseInfo, inspect
from .rope import RopeConfig
from .rope_search import search_rope
from .shared_tables import SharedTables

__all__ = ["DenseInfo", "RopeConfig", "SharedTables", "decode", "encode", "encode_many", "inspect", "search_rope"]
