"""A language model with its KV cache in our hands: cut by any policy, measured, and handed on (docs/lm.md)."""

from typing import TYPE_CHECKING, Any

from .cache.model_cache import ModelCache
from .comparison import Generated, generate
from .graph.decoder import Step
from .graph.fingerprint import fingerprint
from .kv_dump import KVDump, dump_kv
from .run_options import RunOptions
from .runner import Runner
from .sampling import Sampling
from .session import DecoderSession
from .start import Start, read_start
from .stored_prefixes import StoredPrefixes, StoreUse
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
    "Generated",
    "KVDump",
    "ModelCache",
    "RunOptions",
    "Runner",
    "Sampling",
    "Start",
    "Step",
    "StoreUse",
    "StoredPrefixes",
    "Tokenizer",
    "dump_kv",
    "evaluate",
    "fingerprint",
    "generate",
    "read_start",
]
