"""Dense streams: K and V losslessly in fewer bytes than MNN's frames, for kvmnn alone (docs/format-v2.md)."""

from .decoding import decode
from .encoding import encode, encode_many
from .inspection import DenseInfo, inspect
from .rotary import RopeConfig
from .tables import SharedTables
from .trial import search_rope

__all__ = ["DenseInfo", "RopeConfig", "SharedTables", "decode", "encode", "encode_many", "inspect", "search_rope"]
