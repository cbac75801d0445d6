"""KV compressors: KVCM weight files, the checkpoints they are made from, and caches compressed with them.

A *checkpoint* holds what a training saved; `convert_checkpoint` makes a *weight file* (KVCM, ``.bin``) of it. A weight
file holds *compressors*: for each layer one for K and one for V of text, and often two for images, each of three
Linear layers.
"""

from typing import TYPE_CHECKING

from .._util.packages import make_lazy_getattr

if TYPE_CHECKING:
    from . import kvcm
    from .checkpoint import is_checkpoint, open_checkpoint
    from .convert import ConvertResult, convert_checkpoint, prepare_conversion
    from .export import WeightsExportResult, describe_header_differences, export_weights, to_source
    from .forward.cache_file import CompressFileResult, check_output_path, compress_file, compress_source
    from .forward.compress import CompressResult, compress_cache, compress_layers
    from .forward.onnx_graph import export_onnx
    from .forward.plan import CompressionPlan, ForwardOptions
    from .inspect import CheckpointInfo, WeightFileInfo, inspect_weights
    from .kvcm import WeightFile, has_weight_file_magic, is_weight_file, read_weight_file
    from .select import ConvertOptions
    from .verify import RejectionReport, WeightsVerifyResult, verify_weights

#: The module of each name, imported on first access (PEP 562).
_MODULE_BY_NAME = {
    "CheckpointInfo": "inspect",
    "CompressFileResult": "forward.cache_file",
    "CompressResult": "forward.compress",
    "CompressionPlan": "forward.plan",
    "ConvertResult": "convert",
    "ConvertOptions": "select",
    "WeightsExportResult": "export",
    "ForwardOptions": "forward.plan",
    "RejectionReport": "verify",
    "WeightsVerifyResult": "verify",
    "WeightFile": "kvcm",
    "WeightFileInfo": "inspect",
    "to_source": "export",
    "check_output_path": "forward.cache_file",
    "compress_cache": "forward.compress",
    "compress_file": "forward.cache_file",
    "compress_layers": "forward.compress",
    "compress_source": "forward.cache_file",
    "convert_checkpoint": "convert",
    "export_weights": "export",
    "export_onnx": "forward.onnx_graph",
    "describe_header_differences": "export",
    "inspect_weights": "inspect",
    "is_checkpoint": "checkpoint",
    "is_weight_file": "kvcm",
    "has_weight_file_magic": "kvcm",
    "kvcm": "kvcm",
    "open_checkpoint": "checkpoint",
    "prepare_conversion": "convert",
    "read_weight_file": "kvcm",
    "verify_weights": "verify",
}

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
