"""Engines: what multiplies. Rows of grouped tokens in, rows of new tokens out, both float32; they decide no shapes.

`NumpyEngine` is the numpy one, always there; onnx_engine.py has the other. Both round to fp16 in the same places when
asked for parity with an fp16 runtime: the inputs, every weight and bias, and the result of every Linear, once, after
its bias.
"""

from __future__ import annotations

import numpy as np

from ...dtypes import Floats
from ..kvcm.header import SLOTS_PER_PREFIX
from ..kvcm.weight_file import WeightFile
from .engine import load_linears, round_to_fp16
from .options import Precision


class NumpyEngine:
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
