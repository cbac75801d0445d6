"""What flows between files and codecs: named arrays, sources of them, and caches of K and V by layer."""

from .axes import AxisSpec
from .closeness import ErrorStats, ToleranceReport, compare_allclose
from .differences import DiffReport, Mismatch, compare_bitwise
from .engine_cache import EngineCacheInfo
from .layer_cache import LayerCache
from .named_array import ArrayInfo, LazyArray, UnsupportedArrayError
from .own_order import invert_source_transforms
from .source import Source

__all__ = [
    "ArrayInfo",
    "AxisSpec",
    "DiffReport",
    "EngineCacheInfo",
    "ErrorStats",
    "LayerCache",
    "LazyArray",
    "Mismatch",
    "Source",
    "ToleranceReport",
    "UnsupportedArrayError",
    "compare_allclose",
    "compare_bitwise",
    "invert_source_transforms",
]
