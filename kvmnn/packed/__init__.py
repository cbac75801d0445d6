"""K and V in the packed layouts of MNN (docs/layout.md): addressing, moving tokens, caches."""

from typing import TYPE_CHECKING

from .._util.packages import make_lazy_getattr
from .backends import BACKENDS

if TYPE_CHECKING:
    from .cache import PackedCache
    from .compaction import KVMeta
    from .inference import PackedGeometry
    from .layout import PackLayout
else:
    # the command line needs `BACKENDS`, and no numpy
    __getattr__ = make_lazy_getattr(
        __name__,
        {"compaction": "KVMeta", "layout": "PackLayout", "cache": "PackedCache", "inference": "PackedGeometry"},
    )


__all__ = ["BACKENDS", "KVMeta", "PackLayout", "PackedCache", "PackedGeometry"]
