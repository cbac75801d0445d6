"""Conversion between K and V of a layer and the float rows that transform streams code (docs/format-transform.md).

`load_rows` turns elements ``[head, token, dim]`` into rows ``[token, n]``, K without its rotation. `Regressors`
predicts rows from layers that are decoded already. `reconstruct` turns quantised coefficients back into elements.
Encoder and decoder share these functions, so that both compute the same prediction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..arrays.layer_cache import LayerCache
from ..dtypes import DType, Elements, Part, Positions, infer_dtype
from ..errors import KvmnnError
from ..profiles.geometry import LayerGeometry
from . import _codec
from .header import DTYPES
from .profile_tables import ProfileTables, SideTables

Coefficients = npt.NDArray[np.int16]
Rows = npt.NDArray[np.float32]

EXPONENT_FACTORS = np.array([1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75], np.float32)
"""Factors of a token's step by the lower two bits of its exponent."""


def check_lower_layers(layer: int, below: int, lower: Sequence[LayerCache], own: LayerCache | None) -> None:
    """Raise `KvmnnError` unless `lower` begins with the decoded layers that this one needs, from l - 1 down."""
    for distance in range(1, min(below, layer) + 1):
        if len(lower) < distance or lower[distance - 1].layer != layer - distance:
            raise KvmnnError(
                f"layer {layer}: needs layer {layer - distance}, decoded, as number {distance} of the lower ones"
            )
        if own is not None and not hold_same_tokens(own, lower[distance - 1 : distance]):
            raise KvmnnError(
                f"layer {layer}: layer {layer - distance} holds other tokens: expected the same, or below=0"
            )


def hold_same_tokens(layer: LayerCache, lower: Sequence[LayerCache]) -> bool:
    """Return whether lower layers contain the tokens of a layer."""
    return all(np.array_equal(cache.positions, layer.positions) for cache in lower)


def create_rotation(geometry: LayerGeometry, part: Part) -> _codec.Rotation:
    """Return the rotation of K of a layer; an empty one for V."""
    rope = geometry.rope if part == "key" else None
    return _codec.Rotation(None if rope is None else rope.rotation)


def get_words(elements: Elements) -> npt.NDArray[np.uint8]:
    """Return the bytes of K or V, ``[head, token, dim]``."""
    return np.ascontiguousarray(elements).view(np.uint8).reshape(-1)


def load_rows(elements: Elements, positions: Positions, geometry: LayerGeometry, part: Part) -> Rows:
    """Return K without its rotation, or V, as float32 ``[token, n]``; inf, NaN, tiny and huge numbers become 0."""
    heads, tokens, dim = elements.shape
    rows = np.empty((tokens, heads * dim), np.float32)
    number = DTYPES.index(infer_dtype(elements))
    _codec.load_rows(get_words(elements), number, heads, dim, create_rotation(geometry, part), positions, rows)
    return rows


class Regressors:
    """Normalised rows of decoded sides; each side is loaded once."""

    def __init__(self, tables: ProfileTables, lower: Sequence[LayerCache]) -> None:
        self._tables = tables
        self._caches = {cache.layer: cache for cache in lower}
        self._normalized: dict[tuple[int, Part], Coefficients] = {}

    def add(self, layer: int, part: Part, elements: Elements, positions: Positions) -> None:
        """Normalise K or V of a decoded layer and keep the result as a regressor."""
        heads, tokens, dim = elements.shape
        number = DTYPES.index(infer_dtype(elements))
        rotation = create_rotation(self._tables.layers[layer], part)
        mean, reciprocal = self._tables.get_normalization(layer, part)
        normalized = np.empty((tokens, heads * dim), np.int16)
        _codec.load_normalized(
            get_words(elements), number, heads, dim, rotation, positions, mean, reciprocal, normalized
        )
        self._normalized[layer, part] = normalized

    def predict(self, side: SideTables, tokens: int) -> npt.NDArray[np.int32] | None:
        """Return the sums that predict a side, int32 ``[token, column]``; None for one without regressors."""
        if side.weights is None:
            return None
        for layer, part in side.regressors:
            if (layer, part) not in self._normalized:
                cache = self._caches[layer]
                elements = cache.keys if part == "key" else cache.values
                self.add(layer, part, elements, np.ascontiguousarray(cache.positions))
        parts = [self._normalized[regressor] for regressor in side.regressors]
        if side.num_regressors % 2:
            parts.append(np.zeros((tokens, 1), np.int16))
        inputs = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        sums = np.empty((tokens, len(side.weights) * _codec.LANES), np.int32)
        _codec.multiply(inputs, side.weights, sums)
        return sums


def compute_token_steps(side: SideTables, step: float, exponents: npt.NDArray[np.int8] | None, tokens: int) -> Rows:
    """Return the factor from sums to elements of each token, float32 ``[token]``."""
    factor = np.float32(step) * side.unit
    if exponents is None:
        return np.full(tokens, factor, np.float32)
    wide = exponents.astype(np.int32)
    scale = np.ldexp(EXPONENT_FACTORS[wide & 3], wide >> 2).astype(np.float32)
    return np.asarray(scale * factor, np.float32)


def reconstruct(
    side: SideTables,
    coefficients: Coefficients,
    prediction: npt.NDArray[np.int32] | None,
    steps: Rows,
    dtype: DType,
    rotation: _codec.Rotation,
    positions: Positions,
) -> Elements:
    """Return the words of coefficients ``[token x n + 1]``, as ``[head, token, dim]``."""
    tokens = len(positions)
    words = np.empty((side.kv_heads, tokens, side.dim), dtype.numpy_dtype)
    _codec.reconstruct(
        coefficients,
        side.blocks,
        side.basis,
        side.diagonal,
        side.mean,
        prediction,
        side.gain,
        steps,
        DTYPES.index(dtype),
        side.kv_heads,
        side.dim,
        rotation,
        positions,
        words.view(np.uint8).reshape(-1),
    )
    return words


def allocate_coefficients(tokens: int, elements: int) -> Coefficients:
    """Return zeroed coefficients and the one more that the compiled code may read."""
    return np.zeros(tokens * elements + 1, np.int16)
