"""How far K and V from elsewhere are from those that the model computes of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...arrays.layer_cache import LayerCache
from ...arrays.undoing import iter_transform_combinations
from ...dtypes import PARTS, Elements, Part
from ...lm.start_files import invert_named_transforms
from ...reports.start import MIN_NON_ROUNDING_DISTANCE, LayerDistanceStats

_BLOCK_ELEMENTS = 1 << 20
"""Numbers that are compared at once in float64."""


def measure_distances(
    start: Sequence[LayerCache], computed_layers: Sequence[LayerCache]
) -> Iterator[LayerDistanceStats]:
    """Of every layer K, then V, at the positions that the start holds.

    Parameters
    ----------
    start
        K and V from elsewhere, in the model's dtype.
    computed_layers
        All tokens of the same text.
    """
    for start_layer, computed in zip(start, computed_layers, strict=True):
        for part in PARTS:
            distance = measure_distance(start_layer, computed, part, ())
            if distance.relative_distance > MIN_NON_ROUNDING_DISTANCE:
                transformed = (
                    measure_distance(start_layer, computed, part, transforms)
                    for transforms in iter_transform_combinations(part, start_layer.head_dim)
                )
                close_distance = next(
                    (
                        candidate
                        for candidate in transformed
                        if candidate.relative_distance <= MIN_NON_ROUNDING_DISTANCE
                    ),
                    None,
                )
                distance = replace(distance, undo=None if close_distance is None else close_distance.undo)
            yield distance


def measure_distance(
    start_layer: LayerCache, computed: LayerCache, part: Part, transforms: tuple[str, ...]
) -> LayerDistanceStats:
    """Return how far K or V of a layer is from the model's own, once `transforms` was undone
    (`invert_named_transforms`).
    """
    start_rows, model_rows = (getattr(cache, f"{part}s") for cache in (start_layer, computed))
    positions = np.broadcast_to(start_layer.positions, (start_layer.kv_heads, start_layer.tokens))
    heads = [
        _sum_squares(invert_named_transforms(start_rows[head], part, transforms), model_rows[head], positions[head])
        for head in range(start_layer.kv_heads)
    ]
    num_elements, num_equal, squares, own_squares = (sum(head_sums) for head_sums in zip(*heads, strict=True))
    return LayerDistanceStats(
        layer=start_layer.layer,
        part=part,
        words=int(num_elements),
        equal=int(num_equal),
        squares=float(squares),
        own_squares=float(own_squares),
        undo=transforms or None,
    )


def _sum_squares(start_rows: Elements, model_rows: Elements, positions: np.ndarray) -> tuple[float, ...]:
    """Of one head: words, equal ones, squared differences, squares of the model's own."""
    num_elements = num_equal = 0
    squares = own_squares = 0.0
    step = max(1, _BLOCK_ELEMENTS // start_rows.shape[1])
    for begin in range(0, len(positions), step):
        start_block = np.ascontiguousarray(start_rows[begin : begin + step])
        model_block = np.ascontiguousarray(model_rows[positions[begin : begin + step]])
        bits = np.dtype(f"u{start_block.itemsize}")
        num_elements, num_equal = (
            num_elements + start_block.size,
            num_equal + int(np.count_nonzero(start_block.view(bits) == model_block.view(bits))),
        )
        model_float64 = model_block.astype(np.float64)
        squares += float(np.square(start_block - model_float64).sum())
        own_squares += float(np.square(model_float64).sum())
    return num_elements, num_equal, squares, own_squares
