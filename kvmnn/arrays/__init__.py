"""Data that passes between files and codecs: named arrays, sources of arrays, and caches of K and V by layer."""

from typing import TYPE_CHECKING

from .._util.packages import make_lazy_getattr

if TYPE_CHECKING:
    from .array import ArrayInfo, LazyArray, UnsupportedArrayError
    from .axes import AxisSpec
    from .compare import DiffReport, ErrorStats, Mismatch, ToleranceReport, compare_allclose, compare_bitwise
    from .engine_cache import EngineCacheInfo
    from .engine_transforms import invert_source_transforms
    from .layer_cache import LayerCache
    from .source import Source
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        {
            "array": "ArrayInfo LazyArray UnsupportedArrayError",
            "axes": "AxisSpec",
            "compare": "DiffReport ErrorStats Mismatch ToleranceReport compare_allclose compare_bitwise",
            "engine_cache": "EngineCacheInfo",
            "engine_transforms": "invert_source_transforms",
            "layer_cache": "LayerCache",
            "source": "Source",
        },
    )

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
