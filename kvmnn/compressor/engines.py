"""Engines: what multiplies. Rows of grouped tokens in, rows of new tokens out, both float32; they decide no shapes.

`MlpEngine` is the numpy one, always there; onnx_engine.py has the other. Both round to fp16 in the same places when
asked for parity with an fp16 runtime: the inputs, every weight and bias, and the result of every Linear, once, after
its bias.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..errors import KvmnnError
from .format import PREFIXES, SLOTS_PER_PREFIX, Floats, WeightFile
from .plan import EngineName, Precision


class Engine(Protocol):
    """One compressor after another, by layer and prefix (0 text K, 1 text V, 2 image K, 3 image V)."""

    def use(self, layer: int, prefix: int) -> None:
        """Make ready the compressor that the following calls of `run` apply."""

    def run(self, rows: Floats) -> Floats:
        """``[n, factor * head_dim]`` to ``[n, head_dim]``."""


class MlpEngine:
    """Three Linear layers with ReLU after the first two, by numpy.

    Parameters
    ----------
    weights
        A checked file; its compressors are taken as float32 when they are used.
    precision
        ``"fp32"``, or ``"fp16"`` to round as an fp16 runtime does.
    """

    def __init__(self, weights: WeightFile, precision: Precision) -> None:
        self._weights = weights
        self._half = precision == "fp16"
        self._linears: list[tuple[Floats, Floats | None]] = []

    def use(self, layer: int, prefix: int) -> None:
        self._linears = linears(self._weights, layer, prefix, half=self._half)

    def run(self, rows: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            for slot, (weight, bias) in enumerate(self._linears):
                rows = rows @ weight.T
                if bias is not None:
                    rows += bias
                if self._half:
                    rows = to_half(rows)
                if slot < SLOTS_PER_PREFIX - 1:
                    np.maximum(rows, 0, out=rows)
        return rows


def linears(weights: WeightFile, layer: int, prefix: int, *, half: bool) -> list[tuple[Floats, Floats | None]]:
    """Weights ``[out, in]`` and biases ``[out]`` of one compressor as float32, rounded to fp16 if `half`.

    Raises
    ------
    KvmnnError
        For values that are not finite, in the file or once they are fp16.
    """
    found: list[tuple[Floats, Floats | None]] = []
    for slot in range(SLOTS_PER_PREFIX):
        block = weights.block(layer, prefix * SLOTS_PER_PREFIX + slot)
        where = f"{weights.label}: layer {layer}, {PREFIXES[prefix]}, linear {slot}"
        weight, bias = block.weight_float32(), block.bias_float32()
        found.append(
            (
                _finite(f"{where} weight", weight, half=half),
                None if bias is None else _finite(f"{where} bias", bias, half=half),
            )
        )
    return found


def to_half(values: Floats) -> Floats:
    """float32 rounded to fp16 (nearest, ties to even) and back; beyond 65504 that is infinite."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _finite(where: str, values: Floats, *, half: bool) -> Floats:
    rounded = to_half(values) if half else values
    bad = ~np.isfinite(rounded)
    if bad.any():
        index = [int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape)]
        value = float(values[tuple(index)])
        what = "is beyond fp16" if np.isfinite(value) else "is not finite"
        raise KvmnnError(f"{where}: element {index} is {value:g}, which {what}; {int(bad.sum())} such elements")
    return rounded


def open_engine(name: EngineName, weights: WeightFile, precision: Precision) -> Engine:
    """The engine called `name`.

    Raises
    ------
    MissingDependencyError
        For ``"onnx"`` where onnx or onnxruntime is not installed.
    """
    if name == "numpy":
        return MlpEngine(weights, precision)
    from .onnx_engine import OnnxEngine

    return OnnxEngine(weights, precision)
