"""Linear streams: K and V of layers, losslessly, predicted by a profile of the model (docs/format-linear.md)."""

from .decoder import decode_layer, decode_layers
from .encoder import encode_layer, encode_layers
from .tables import build_layer_tables, build_tables

__all__ = ["build_layer_tables", "build_tables", "decode_layer", "decode_layers", "encode_layer", "encode_layers"]
