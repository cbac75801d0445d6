"""Offline analysis of KV dumps, as in the H2O work on MNN: simulated, bounding and stored sizes."""

from typing import TYPE_CHECKING

from .._util.packages import make_lazy_getattr
from ..errors import OptionError
from .options import LanePredictors, MeasureOptions, NothingSelectedError, Scope

if TYPE_CHECKING:
    from .dense_measurement import DenseMeasureResult, measure_dense
    from .entropy import ALL_LAYERS_SCOPE, EntropyReport, analyze_entropy, with_all_layers, write_entropy_report
    from .fp16_conversion import Fp16ConvertResult, convert_to_fp16
    from .measurement import (
        MeasureResult,
        build_reference_document,
        count_work_bytes,
        format_reference_json,
        format_reference_markdown,
        measure_dumps,
    )
    from .selection import DumpSelection, add_source, is_dump_folder, select_dumps
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        {
            "dense_measurement": "DenseMeasureResult measure_dense",
            "entropy": "ALL_LAYERS_SCOPE EntropyReport analyze_entropy with_all_layers write_entropy_report",
            "fp16_conversion": "Fp16ConvertResult convert_to_fp16",
            "measurement": "MeasureResult build_reference_document count_work_bytes format_reference_json "
            "format_reference_markdown measure_dumps",
            "selection": "DumpSelection add_source is_dump_folder select_dumps",
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
