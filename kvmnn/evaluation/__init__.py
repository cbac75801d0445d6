"""Evaluate what eviction costs a language model (docs/lm.md).

Each configuration is measured on each document, which gives a cell; its cells are summarised as a row.
"""

from __future__ import annotations

from ..lm.documents import Document, TextOptions, read_documents
from .compression import evaluate_with_compression
from .presets import expand_preset
from .result import EvaluationResult, PlotResult, plot_results, read_results
from .runner import EvaluationProgress, RefusalWarning, evaluate
from .settings import Configuration, EvaluationSettings, expand_configurations
from .task_result import TaskEvaluation, TaskOptions
from .tasks import evaluate_tasks

__all__ = [
    "Configuration",
    "Document",
    "EvaluationProgress",
    "EvaluationResult",
    "EvaluationSettings",
    "PlotResult",
    "RefusalWarning",
    "TaskEvaluation",
    "TaskOptions",
    "TextOptions",
    "evaluate",
    "evaluate_tasks",
    "evaluate_with_compression",
    "expand_configurations",
    "expand_preset",
    "plot_results",
    "read_documents",
    "read_results",
]
