"""What eviction costs a language model: configurations on documents, in cells, put together in rows (docs/lm.md)."""

from __future__ import annotations

from ..lm.documents import Document, TextOptions, read_documents
from .evaluating import EvaluationProgress, evaluate
from .result import EvaluationResult
from .setup.configurations import Configuration, configurations
from .setup.presets import preset
from .setup.settings import Settings

__all__ = [
    "Configuration",
    "Document",
    "EvaluationProgress",
    "EvaluationResult",
    "Settings",
    "TextOptions",
    "configurations",
    "evaluate",
    "preset",
    "read_documents",
]
