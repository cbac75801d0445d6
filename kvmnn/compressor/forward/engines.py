"""The engines by name."""

from __future__ import annotations

from ..kvcm.weight_file import WeightFile
from .engine import ForwardEngine
from .numpy_engine import NumpyEngine
from .options import EngineName, Precision


def open_engine(name: EngineName, weights: WeightFile, precision: Precision) -> ForwardEngine:
    """The engine called `name`.

    Raises
    ------
    MissingDependencyError
        For ``"onnx"`` where onnx or onnxruntime is not installed.
    """
    if name == "numpy":
        return NumpyEngine(weights, precision)
    from .onnx_engine import OnnxEngine

    return OnnxEngine(weights, precision)
