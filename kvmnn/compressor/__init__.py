"""KV compressors: KVCM weight files, the checkpoints they are made from, and caches compressed with them.

A *checkpoint* is the saved state of a training; `convert_checkpoint` makes a *weight file* (KVCM, ``.bin``) from it. A
weight file contains *compressors*: for each layer one for K and one for V of text, and often two for images, each with
three Linear layers.
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

# A module is imported when one of its names is first accessed (PEP 562).
__getattr__ = make_lazy_getattr(
    __name__,
    {
        "checkpoint": "is_checkpoint open_checkpoint",
        "convert": "ConvertResult convert_checkpoint prepare_conversion",
        "export": "WeightsExportResult describe_header_differences export_weights to_source",
        "forward.cache_file": "CompressFileResult check_output_path compress_file compress_source",
        "forward.compress": "CompressResult compress_cache compress_layers",
        "forward.onnx_graph": "export_onnx",
        "forward.plan": "CompressionPlan ForwardOptions",
        "inspect": "CheckpointInfo WeightFileInfo inspect_weights",
        "kvcm": "WeightFile has_weight_file_magic is_weight_file kvcm read_weight_file",
        "select": "ConvertOptions",
        "verify": "RejectionReport WeightsVerifyResult verify_weights",
    },
)


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
