"""kvmnn: the KV cache of LLMs that run on MNN, outside the engine. See the README for a tour."""

from typing import TYPE_CHECKING

from .block import Block, encode_block
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
from .frame import decode, decode_many, encode, encode_many, fnv1a64, inspect
from .frame_info import FrameInfo, StreamInfo
from .h2o import H2OConfig, Plan, Planner, block_sums, plan
from .kv_meta import KVMeta
from .layout import PackLayout
from .packed_cache import PackedCache

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
