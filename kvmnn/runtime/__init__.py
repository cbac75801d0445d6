"""The lossless runtime: what the engine does with the cold part of a running cache, and what it should do."""

from .config import RuntimeConfig
from .errors import RestoreError
from .history import KVTrace, read_attention, read_trace
from .lossless_runtime import LosslessRuntime
from .metrics import RuntimeLayerMetrics, RuntimeMetrics
from .replay_point import ReplayPoint
from .replay_result import ReplayResult
from .replaying import replay_trace

__all__ = [
    "KVTrace",
    "LosslessRuntime",
    "ReplayPoint",
    "ReplayResult",
    "RestoreError",
    "RuntimeConfig",
    "RuntimeLayerMetrics",
    "RuntimeMetrics",
    "read_attention",
    "read_trace",
    "replay_trace",
]
