"""Arithmetic on K, V and queries of one layer, in float32, that scored policies share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import Floats
from ..errors import KvmnnError
from .policy import LayerState


def widen(array: npt.NDArray[Any] | None) -> Floats:
    """Return K or V as float32, which represents every value of every dtype."""
    if array is None:
        raise KvmnnError("neither K nor V: expected an array")
    if dtypes.infer_dtype(array) is dtypes.BF16:
        return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32, copy=False)


def softmax(scores: Floats) -> Floats:
    """Return the softmax of the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def average_groups(scores: Floats, kv_heads: int) -> Floats:
    """Return the means over the query heads of each KV head: ``[query_head, ...]`` becomes ``[kv_head, ...]``."""
    means: Floats = scores.reshape(kv_heads, -1, *scores.shape[1:]).mean(axis=1)
    return means


def average_neighbours(scores: Floats, count: int) -> Floats:
    """Return the mean of `count` (an odd number) values around each value of the last axis; beyond the ends are 0s."""
    padded = np.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(count // 2, count // 2)])
    means: Floats = np.lib.stride_tricks.sliding_window_view(padded, count, axis=-1).mean(axis=-1)
    return means


def protect(scores: Floats, *, sink: int = 0, recent: int = 0) -> Floats:
    """Put `sink` scores before and `recent` scores after those of each row; all are the highest of all rows plus 1."""
    highest = np.fmax.reduce(scores, axis=None, initial=-np.inf)
    return np.pad(scores, [(0, 0), (sink, recent)], constant_values=highest + 1 if np.isfinite(highest) else np.inf)


def standardize(scores: Floats) -> Floats:
    """Return the scores less their mean, over their standard deviation, both of all rows."""
    deviation = scores.std(ddof=1) if scores.size > 1 else 0.0
    standardized: Floats = (scores - scores.mean()) / np.float32(max(deviation, 1e-6))
    return standardized


def get_queries(layer: LayerState) -> Floats:
    """Return the queries of the layer; raise `KvmnnError` without any."""
    if layer.queries is None or not layer.queries.shape[1]:
        raise KvmnnError(f"layer {layer.layer}: no queries are known")
    return layer.queries


def compute_window_attention(layer: LayerState, window: int) -> Floats:
    """Return the attention of the latest `window` queries: float32 ``[query_head, window, token]``.

    Scores are multiplied by ``1 / sqrt(head_dim)``, whatever the model does. Of a shorter text all tokens but the first
    are the window.
    """
    keys, queries = widen(layer.keys), get_queries(layer)
    window = min(window, queries.shape[1], max(layer.tokens - 1, 0))
    group = queries.shape[0] // keys.shape[0]
    grouped = queries[:, queries.shape[1] - window :].reshape(keys.shape[0], group * window, -1)
    scores = (grouped @ keys.transpose(0, 2, 1)).reshape(-1, window, layer.tokens) / np.float32(
        math.sqrt(keys.shape[2])
    )
    is_later = np.triu(np.ones((window, layer.tokens), np.bool_), layer.tokens - window + 1)
    return softmax(np.where(is_later, np.float32(-np.inf), scores))


def get_first_query_position(layer: LayerState) -> int:
    """Return the true position of the first of the layer's queries, which are those of the latest tokens."""
    num_seen = layer.tokens if layer.num_seen is None else layer.num_seen
    return num_seen - int(get_queries(layer).shape[1])


def compute_unrotated_queries(layer: LayerState) -> Floats:
    """Return the queries as they were before the rotation by their positions."""
    queries, rotation = get_queries(layer), layer.parameters.rotation if layer.parameters else None
    if rotation is None:
        return queries
    first = get_first_query_position(layer)
    return rotation.undo(queries, np.arange(first, first + queries.shape[1]))


def compute_unrotated_keys(layer: LayerState) -> Floats:
    """Return the keys as they were before the rotation by their positions."""
    keys, rotation = widen(layer.keys), layer.parameters.rotation if layer.parameters else None
    if rotation is None:
        return keys
    return rotation.undo(keys, np.arange(layer.tokens) if layer.positions is None else layer.positions)
