"""The seeds' offline evaluation: what lossless compression of KV dumps would give, simulated and for real."""

from .measuring import Measurement, measure
from .options import MeasureOptions, NothingSelectedError, OptionError, Predictors, Scope
from .report import to_document, to_json, to_markdown
from .selection import Selection, select, select_source

__all__ = [
    "MeasureOptions",
    "Measurement",
    "NothingSelectedError",
    "OptionError",
    "Predictors",
    "Scope",
    "Selection",
    "measure",
    "select",
    "select_source",
    "to_document",
    "to_json",
    "to_markdown",
]
