"""KV compressors: KVCM weight files, the checkpoints they are made from, and caches compressed with them.

A *checkpoint* holds what a training saved; `convert` makes a *weight file* (KVCM, ``.bin``) of it. A weight file holds
*compressors*: for each layer one for K and one for V of text, and often two for images, each of three Linear layers.
"""

from typing import TYPE_CHECKING

from ..lazy import names_of

if TYPE_CHECKING:
    from . import kvcm
    from .checkpoint import is_checkpoint, open_checkpoint
    from .conversion.as_source import as_source, header_differences
    from .conversion.convert import Conversion, convert, prepare
    from .conversion.export import Export, export
    from .conversion.inspect import CheckpointAccount, WeightFileAccount, inspect
    from .conversion.selection import ConvertOptions
    from .conversion.verify import Rejection, Verdict, verify
    from .forward.cache_file import CompressedFile, check_output, compress_file, compress_source
    from .forward.compressing import CompressedKV, compress, compress_layers
    from .forward.compression_plan import CompressionPlan
    from .forward.onnx_graph import export_onnx
    from .forward.options import ForwardOptions
    from .kvcm import WeightFile, is_weight_file, is_weights, read

_HOMES = {
    "CheckpointAccount": "conversion.inspect",
    "CompressedFile": "forward.cache_file",
    "CompressedKV": "forward.compressing",
    "CompressionPlan": "forward.compression_plan",
    "Conversion": "conversion.convert",
    "ConvertOptions": "conversion.selection",
    "Export": "conversion.export",
    "ForwardOptions": "forward.options",
    "Rejection": "conversion.verify",
    "Verdict": "conversion.verify",
    "WeightFile": "kvcm",
    "WeightFileAccount": "conversion.inspect",
    "as_source": "conversion.as_source",
    "check_output": "forward.cache_file",
    "compress": "forward.compressing",
    "compress_file": "forward.cache_file",
    "compress_layers": "forward.compressing",
    "compress_source": "forward.cache_file",
    "convert": "conversion.convert",
    "export": "conversion.export",
    "export_onnx": "forward.onnx_graph",
    "header_differences": "conversion.as_source",
    "inspect": "conversion.inspect",
    "is_checkpoint": "checkpoint",
    "is_weight_file": "kvcm",
    "is_weights": "kvcm",
    "kvcm": "kvcm",
    "open_checkpoint": "checkpoint",
    "prepare": "conversion.convert",
    "read": "kvcm",
    "verify": "conversion.verify",
}
"""Where each name is; its module is imported when the name is asked for (PEP 562)."""

__getattr__ = names_of(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "CheckpointAccount",
    "CompressedFile",
    "CompressedKV",
    "CompressionPlan",
    "Conversion",
    "ConvertOptions",
    "Export",
    "ForwardOptions",
    "Rejection",
    "Verdict",
    "WeightFile",
    "WeightFileAccount",
    "as_source",
    "check_output",
    "compress",
    "compress_file",
    "compress_layers",
    "compress_source",
    "convert",
    "export",
    "export_onnx",
    "header_differences",
    "inspect",
    "is_checkpoint",
    "is_weight_file",
    "is_weights",
    "kvcm",
    "open_checkpoint",
    "prepare",
    "read",
    "verify",
]
