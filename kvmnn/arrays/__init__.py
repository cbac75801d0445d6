"""What flows between files and codecs: named arrays, sources of them, and caches of K and V by layer."""

from .axes import Laid
from .closeness import Closeness, Distance, compare_close
from .differences import Differences, Place, compare
from .engine_cache import EngineCache
from .layer_cache import LayerCache
from .named_array import ArrayInfo, NamedArray, UnsupportedArrayError
from .own_order import undo
from .source import Source

__all__ = [
    "ArrayInfo",
    "Closeness",
    "Differences",
    "Distance",
    "EngineCache",
    "Laid",
    "LayerCache",
    "NamedArray",
    "Place",
    "Source",
    "UnsupportedArrayError",
    "compare",
    "compare_close",
    "undo",
]
