"""The offline evaluation of the H2O work on MNN: what lossless compression of KV dumps would give, and does give."""

from typing import TYPE_CHECKING

from ..errors import OptionError
from ..lazy import names_of
from .options import MeasureOptions, NothingSelectedError, Predictors, Scope

if TYPE_CHECKING:
    from .analyses import ALL_LAYERS, all_layers, analyse
    from .analysis_report import AnalysisReport, write_analysis
    from .dense_measuring import DenseMeasurement, measure_dense
    from .fp16_dumps import Converted, to_fp16
    from .measurement import Measurement, to_document, to_json, to_markdown
    from .measuring import measure, work_bytes
    from .selection import Selection, is_dump, select, select_source
else:
    __getattr__ = names_of(
        __name__,
        {
            "ALL_LAYERS": "analyses",
            "AnalysisReport": "analysis_report",
            "Converted": "fp16_dumps",
            "DenseMeasurement": "dense_measuring",
            "Measurement": "measurement",
            "Selection": "selection",
            "all_layers": "analyses",
            "analyse": "analyses",
            "is_dump": "selection",
            "measure": "measuring",
            "measure_dense": "dense_measuring",
            "select": "selection",
            "select_source": "selection",
            "to_document": "measurement",
            "to_fp16": "fp16_dumps",
            "to_json": "measurement",
            "to_markdown": "measurement",
            "work_bytes": "measuring",
            "write_analysis": "analysis_report",
        },
    )

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
