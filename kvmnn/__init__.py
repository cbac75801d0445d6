"""Store, compress and evict the KV caches of LLMs that run on MNN, outside the engine. See the README for a tour."""

from . import _interrupt as _interrupt  # first, because an import can be interrupted

# isort: split

from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if PathFinder.find_spec(f"{__name__}._simd", __path__) is None:  # before anything else can fail in a stranger way
    raise ImportError(
        f"kvmnn has no compiled modules in {__path__[0]}: run `pip install -e .` in the checkout, "
        "or leave it, to import the kvmnn that is installed"
    )

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

if TYPE_CHECKING:
    from . import batch as batch
    from . import compressor as compressor
    from . import dense as dense
    from . import lm as lm
    from . import policies as policies
    from . import runtime as runtime
    from . import store as store
    from .arrays import LayerCache
    from .dense import RopeConfig
    from .formats import open as open
    from .formats import to_cache
    from .frames import (
        Block,
        FrameInfo,
        StreamInfo,
        decode,
        decode_all,
        decode_many,
        encode,
        encode_block,
        encode_many,
        fnv1a64,
        inspect,
    )
    from .packed import KVMeta, PackedCache, PackLayout
    from .policies.h2o import BlockPlan, H2OConfig, H2OPlanner, plan_blocks, sum_by_block

    __version__: str
else:
    _FOLDERS = (
        "arrays",
        "bench",
        "bundle",
        "compressor",
        "dense",
        "evaluation",
        "formats",
        "frames",
        "analysis",
        "batch",
        "lm",
    )
    _FOLDERS += ("packed", "policies", "reports", "runtime", "store")
    _CODEC_NAMES = ("Block", "FrameInfo", "StreamInfo", "decode", "decode_all", "decode_many", "encode")
    _CODEC_NAMES += ("encode_block", "encode_many", "fnv1a64", "inspect")
    _FOLDER_BY_NAME = {
        "LayerCache": "arrays",
        "RopeConfig": "dense",
        "open": "formats",
        "to_cache": "formats",
        **dict.fromkeys(_CODEC_NAMES, "frames"),
        **dict.fromkeys(("BlockPlan", "H2OConfig", "H2OPlanner", "plan_blocks", "sum_by_block"), "policies.h2o"),
        **dict.fromkeys(("KVMeta", "PackLayout", "PackedCache"), "packed"),
    }

    _RENAMED = {
        "h2o": "policies.h2o",
        "many": "batch",
        "offline": "analysis",
        "codecs": "integrations",
        "Plan": "BlockPlan",
        "Planner": "H2OPlanner",
        "Rotary": "RopeConfig",
        "block_sums": "sum_by_block",
        "plan": "plan_blocks",
    }

    def __getattr__(name: str) -> Any:
        """Names are imported when they are asked for, so that ``import kvmnn`` takes no time (PEP 562)."""
        from importlib import import_module

        if name == "__version__":
            return import_module("._util.packages", __name__).get_version()
        if name in _FOLDERS:
            return import_module(f".{name}", __name__)
        if name in _FOLDER_BY_NAME:
            attribute = globals()[name] = getattr(import_module(f".{_FOLDER_BY_NAME[name]}", __name__), name)
            return attribute
        hint = f": it is {_RENAMED[name]} now" if name in _RENAMED else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")

    def __dir__() -> list[str]:
        # what one can use and nothing else: no helpers of this module, and `open` although a star import leaves it out
        return sorted({*_FOLDERS, *_FOLDER_BY_NAME, *__all__})


# Not here: `open`, which would hide the built-in one from a star import, and the folders.
__all__ = [
    "Block",
    "BlockPlan",
    "CacheDroppedWarning",
    "FrameError",
    "FrameInfo",
    "H2OConfig",
    "H2OPlanner",
    "KVMeta",
    "KvmnnError",
    "LayerCache",
    "LimitError",
    "ManifestError",
    "MissingDependencyError",
    "OutputError",
    "PackLayout",
    "PackedCache",
    "RopeConfig",
    "SourceError",
    "StreamInfo",
    "__version__",
    "decode",
    "decode_all",
    "decode_many",
    "encode",
    "encode_block",
    "encode_many",
    "fnv1a64",
    "inspect",
    "plan_blocks",
    "sum_by_block",
    "to_cache",
]
