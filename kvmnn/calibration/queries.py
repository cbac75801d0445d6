"""What the queries of a model are like: the tables ``queries`` of a profile, which policies read.

For each layer, in the order in which the model lays out a head: mean and covariance of the queries before their
rotation, a filter (the direction in which rotated queries are longest), and how evenly a head attends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays.layer_cache import LayerCache
from ..dtypes import Floats
from ..policies.layer_parameters import LayerParameters
from ..policies.tensors import softmax, widen
from ..profiles.statistics import NUM_SINKS

Moments = npt.NDArray[np.float64]

_PATTERN_TOKENS = 500
"""Tokens over which a head's attention is judged, as in kvpress' estimate of DuoAttention's patterns."""

_NAMES = ("means", "moments", "rotated_means", "rotated_moments", "key_means")


class QueryMoments:
    """Sums of queries, of their products, and of keys, over all tokens of texts but the sinks.

    Parameters
    ----------
    parameters
        Rotation of each layer.
    query_heads, kv_heads, head_dim
        Sizes of every layer.
    """

    def __init__(self, parameters: Sequence[LayerParameters], query_heads: int, kv_heads: int, head_dim: int) -> None:
        self._parameters = tuple(parameters)
        self._kv_heads = kv_heads
        layers = len(parameters)
        rows, squares = (layers, query_heads, head_dim), (layers, query_heads, head_dim, head_dim)
        shapes = (rows, squares, rows, squares, (layers, kv_heads, head_dim))
        self._sums: dict[str, Moments] = {name: np.zeros(shape) for name, shape in zip(_NAMES, shapes, strict=True)}
        self.num_queries = self.num_keys = 0

    def add_queries(self, queries: Sequence[Floats], first: int) -> None:
        """Add rotated queries of every layer, float32 ``[query_head, token, head_dim]``, from position `first` on."""
        positions = np.arange(first, first + queries[0].shape[1])
        is_used = positions >= NUM_SINKS
        self.num_queries += int(is_used.sum())
        for layer, layer_queries in enumerate(queries):
            rotated = layer_queries[:, is_used].astype(np.float64)
            rotation = self._parameters[layer].rotation
            plain = rotated if rotation is None else rotation.undo(layer_queries[:, is_used], positions[is_used])
            for prefix, rows in (("", plain.astype(np.float64)), ("rotated_", rotated)):
                self._sums[f"{prefix}means"][layer] += rows.sum(axis=1)
                self._sums[f"{prefix}moments"][layer] += rows.transpose(0, 2, 1) @ rows

    def add_keys(self, layers: Sequence[LayerCache]) -> None:
        """Add the rotated keys of all tokens of a text."""
        positions = np.arange(NUM_SINKS, layers[0].tokens)
        self.num_keys += len(positions)
        for layer, cache in enumerate(layers):
            keys, rotation = widen(cache.keys)[:, NUM_SINKS:], self._parameters[layer].rotation
            plain = keys if rotation is None else rotation.undo(keys, positions)
            self._sums["key_means"][layer] += plain.sum(axis=1, dtype=np.float64)

    def build_tables(self) -> dict[str, Floats]:
        """Return the arrays of a profile, float32; none where no queries were added."""
        if self.num_queries < 2 or not self.num_keys:
            return {}
        tables: dict[str, Moments] = {}
        for layer in range(len(self._parameters)):
            mean = self._sums["means"][layer] / self.num_queries
            squares = self._sums["moments"][layer] - self.num_queries * mean[:, :, None] * mean[:, None, :]
            named_tables = {
                "mean": mean,
                "covariance": squares / (self.num_queries - 1),
                "filter": self._find_filters(layer),
                "score": self._score_heads(layer, mean),
            }
            tables |= {f"queries/{layer}/key/{name}": table for name, table in named_tables.items()}
        return {name: np.ascontiguousarray(table, np.float32) for name, table in tables.items()}

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the sums as arrays that `restore` takes."""
        arrays: dict[str, npt.NDArray[Any]] = {f"extras/queries/{name}": array for name, array in self._sums.items()}
        return {**arrays, "extras/queries/counts": np.array([self.num_queries, self.num_keys])}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the sums of `to_arrays`; `ValueError` or `KeyError` for arrays of other layers."""
        for name, sums in self._sums.items():
            sums[:] = arrays[f"extras/queries/{name}"]
        self.num_queries, self.num_keys = map(int, arrays["extras/queries/counts"])

    def _find_filters(self, layer: int) -> Moments:
        """Return the first right singular vector of each head's queries, averaged over groups: ``[kv_head, dim]``."""
        moments, sums = self._sums["rotated_moments"][layer], self._sums["rotated_means"][layer]
        vectors = np.linalg.eigh(moments)[1][..., -1]
        vectors = vectors * np.where((vectors * sums).sum(axis=-1, keepdims=True) < 0, -1, 1)
        return _average_groups(vectors, self._kv_heads)

    def _score_heads(self, layer: int, mean_queries: Moments) -> Moments:
        """Return the area under the cumulated attention of the mean query to mean keys, ``[kv_head]``."""
        mean_keys = self._sums["key_means"][layer] / self.num_keys
        group = len(mean_queries) // self._kv_heads
        keys = np.repeat(np.repeat(mean_keys, group, axis=0)[:, None], _PATTERN_TOKENS, axis=1).astype(np.float32)
        queries, rotation = mean_queries.astype(np.float32), self._parameters[layer].rotation
        if rotation is not None:  # a query at the last position sees keys turned back by their distance
            keys = rotation.undo(keys, np.arange(_PATTERN_TOKENS)[::-1])
        weights = softmax((keys @ queries[:, :, None])[..., 0] / np.float32(math.sqrt(keys.shape[2])))
        return _average_groups(np.cumsum(weights, axis=1, dtype=np.float64).mean(axis=1), self._kv_heads)


def _average_groups(values: Moments, kv_heads: int) -> Moments:
    means: Moments = values.reshape(kv_heads, -1, *values.shape[1:]).mean(axis=1)
    return means
