"""Evaluate what eviction costs a language model (docs/lm.md).

Each configuration is measured on each document, which gives a cell; its cells are summarised as a row.
"""

from __future__ import annotations

from ..lm.documents import Document, TextOptions, read_documents
from .presets import expand_preset
from .result import EvaluationResult, PlotResult, plot_results, read_results
from .runner import EvaluationProgress, evaluate
from .settings import Configuration, EvaluationSettings, expand_configurations

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
