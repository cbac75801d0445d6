"""kvmnn: the KV cache of LLMs that run on MNN, outside the engine. See the README for a tour."""

from typing import TYPE_CHECKING, Any

from .arrays.layer_cache import LayerCache
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
from .frames import (
    Block,
    FrameInfo,
    StreamInfo,
    decode,
    decode_many,
    encode,
    encode_block,
    encode_many,
    fnv1a64,
    inspect,
)
from .h2o import H2OConfig, Plan, Planner, block_sums, plan
from .packed import KVMeta, PackedCache, PackLayout

if TYPE_CHECKING:
    from . import compressor, lm, policies
    from .formats import open

    __version__: str
else:
    _LAZY = ("bench", "bundle", "compressor", "evaluation", "formats", "lm", "offline", "policies", "reports")

    def __getattr__(name: str) -> Any:
        """Folders that cost time to import, `open` and ``__version__``: when they are asked for (PEP 562)."""
        if name == "__version__":
            from .version import version

            return version()
        if name == "open":
            from .formats import open

            return open
        if name in _LAZY:
            from importlib import import_module

            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY, *__all__})


__all__ = [
    "Block",
    "CacheDroppedWarning",
    "FrameError",
    "FrameInfo",
    "H2OConfig",
    "KVMeta",
    "KvmnnError",
    "LayerCache",
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
    "compressor",
    "decode",
    "decode_many",
    "encode",
    "encode_block",
    "encode_many",
    "fnv1a64",
    "inspect",
    "lm",
    "open",
    "plan",
    "policies",
]
