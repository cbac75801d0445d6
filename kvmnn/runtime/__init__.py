"""The lossless runtime: what the engine does with the cold part of a running cache, and what it should do."""

from ..errors import RestoreError
from .config import RuntimeConfig
from .metrics import ReplayPoint, RuntimeLayerMetrics, RuntimeMetrics
from .replay import ReplayResult, replay_trace
from .runtime import LosslessRuntime
from .trace import KVTrace, read_attention, read_trace

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
