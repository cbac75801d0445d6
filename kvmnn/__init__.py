"""kvmnn: the KV cache of LLMs that run on MNN, outside the engine. See the README for a tour."""

from typing import TYPE_CHECKING

from .errors import (
    CacheDroppedWarning,
    FrameError,
    KvmnnError,
    LimitError,
    ManifestError,
    MissingDependencyError,
    OutputError,
    SourceError,
)
from .frames.block import Block, encode_block
from .frames.decoding import decode
from .frames.encoding import encode
from .frames.hashing import fnv1a64
from .frames.inspection import FrameInfo, StreamInfo, inspect
from .frames.many import decode_many, encode_many
from .h2o import plan
from .h2o.config import H2OConfig
from .h2o.plan import Plan
from .h2o.planner import Planner
from .h2o.scores import block_sums
from .packed.cache import PackedCache
from .packed.kv_meta import KVMeta
from .packed.layout import PackLayout

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """``__version__``: looked up when asked for, because importlib.metadata costs a fifth of the whole import."""
        if name == "__version__":
            from importlib.metadata import version

            return version("kvmnn")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Block",
    "CacheDroppedWarning",
    "FrameError",
    "FrameInfo",
    "H2OConfig",
    "KVMeta",
    "KvmnnError",
    "LimitError",
    "ManifestError",
    "MissingDependencyError",
    "OutputError",
    "PackLayout",
    "PackedCache",
    "Plan",
    "Planner",
    "SourceError",
    "StreamInfo",
    "__version__",
    "block_sums",
    "decode",
    "decode_many",
    "encode",
    "encode_block",
    "encode_many",
    "fnv1a64",
    "inspect",
    "plan",
]
