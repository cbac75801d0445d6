"""What an engine does: matrices applied to groups of rows."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...dtypes import Floats
from ...errors import KvmnnError
from ..kvcm.header import PREFIXES, SLOTS_PER_PREFIX
from ..kvcm.weight_file import WeightFile


class Engine(Protocol):
    """One compressor after another, by layer and prefix (0 text K, 1 text V, 2 image K, 3 image V)."""

    def use(self, layer: int, prefix: int) -> None:
        """Make ready the compressor that the following calls of `run` apply."""

    def run(self, rows: Floats) -> Floats:
        """``[n, factor * head_dim]`` to ``[n, head_dim]``."""


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
