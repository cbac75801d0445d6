"""Rows of decoded layers as inputs of the linear predictor, and the selection of those that predict a layer.

A `LayerCache` comes in; its rows go out as words (element bits) and as regressors, the normalised form that the
compiled predictor reads (docs/format-linear.md). Rows of two layers are matched by the positions of their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..arrays.layer_cache import LayerCache
from ..dense.header import to_row_bytes
from ..dtypes import PARTS, Bytes, Part, Positions, infer_dtype
from ..errors import KvmnnError
from .model import LinearModel, list_blocks
from .regressors import BlockRows, Regressors


@dataclass(eq=False)
class LayerRows:
    """A layer, the words of its rows, and regressors of them, which are made when they are needed."""

    cache: LayerCache
    #: Rows of K and of V, ``[token, kv_head, head_dim]``.
    words: tuple[Bytes, Bytes]
    #: int64 ``[token]``, contiguous.
    positions: Positions
    _regressors: dict[Part, Regressors | None] = field(default_factory=dict)

    def get_words(self, part: Part) -> Bytes:
        """Return the words of K or V."""
        return self.words[PARTS.index(part)]

    def get_regressors(self, model: LinearModel, part: Part) -> Regressors | None:
        """Return the regressors of K or V; None where there are none."""
        if part not in self._regressors:
            self._regressors[part] = model.compute_regressors(self.cache, part, self.get_words(part))
        return self._regressors[part]


def build_rows(model: LinearModel, cache: LayerCache) -> LayerRows:
    """Return the rows of a layer; `KvmnnError` where the profile has a layer of other sizes."""
    if cache.layer >= len(model.layers):
        raise KvmnnError(f"layer {cache.layer}: the profile is of {len(model.layers)} layers")
    model.layers[cache.layer].check_cache(cache)
    dtype = infer_dtype(cache.keys)
    words = to_row_bytes(cache.keys, dtype), to_row_bytes(cache.values, dtype)
    return LayerRows(cache, words, np.ascontiguousarray(cache.positions))


def select_blocks(model: LinearModel, rows: LayerRows, lower: Mapping[int, LayerRows], part: Part) -> list[BlockRows]:
    """Return what predicts K or V of a layer, its tokens matched by their positions; tokens without a row have none.

    Raises
    ------
    KvmnnError
        For a layer below that is missing, or of another element type.
    """
    layer = rows.cache
    blocks: list[BlockRows] = []
    for block in list_blocks(model.layers, layer.layer, part, model.below):
        source = rows if block.layer == layer.layer else lower.get(block.layer)
        if source is None:
            raise KvmnnError(f"layer {layer.layer}: needs layer {block.layer}, which is not given")
        if source.cache.dtype != layer.dtype:
            raise KvmnnError(f"layer {block.layer} is {source.cache.dtype}, layer {layer.layer} {layer.dtype}")
        regressors = source.get_regressors(model, block.part)
        if regressors is None or not len(regressors):
            blocks.append((np.zeros((1, block.elements), np.int16), np.full(layer.tokens, -1, np.int32)))
        elif np.array_equal(source.positions, rows.positions):
            blocks.append((regressors, None))
        else:
            blocks.append((regressors, _match_positions(rows.positions, source.positions)))
    return blocks


def _match_positions(positions: Positions, lower_positions: Positions) -> npt.NDArray[np.int32]:
    """Return for each position the first of the others that is the same; -1 where none is."""
    if positions.ndim != 1:
        return np.full(positions.shape[-1], -1, np.int32)
    order = np.argsort(lower_positions, kind="stable")
    places = np.minimum(np.searchsorted(lower_positions, positions, sorter=order), len(lower_positions) - 1)
    rows = order[places]
    return np.where(lower_positions[rows] == positions, rows, -1).astype(np.int32)
