"""Engines that multiply groups of rows by a compressor's matrices: numpy, and onnxruntime (extra ``lm``).

Both round to fp16 in the same places when asked for parity with an fp16 runtime: the inputs, every weight and bias, and
the result of every Linear, once, after its bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from ..._util.packages import import_optional
from ...dtypes import Floats
from ...errors import KvmnnError
from ..kvcm import DEFAULT_PREFIXES, SLOTS_PER_PREFIX, WeightFile
from .onnx_graph import CompressorKind, build_graph, list_prefix_kinds
from .plan import EngineName, Precision


class ForwardEngine(Protocol):
    """Interface of an engine, which loads one compressor at a time by layer and prefix, and applies it to rows."""

    def load_compressor(self, layer: int, prefix: int) -> None:
        """Prepare the compressor that the following calls of `apply_compressor` apply."""

    def apply_compressor(self, rows: Floats) -> Floats:
        """Convert ``[n, factor * head_dim]`` to ``[n, head_dim]``."""


def load_linears(weights: WeightFile, layer: int, prefix: int, *, half: bool) -> list[tuple[Floats, Floats | None]]:
    """Return weights ``[out, in]`` and biases ``[out]`` of one compressor as float32, rounded to fp16 if `half`."""
    loaded: list[tuple[Floats, Floats | None]] = []
    for slot in range(SLOTS_PER_PREFIX):
        block = weights.get_block(layer, prefix * SLOTS_PER_PREFIX + slot)
        location = f"{weights.label}: layer {layer}, {DEFAULT_PREFIXES[prefix]}, linear {slot}"
        weight, bias = block.convert_weight_to_float32(), block.convert_bias_to_float32()
        weight = _require_finite(f"{location} weight", weight, half=half)
        loaded.append((weight, None if bias is None else _require_finite(f"{location} bias", bias, half=half)))
    return loaded


def round_to_fp16(values: Floats) -> Floats:
    """Round float32 to fp16 (nearest, ties to even) and back; values beyond 65504 become infinite."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _require_finite(location: str, values: Floats, *, half: bool) -> Floats:
    converted = round_to_fp16(values) if half else values
    is_invalid = ~np.isfinite(converted)
    if is_invalid.any():
        index = [int(i) for i in np.unravel_index(int(is_invalid.argmax()), is_invalid.shape)]
        value = float(values[tuple(index)])
        problem = "is beyond fp16" if np.isfinite(value) else "is not finite"
        raise KvmnnError(
            f"{location}: element {index} is {value:g}, which {problem}; {int(is_invalid.sum())} such elements"
        )
    return converted


class NumpyEngine:
    """Applies three Linear layers, with ReLU after the first two, in numpy."""

    def __init__(self, weights: WeightFile, precision: Precision) -> None:
        self._weights = weights
        self._rounds_to_fp16 = precision == "fp16"
        self._linears: list[tuple[Floats, Floats | None]] = []

    def load_compressor(self, layer: int, prefix: int) -> None:
        self._linears = load_linears(self._weights, layer, prefix, half=self._rounds_to_fp16)

    def apply_compressor(self, rows: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            for slot, (weight, bias) in enumerate(self._linears):
                rows = rows @ weight.T
                if bias is not None:
                    rows += bias
                if self._rounds_to_fp16:
                    rows = round_to_fp16(rows)
                if slot < SLOTS_PER_PREFIX - 1:
                    np.maximum(rows, 0, out=rows)
        return rows


_SILENT_LOG_LEVEL = 4  # errors are raised; its lines would carry names of the file as they are


class OnnxEngine:
    """Applies compressors in onnxruntime on the CPU, with a session for each kind of compressor."""

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
            options = self._runtime.SessionOptions()
            options.log_severity_level = _SILENT_LOG_LEVEL
            model = build_graph(self._weights, kind, self._precision)
            with self._wrap_errors():
                self._sessions[kind] = self._runtime.InferenceSession(
                    model, options, providers=["CPUExecutionProvider"]
                )
        self._session = self._sessions[kind]
        self._layer = np.int64(kind.layers.index(layer))

    def apply_compressor(self, rows: Floats) -> Floats:
        with self._wrap_errors():
            (tokens,) = self._session.run(None, {"layer": np.asarray(self._layer), "rows": rows})
        return np.asarray(tokens, np.float32)

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # onnxruntime's errors share no class
            raise KvmnnError(f"{self._weights.label}: onnxruntime failed: {str(error)[:200]}") from error


def open_engine(name: EngineName, weights: WeightFile, precision: Precision) -> ForwardEngine:
    """Open the engine called `name`."""
    return NumpyEngine(weights, precision) if name == "numpy" else OnnxEngine(weights, precision)
