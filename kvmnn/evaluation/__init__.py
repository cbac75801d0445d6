"""What eviction costs a language model: configurations on documents, in cells, put together in rows (docs/lm.md)."""

from __future__ import annotations

from ..lm.documents import Document, TextOptions, read_documents
from .evaluating import EvaluationProgress, evaluate
from .result import EvaluationResult
from .saved import Plotted, plot, read_results
from .setup.configurations import Configuration, configurations
from .setup.presets import preset
from .setup.settings import Settings

__all__ = [
    "Configuration",
    "Document",
    "EvaluationProgress",
    "EvaluationResult",
    "Plotted",
    "Settings",
    "TextOptions",
    "configurations",
    "evaluate",
    "plot",
    "preset",
    "read_documents",
    "read_results",
]
