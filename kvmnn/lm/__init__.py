"""A language model with its KV cache in our hands: cut by any policy, measured, and handed on (docs/lm.md)."""

from typing import TYPE_CHECKING, Any

from .cache import ModelCache
from .generation import GenerateResult, SamplingOptions, StoredPrefixes, StoreUseStats, generate
from .importer.catalog import CatalogEntry, CatalogList, get_models_dir, list_models, pull_model
from .importer.import_result import ImportResult
from .importer.importer import import_model
from .kv_dump import KVDumpResult, dump_kv
from .onnx.decoder import StepResult
from .onnx.model_files import compute_fingerprint
from .runner import Runner, RunOptions
from .session import DecoderSession
from .tokenizer import Tokenizer
from .warm_start import InitialCache, read_initial_cache

if TYPE_CHECKING:
    from ..evaluation.runner import evaluate
else:

    def __getattr__(name: str) -> Any:
        """`evaluate`, which stands on this folder, when it is asked for (PEP 562)."""
        if name == "evaluate":
            from ..evaluation.runner import evaluate

            return evaluate
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted(__all__)


__all__ = [
    "CatalogEntry",
    "CatalogList",
    "DecoderSession",
    "GenerateResult",
    "ImportResult",
    "InitialCache",
    "KVDumpResult",
    "ModelCache",
    "RunOptions",
    "Runner",
    "SamplingOptions",
    "StepResult",
    "StoreUseStats",
    "StoredPrefixes",
    "Tokenizer",
    "compute_fingerprint",
    "dump_kv",
    "evaluate",
    "generate",
    "get_models_dir",
    "import_model",
    "list_models",
    "pull_model",
    "read_initial_cache",
]
