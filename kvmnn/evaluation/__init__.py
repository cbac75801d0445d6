"""Evaluate what eviction costs a language model (docs/lm.md).

Each configuration is measured on each document, which gives a cell; its cells are summarised as a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._util.packages import make_lazy_getattr

if TYPE_CHECKING:
    from ..lm.documents import Document, TextOptions, read_documents
    from .compression import evaluate_with_compression
    from .presets import expand_preset
    from .result import EvaluationResult, PlotResult, plot_results, read_results
    from .runner import EvaluationProgress, RefusalWarning, evaluate
    from .settings import Configuration, EvaluationSettings, expand_configurations
    from .task_result import TaskEvaluation, TaskOptions
    from .tasks import evaluate_tasks
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        {
            ".lm.documents": "Document TextOptions read_documents",
            "compression": "evaluate_with_compression",
            "presets": "expand_preset",
            "result": "EvaluationResult PlotResult plot_results read_results",
            "runner": "EvaluationProgress RefusalWarning evaluate",
            "settings": "Configuration EvaluationSettings expand_configurations",
            "task_result": "TaskEvaluation TaskOptions",
            "tasks": "evaluate_tasks",
        },
    )

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
