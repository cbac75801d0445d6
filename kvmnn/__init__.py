"""kvmnn: the KV cache of LLMs that run on MNN, outside the engine. See the README for a tour."""

from importlib.metadata import version as _version

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
from .kv_meta import KVMeta
from .layout import PackLayout
from .packed_cache import PackedCache

__version__ = _version("kvmnn")

__all__ = [
    "Block",
    "CacheDroppedWarning",
    "FrameError",
    "FrameInfo",
    "KVMeta",
    "KvmnnError",
    "LimitError",
    "ManifestError",
    "MissingDependencyError",
    "OutputError",
    "PackLayout",
    "PackedCache",
    "SourceError",
    "StreamInfo",
    "__version__",
    "decode",
    "decode_many",
    "encode",
    "encode_block",
    "encode_many",
    "fnv1a64",
    "inspect",
]
