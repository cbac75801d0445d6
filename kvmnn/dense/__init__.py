"""Dense streams: lossless coding of K and V, smaller than MNN's frames and only for kvmnn (docs/format-v2.md)."""

from typing import TYPE_CHECKING

from .._util.packages import make_lazy_getattr

if TYPE_CHECKING:
    from .decoder import decode
    from .encoder import encode, encode_many
    from .inspection import DenseInfo, inspect
    from .rope import RopeConfig
    from .rope_search import search_rope
    from .shared_tables import SharedTables
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        {
            "decoder": "decode",
            "encoder": "encode encode_many",
            "inspection": "DenseInfo inspect",
            "rope": "RopeConfig",
            "rope_search": "search_rope",
            "shared_tables": "SharedTables",
        },
    )

__all__ = ["DenseInfo", "RopeConfig", "SharedTables", "decode", "encode", "encode_many", "inspect", "search_rope"]
