"""The lossless runtime: what the engine does with the cold part of a running cache, and what it should do."""

from .config import RuntimeConfig
from .metrics import LayerMetrics, RuntimeMetrics

__all__ = ["LayerMetrics", "RuntimeConfig", "RuntimeMetrics"]
