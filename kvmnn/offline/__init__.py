"""The offline evaluation of the H2O work on MNN: what lossless compression of KV dumps would give, and does give."""

from typing import TYPE_CHECKING

from ..errors import OptionError
from ..lazy import make_lazy_getattr
from .options import LanePredictors, MeasureOptions, NothingSelectedError, Scope

if TYPE_CHECKING:
    from .analyses import ALL_LAYERS_SCOPE, analyze_entropy, with_all_layers
    from .analysis_report import EntropyReport, write_entropy_report
    from .dense_measuring import DenseMeasureResult, measure_dense
    from .fp16_dumps import Fp16ConvertResult, convert_to_fp16
    from .measurement import MeasureResult, build_reference_document, format_reference_json, format_reference_markdown
    from .measuring import count_work_bytes, measure_dumps
    from .selection import DumpSelection, add_source, is_dump_folder, select_dumps
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        {
            "ALL_LAYERS_SCOPE": "analyses",
            "EntropyReport": "analysis_report",
            "Fp16ConvertResult": "fp16_dumps",
            "DenseMeasureResult": "dense_measuring",
            "MeasureResult": "measurement",
            "DumpSelection": "selection",
            "with_all_layers": "analyses",
            "analyze_entropy": "analyses",
            "is_dump_folder": "selection",
            "measure_dumps": "measuring",
            "measure_dense": "dense_measuring",
            "select_dumps": "selection",
            "add_source": "selection",
            "build_reference_document": "measurement",
            "convert_to_fp16": "fp16_dumps",
            "format_reference_json": "measurement",
            "format_reference_markdown": "measurement",
            "count_work_bytes": "measuring",
            "write_entropy_report": "analysis_report",
        },
    )

__all__ = [
    "ALL_LAYERS_SCOPE",
    "DenseMeasureResult",
    "DumpSelection",
    "EntropyReport",
    "Fp16ConvertResult",
    "LanePredictors",
    "MeasureOptions",
    "MeasureResult",
    "NothingSelectedError",
    "OptionError",
    "Scope",
    "add_source",
    "analyze_entropy",
    "build_reference_document",
    "convert_to_fp16",
    "count_work_bytes",
    "format_reference_json",
    "format_reference_markdown",
    "is_dump_folder",
    "measure_dense",
    "measure_dumps",
    "select_dumps",
    "with_all_layers",
    "write_entropy_report",
]
