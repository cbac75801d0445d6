"""K and V in the packed layouts of MNN (docs/layout.md): addressing, moving tokens, caches."""

from .backends import BACKENDS
from .cache import PackedCache
from .kv_meta import KVMeta
from .layout import PackLayout

__all__ = ["BACKENDS", "KVMeta", "PackLayout", "PackedCache"]
