"""K of an evicted prefix rotated to the first positions, where MNN, which counts from 0 after loading, continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...arrays.casting import widened
from ...arrays.layers import LayerArray
from ...dense import Rotary
from ...dense.frequencies import RopeFrequencies
from ...dtypes import Bytes, Positions
from ...errors import KvmnnError, SourceError
from ...packed.cache_info import CacheInfo, LayerInfo
from ...packed.layout import PackLayout
from ...packed.rows import HeadRows, head_bytes, row_bytes
from ...text import span
from ..row_rotation import Rerotated, RotationError, positions_of, rotate_array, rotate_rows
from .rope import ModelRope, resolve_rope

_ROWS_BYTES = 1 << 20


@dataclass(frozen=True)
class Rerotation:
    """How K of each layer of a cache is to be rotated.

    Attributes
    ----------
    info
        What the cache holds then: first positions, and the true ones as a note.
    distances
        int64 ``[token]`` of each layer: new positions less old ones.
    rope
        How K is rotated.
    result
        For people and JSON; complete when K was written.
    """

    info: CacheInfo
    distances: tuple[Positions, ...]
    rope: ModelRope
    result: Rerotated

    def rotate(self, arrays: Sequence[LayerArray]) -> list[LayerArray]:
        """Return K and V of every layer, K rotated as it is read."""
        return [self._rotate(entry) if entry.part == "key" else entry for entry in arrays]

    def _rotate(self, entry: LayerArray) -> LayerArray:
        rope, distances = self.rope.layers[entry.layer], self.distances[entry.layer]
        if rope is None or not distances.any():
            return entry
        if entry.array.order != "C" or entry.array.itemsize != entry.array.word_bytes:
            raise KvmnnError(f"array {entry.array.name!r}: K of another order than C cannot be rotated")
        array = rotate_array(entry.array, entry.token_major, distances, rope, self.result.error)
        return replace(entry, array=array)

    def rotate_file(self, layer: int, keys: Bytes, layout: PackLayout, capacity: int) -> None:
        """Rotate K of a layer where it lies, in the bytes of its packed file."""
        rope, distances = self.rope.layers[layer], self.distances[layer]
        if rope is not None and distances.any():
            _rotate_packed(keys, layout, capacity, distances, rope, self.result.error)


def plan_rerotation(
    info: CacheInfo,
    keys: Sequence[LayerArray],
    rope: Rotary | str | None,
    model: str | None,
    *,
    where: str,
    before: CacheInfo | None = None,
    is_reordered: bool = False,
) -> Rerotation:
    """Determine how K has to be rotated so that its tokens are at the first positions.

    Parameters
    ----------
    info
        What the cache holds.
    keys
        K of every layer, of the tokens of `before`; those of layers that are rotated already are not read.
    rope, model, is_reordered
        As for `resolve_rope`.
    where
        What messages call the cache.
    before
        What `keys` holds, where that is more than `info`: evidence for a trial.

    Raises
    ------
    SourceError, KvmnnError
        When the cache is int8, when layers hold different numbers of tokens, and as `resolve_rope`.
    """
    if info.layout.int8_keys:
        raise SourceError(f"{where}: int8 K cannot be rotated: the engine alone has the maxima of its channels")
    tokens = sorted({layer.tokens for layer in info.layers})
    if len(tokens) > 1:
        raise SourceError(
            f"{where}: layers hold {span(tokens)} tokens, and MNN reads the same number of rows of every layer: K "
            "cannot be rotated to positions that suit all"
        )
    distances = tuple(np.arange(layer.tokens) - positions_of(layer.positions) for layer in info.layers)
    if not any(each.any() for each in distances):
        layers = tuple(replace(layer, positions=((0, layer.tokens),)) for layer in info.layers)
        result = Rerotated(rotation="", origin="", tokens=0, layers=0, dtype=info.layout.dtype, error=RotationError())
        nothing = ModelRope((None,) * len(layers), "")
        return Rerotation(replace(info, layers=layers), distances, nothing, result)
    evidence = [positions_of(layer.positions) for layer in (before or info).layers]
    try:
        found = resolve_rope(keys, evidence, info.continues_at, rope, model, is_reordered=is_reordered)
    except SourceError as error:
        raise error if str(error).startswith((str(rope), str(model))) else SourceError(f"{where}: {error}") from None
    moved = [
        int(np.count_nonzero(each)) if one is not None else 0 for each, one in zip(distances, found.layers, strict=True)
    ]
    result = Rerotated(
        rotation=found.label,
        origin=found.origin,
        tokens=sum(moved),
        layers=sum(number > 0 for number in moved),
        dtype=keys[0].array.dtype,
        error=RotationError(),
    )
    layers = tuple(map(_at_first_positions, info.layers))
    return Rerotation(replace(info, layers=layers, next_position=None), distances, found, result)


def widen_for(arrays: Sequence[LayerArray], dtype: str) -> list[LayerArray]:
    """Return arrays as fp32 where they are written as such: rotated K is then rounded to fp32, not to their type."""
    if dtype != "fp32":
        return list(arrays)
    return [replace(entry, array=widened(entry.array)) for entry in arrays]


def _at_first_positions(layer: LayerInfo) -> LayerInfo:
    first = ((0, layer.tokens),)
    return replace(layer, positions=first, text_positions=None if layer.text_runs == first else layer.text_runs)


def _rotate_packed(
    keys: Bytes,
    layout: PackLayout,
    capacity: int,
    distances: Positions,
    rope: RopeFrequencies,
    error: RotationError,
) -> None:
    accessor, size, row = (
        HeadRows(layout, "key", capacity),
        head_bytes(layout, "key", capacity),
        row_bytes(layout, "key"),
    )
    at_once = max(1, _ROWS_BYTES // row)
    for head in range(layout.kv_heads):
        data = keys[head * size : (head + 1) * size]
        for start in range(0, len(distances), at_once):
            some = distances[start : start + at_once]
            if some.any():
                rows = np.empty(len(some) * row, np.uint8)
                accessor.read(data, start, rows)
                accessor.write(data, start, rotate_rows(rows, layout.dtype, some, rope, error))
