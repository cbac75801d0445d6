"""K of an evicted prefix rotated to the first positions, where MNN, which counts from 0 after loading, continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..._util.text import format_range
from ...arrays.cast import upcast
from ...arrays.layers import LayerArray
from ...dense import RopeConfig
from ...dense.rope import RopeFrequencies
from ...dtypes import Bytes, Positions
from ...errors import KvmnnError, SourceError
from ...packed.cache_info import CacheInfo, LayerInfo
from ...packed.layout import HeadRowAccessor, PackLayout, get_head_bytes, get_row_bytes
from ..key_rotation import RerotationResult, RotationErrorStats, expand_position_runs, rotate_array, rotate_rows
from .rope import ModelRope, resolve_rope

_ROTATE_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class RerotationPlan:
    """How K of each layer of a cache is to be rotated."""

    #: What the cache holds then: first positions, and the true ones as a note.
    info: CacheInfo
    #: int64 ``[token]`` of each layer: new positions less old ones.
    distances: tuple[Positions, ...]
    #: How K is rotated.
    rope: ModelRope
    #: For people and JSON; complete when K was written.
    result: RerotationResult

    def rotate_arrays(self, arrays: Sequence[LayerArray]) -> list[LayerArray]:
        """Return K and V of every layer, K rotated as it is read."""
        return [self._rotate_array(entry) if entry.part == "key" else entry for entry in arrays]

    def _rotate_array(self, entry: LayerArray) -> LayerArray:
        rope, distances = self.rope.layers[entry.layer], self.distances[entry.layer]
        if rope is None or not distances.any():
            return entry
        if entry.array.order != "C" or entry.array.itemsize != entry.array.coded_itemsize:
            raise KvmnnError(f"array {entry.array.name!r}: K of another order than C cannot be rotated")
        array = rotate_array(entry.array, entry.token_major, distances, rope, self.result.error_stats)
        return replace(entry, array=array)

    def rotate_file(self, layer: int, keys: Bytes, layout: PackLayout, capacity: int) -> None:
        """Rotate K of a layer where it lies, in the bytes of its packed file."""
        rope, distances = self.rope.layers[layer], self.distances[layer]
        if rope is not None and distances.any():
            _rotate_packed(keys, layout, capacity, distances, rope, self.result.error_stats)


def plan_rerotation(
    info: CacheInfo,
    key_arrays: Sequence[LayerArray],
    rope: RopeConfig | str | None,
    model: str | None,
    *,
    label: str,
    evidence_info: CacheInfo | None = None,
    is_reordered: bool = False,
) -> RerotationPlan:
    """Determine how K has to be rotated so that its tokens are at the first positions."""
    if info.layout.int8_keys:
        raise SourceError(f"{label}: int8 K cannot be rotated: the engine alone has the maxima of its channels")
    token_counts = sorted({layer.tokens for layer in info.layers})
    if len(token_counts) > 1:
        raise SourceError(
            f"{label}: layers hold {format_range(token_counts)} tokens, and MNN reads the same number of rows of every "
            f"layer: K "
            "cannot be rotated to positions that suit all"
        )
    distances = tuple(np.arange(layer.tokens) - expand_position_runs(layer.positions) for layer in info.layers)
    if not any(distance.any() for distance in distances):
        layers = tuple(replace(layer, positions=((0, layer.tokens),)) for layer in info.layers)
        result = RerotationResult(
            rotation="", origin="", tokens=0, layers=0, dtype=info.layout.dtype, error_stats=RotationErrorStats()
        )
        no_rope = ModelRope((None,) * len(layers), "")
        return RerotationPlan(replace(info, layers=layers), distances, no_rope, result)
    evidence_positions = [expand_position_runs(layer.positions) for layer in (evidence_info or info).layers]
    try:
        model_rope = resolve_rope(
            key_arrays, evidence_positions, info.next_token_position, rope, model, is_reordered=is_reordered
        )
    except SourceError as error:
        raise error if str(error).startswith((str(rope), str(model))) else SourceError(f"{label}: {error}") from None
    num_moved_by_layer = [
        int(np.count_nonzero(distance)) if layer_rope is not None else 0
        for distance, layer_rope in zip(distances, model_rope.layers, strict=True)
    ]
    result = RerotationResult(
        rotation=model_rope.label,
        origin=model_rope.origin,
        tokens=sum(num_moved_by_layer),
        layers=sum(num_moved > 0 for num_moved in num_moved_by_layer),
        dtype=key_arrays[0].array.dtype,
        error_stats=RotationErrorStats(),
    )
    layers = tuple(map(_move_to_first_positions, info.layers))
    return RerotationPlan(replace(info, layers=layers, next_position=None), distances, model_rope, result)


def upcast_for_dtype(arrays: Sequence[LayerArray], dtype: str) -> list[LayerArray]:
    """Return arrays as fp32 where they are written as such: rotated K is then rounded to fp32, not to their type."""
    if dtype != "fp32":
        return list(arrays)
    return [replace(entry, array=upcast(entry.array)) for entry in arrays]


def _move_to_first_positions(layer: LayerInfo) -> LayerInfo:
    first_runs = ((0, layer.tokens),)
    return replace(
        layer,
        positions=first_runs,
        text_positions=None if layer.text_position_runs == first_runs else layer.text_position_runs,
    )


def _rotate_packed(
    keys: Bytes,
    layout: PackLayout,
    capacity: int,
    distances: Positions,
    rope: RopeFrequencies,
    error_stats: RotationErrorStats,
) -> None:
    accessor, head_bytes, row_bytes = (
        HeadRowAccessor(layout, "key", capacity),
        get_head_bytes(layout, "key", capacity),
        get_row_bytes(layout, "key"),
    )
    rows_per_chunk = max(1, _ROTATE_CHUNK_BYTES // row_bytes)
    for head in range(layout.kv_heads):
        data = keys[head * head_bytes : (head + 1) * head_bytes]
        for start in range(0, len(distances), rows_per_chunk):
            chunk_distances = distances[start : start + rows_per_chunk]
            if chunk_distances.any():
                rows = np.empty(len(chunk_distances) * row_bytes, np.uint8)
                accessor.read_rows(data, start, rows)
                accessor.write_rows(data, start, rotate_rows(rows, layout.dtype, chunk_distances, rope, error_stats))
