"""Dense streams: K and V losslessly in fewer bytes than MNN's frames, for kvmnn alone (docs/format-v2.md)."""

from .decoding import decode
from .encoding import encode, encode_many
from .inspection import DenseInfo, inspect
from .rotary import Rotary
from .tables import Tables
from .trial import find_rotary

__all__ = ["DenseInfo", "Rotary", "Tables", "decode", "encode", "encode_many", "find_rotary", "inspect"]
