"""A language model with its KV cache in our hands: cut by any policy, measured, and handed on (docs/lm.md)."""

from typing import TYPE_CHECKING, Any

from .cache.model_cache import ModelCache
from .comparison import GenerateResult, generate
from .graph.decoder import StepResult
from .graph.fingerprint import compute_fingerprint
from .kv_dump import KVDumpResult, dump_kv
from .run_options import RunOptions
from .runner import Runner
from .sampling import SamplingOptions
from .session import DecoderSession
from .start import InitialCache, read_initial_cache
from .stored_prefixes import StoredPrefixes, StoreUseStats
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..evaluation.evaluating import evaluate
else:

    def __getattr__(name: str) -> Any:
        """`evaluate`, which stands on this folder, when it is asked for (PEP 562)."""
        if name == "evaluate":
            from ..evaluation.evaluating import evaluate

            return evaluate
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DecoderSession",
    "GenerateResult",
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
    "read_initial_cache",
]
