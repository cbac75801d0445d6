"""The lossless runtime: what the engine does with the cold part of a running cache, and what it should do."""

from .config import RuntimeConfig
from .errors import RestoreError
from .history import History, attention_of, history_of
from .lossless_runtime import LosslessRuntime
from .metrics import LayerMetrics, RuntimeMetrics
from .replay_point import ReplayPoint
from .replay_result import ReplayResult
from .replaying import replay

__all__ = [
    "History",
    "LayerMetrics",
    "LosslessRuntime",
    "ReplayPoint",
    "ReplayResult",
    "RestoreError",
    "RuntimeConfig",
    "RuntimeMetrics",
    "attention_of",
    "history_of",
    "replay",
]
