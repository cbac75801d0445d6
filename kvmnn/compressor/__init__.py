"""KV compressors: KVCM weight files, the checkpoints they are made from, and caches compressed with them.

A *checkpoint* holds what a training saved; `convert_checkpoint` makes a *weight file* (KVCM, ``.bin``) of it. A weight
file holds *compressors*: for each layer one for K and one for V of text, and often two for images, each of three
Linear layers.
"""

from typing import TYPE_CHECKING

from ..lazy import make_lazy_getattr

if TYPE_CHECKING:
    from . import kvcm
    from .checkpoint import is_checkpoint, open_checkpoint
    from .conversion.as_source import describe_header_differences, to_source
    from .conversion.convert import ConvertResult, convert_checkpoint, prepare_conversion
    from .conversion.export import WeightsExportResult, export_weights
    from .conversion.inspect import CheckpointInfo, WeightFileInfo, inspect_weights
    from .conversion.selection import ConvertOptions
    from .conversion.verify import RejectionReport, WeightsVerifyResult, verify_weights
    from .forward.cache_file import CompressFileResult, check_output_path, compress_file, compress_source
    from .forward.compressing import CompressResult, compress_cache, compress_layers
    from .forward.compression_plan import CompressionPlan
    from .forward.onnx_graph import export_onnx
    from .forward.options import ForwardOptions
    from .kvcm import WeightFile, has_weight_file_magic, is_weight_file, read_weight_file

_MODULE_BY_NAME = {
    "CheckpointInfo": "conversion.inspect",
    "CompressFileResult": "forward.cache_file",
    "CompressResult": "forward.compressing",
    "CompressionPlan": "forward.compression_plan",
    "ConvertResult": "conversion.convert",
    "ConvertOptions": "conversion.selection",
    "WeightsExportResult": "conversion.export",
    "ForwardOptions": "forward.options",
    "RejectionReport": "conversion.verify",
    "WeightsVerifyResult": "conversion.verify",
    "WeightFile": "kvcm",
    "WeightFileInfo": "conversion.inspect",
    "to_source": "conversion.as_source",
    "check_output_path": "forward.cache_file",
    "compress_cache": "forward.compressing",
    "compress_file": "forward.cache_file",
    "compress_layers": "forward.compressing",
    "compress_source": "forward.cache_file",
    "convert_checkpoint": "conversion.convert",
    "export_weights": "conversion.export",
    "export_onnx": "forward.onnx_graph",
    "describe_header_differences": "conversion.as_source",
    "inspect_weights": "conversion.inspect",
    "is_checkpoint": "checkpoint",
    "is_weight_file": "kvcm",
    "has_weight_file_magic": "kvcm",
    "kvcm": "kvcm",
    "open_checkpoint": "checkpoint",
    "prepare_conversion": "conversion.convert",
    "read_weight_file": "kvcm",
    "verify_weights": "conversion.verify",
}
"""Where each name is; its module is imported when the name is asked for (PEP 562)."""

__getattr__ = make_lazy_getattr(__name__, _MODULE_BY_NAME)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "CheckpointInfo",
    "CompressFileResult",
    "CompressResult",
    "CompressionPlan",
    "ConvertOptions",
    "ConvertResult",
    "ForwardOptions",
    "RejectionReport",
    "WeightFile",
    "WeightFileInfo",
    "WeightsExportResult",
    "WeightsVerifyResult",
    "check_output_path",
    "compress_cache",
    "compress_file",
    "compress_layers",
    "compress_source",
    "convert_checkpoint",
    "describe_header_differences",
    "export_onnx",
    "export_weights",
    "has_weight_file_magic",
    "inspect_weights",
    "is_checkpoint",
    "is_weight_file",
    "kvcm",
    "open_checkpoint",
    "prepare_conversion",
    "read_weight_file",
    "to_source",
    "verify_weights",
]
