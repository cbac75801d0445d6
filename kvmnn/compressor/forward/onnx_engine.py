"""The engine that lets onnxruntime multiply, with the graphs of onnx_export.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dtypes import Floats
from ...errors import KvmnnError
from ...optional import import_optional
from ..kvcm.weight_file import WeightFile
from .engine import load_linears
from .onnx_graph import CompressorKind, build_graph, list_prefix_kinds
from .options import Precision

_SILENT_LOG_LEVEL = 4  # errors are raised; its lines would carry names of the file as they are


class OnnxEngine:
    """Compressors by onnxruntime on the CPU; a session for each kind of compressor, opened when it is first used.

    Raises
    ------
    MissingDependencyError
        Where onnx or onnxruntime is not installed.
    """

    def __init__(self, weights: WeightFile, precision: Precision) -> None:
        import_optional("onnx")
        self._runtime = import_optional("onnxruntime")
        self._weights = weights
        self._precision: Precision = precision
        self._kinds: dict[tuple[int, int], CompressorKind] = {}
        self._sessions: dict[CompressorKind, Any] = {}
        self._session: Any = None
        self._layer = np.int64(0)

    def load_compressor(self, layer: int, prefix: int) -> None:
        load_linears(self._weights, layer, prefix, half=self._precision == "fp16")  # refuses what is not finite
        if (layer, prefix) not in self._kinds:
            self._kinds |= {
                (number, prefix): kind for kind in list_prefix_kinds(self._weights, prefix) for number in kind.layers
            }
        kind = self._kinds[layer, prefix]
        if kind not in self._sessions:
            self._sessions[kind] = self._open_session(kind)
        self._session = self._sessions[kind]
        self._layer = np.int64(kind.layers.index(layer))

    def apply_compressor(self, rows: Floats) -> Floats:
        try:
            (tokens,) = self._session.run(None, {"layer": np.asarray(self._layer), "rows": rows})
        except Exception as error:
            raise self._build_error(error) from error
        return np.asarray(tokens, np.float32)

    def _open_session(self, kind: CompressorKind) -> Any:
        options = self._runtime.SessionOptions()
        options.log_severity_level = _SILENT_LOG_LEVEL
        model = build_graph(self._weights, kind, self._precision)
        try:
            return self._runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise self._build_error(error) from error

    def _build_error(self, error: Exception) -> KvmnnError:
        """onnxruntime has no common class for its errors."""
        return KvmnnError(f"{self._weights.label}: onnxruntime failed: {str(error)[:200]}")
