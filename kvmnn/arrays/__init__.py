"""Data that passes between files and codecs: named arrays, sources of arrays, and caches of K and V by layer."""

from .array import ArrayInfo, LazyArray, UnsupportedArrayError
from .axes import AxisSpec
from .compare import DiffReport, ErrorStats, Mismatch, ToleranceReport, compare_allclose, compare_bitwise
from .engine_cache import EngineCacheInfo
from .engine_transforms import invert_source_transforms
from .layer_cache import LayerCache
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
