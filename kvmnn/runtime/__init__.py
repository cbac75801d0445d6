"""The lossless runtime, which stores the cold part of a running cache as frames, and an emulation of the engine's."""

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
