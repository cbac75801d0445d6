"""What eviction costs a language model: configurations on documents, in cells, put together in rows (docs/lm.md)."""

from __future__ import annotations

from ..lm.documents import Document, TextOptions, read_documents
from .evaluating import EvaluationProgress, evaluate
from .result import EvaluationResult
from .saved import PlotResult, plot_results, read_results
from .setup.configurations import Configuration, expand_configurations
from .setup.presets import expand_preset
from .setup.settings import EvaluationSettings

__all__ = [
    "Configuration",
    "Document",
    "EvaluationProgress",
    "EvaluationResult",
    "EvaluationSettings",
    "PlotResult",
    "TextOptions",
    "evaluate",
    "expand_configurations",
    "expand_preset",
    "plot_results",
    "read_documents",
    "read_results",
]
