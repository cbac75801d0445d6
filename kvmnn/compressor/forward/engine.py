"""What an engine does: matrices applied to groups of rows."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...dtypes import Floats
from ...errors import KvmnnError
from ..kvcm.header import DEFAULT_PREFIXES, SLOTS_PER_PREFIX
from ..kvcm.weight_file import WeightFile


class ForwardEngine(Protocol):
    """One compressor after another, by layer and prefix (0 text K, 1 text V, 2 image K, 3 image V)."""

    def load_compressor(self, layer: int, prefix: int) -> None:
        """Make ready the compressor that the following calls of `apply_compressor` apply."""

    def apply_compressor(self, rows: Floats) -> Floats:
        """``[n, factor * head_dim]`` to ``[n, head_dim]``."""


def load_linears(weights: WeightFile, layer: int, prefix: int, *, half: bool) -> list[tuple[Floats, Floats | None]]:
    """Weights ``[out, in]`` and biases ``[out]`` of one compressor as float32, rounded to fp16 if `half`.

    Raises
    ------
    KvmnnError
        For values that are not finite, in the file or once they are fp16.
    """
    loaded: list[tuple[Floats, Floats | None]] = []
    for slot in range(SLOTS_PER_PREFIX):
        block = weights.get_block(layer, prefix * SLOTS_PER_PREFIX + slot)
        location = f"{weights.label}: layer {layer}, {DEFAULT_PREFIXES[prefix]}, linear {slot}"
        weight, bias = block.convert_weight_to_float32(), block.convert_bias_to_float32()
        loaded.append(
            (
                _require_finite(f"{location} weight", weight, half=half),
                None if bias is None else _require_finite(f"{location} bias", bias, half=half),
            )
        )
    return loaded


def round_to_fp16(values: Floats) -> Floats:
    """float32 rounded to fp16 (nearest, ties to even) and back; beyond 65504 that is infinite."""
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
