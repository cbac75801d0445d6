"""A language model with its KV cache in our hands: cut by any policy, measured, and handed on (docs/lm.md)."""

from typing import TYPE_CHECKING

from .._util.packages import make_lazy_getattr

if TYPE_CHECKING:
    from ..evaluation.runner import evaluate
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
else:
    # lazy: a command that needs only the path of a model would wait longer for these than for its own work
    __getattr__ = make_lazy_getattr(
        __name__,
        {
            ".evaluation.runner": "evaluate",  # stands on this package
            "cache": "ModelCache",
            "generation": "GenerateResult SamplingOptions StoredPrefixes StoreUseStats generate",
            "importer.catalog": "CatalogEntry CatalogList get_models_dir list_models pull_model",
            "importer.import_result": "ImportResult",
            "importer.importer": "import_model",
            "kv_dump": "KVDumpResult dump_kv",
            "onnx.decoder": "StepResult",
            "onnx.model_files": "compute_fingerprint",
            "runner": "RunOptions Runner",
            "session": "DecoderSession",
            "tokenizer": "Tokenizer",
            "warm_start": "InitialCache read_initial_cache",
        },
    )

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
