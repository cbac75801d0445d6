"""The lossless runtime: what the engine does with the cold part of a running cache, and what it should do."""

from .config import RuntimeConfig
from .errors import RestoreError
from .lossless_runtime import LosslessRuntime
from .metrics import LayerMetrics, RuntimeMetrics

__all__ = ["LayerMetrics", "LosslessRuntime", "RestoreError", "RuntimeConfig", "RuntimeMetrics"]
