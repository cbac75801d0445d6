"""The offline evaluation of the H2O work on MNN: what lossless compression of KV dumps would give, and does give."""

from ..errors import OptionError
from .analyses import ALL_LAYERS, all_layers, analyse
from .analysis_report import AnalysisReport, write_analysis
from .dense_measuring import DenseMeasurement, measure_dense
from .fp16_dumps import Converted, to_fp16
from .measurement import Measurement, to_document, to_json, to_markdown
from .measuring import measure, work_bytes
from .options import MeasureOptions, NothingSelectedError, Predictors, Scope
from .selection import Selection, is_dump, select, select_source

__all__ = [
    "ALL_LAYERS",
    "AnalysisReport",
    "Converted",
    "DenseMeasurement",
    "MeasureOptions",
    "Measurement",
    "NothingSelectedError",
    "OptionError",
    "Predictors",
    "Scope",
    "Selection",
    "all_layers",
    "analyse",
    "is_dump",
    "measure",
    "measure_dense",
    "select",
    "select_source",
    "to_document",
    "to_fp16",
    "to_json",
    "to_markdown",
    "work_bytes",
    "write_analysis",
]
