"""Scored policies that look at queries: SnapKV, TOVA and expected attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .._util.validation import validate_count, validate_fraction, validate_int
from ..dtypes import Floats
from ..errors import KvmnnError
from .policy import LayerState
from .scored import ScoredPolicy, TensorName
from .tensors import (
    average_groups,
    average_neighbours,
    compute_unrotated_queries,
    compute_window_attention,
    get_first_query_position,
    protect,
    softmax,
    widen,
)


@dataclass(frozen=True, kw_only=True)
class SnapKV(ScoredPolicy):
    """Keep the latest `window` tokens, and those before them that their queries attend to most.

    Paper: Li et al., "SnapKV", arXiv 2404.14469. Original: kvpress, `SnapKVPress`.

    Parameters
    ----------
    window
        The latest tokens, whose queries are observed.
    kernel
        Scores are the mean of so many neighbours, an odd number.

    Notes
    -----
    A score is the attention of the window's queries, averaged over them, over neighbours (0 beyond both ends) and over
    the query heads of the group. Attention is computed from queries and keys and scaled by ``1 / sqrt(head_dim)``.

    Where it differs from kvpress: a text shorter than the window has a smaller one instead of an error; in decoding the
    queries are those of the true positions, where kvpress rotates all by the current one; float32 for every cache; of
    equal scores, as of window tokens where the budget is smaller than the window, the older token stays.
    """

    name: ClassVar[str] = "snapkv"
    tensors = frozenset({"keys", "queries"})

    window: int = 64
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_int(self.window, f"{self.name}: window", 1)
        validate_int(self.kernel, f"{self.name}: kernel", 1)
        if self.kernel % 2 == 0:
            raise KvmnnError(f"{self.name}: kernel is {self.kernel}: expected an odd number")

    @property
    def query_window(self) -> int | None:
        return None if self.wrapper == "chunk" else self.window

    def compute_scores(self, layer: LayerState) -> Floats:
        attention = compute_window_attention(layer, self.window)
        window = attention.shape[1]
        scores = attention[..., : layer.tokens - window].mean(axis=1)
        return protect(average_groups(average_neighbours(scores, self.kernel), len(widen(layer.keys))), recent=window)


@dataclass(frozen=True, kw_only=True)
class TOVA(ScoredPolicy):
    """Keep the latest token and those that its query attends to most, the same in all heads.

    Paper: Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104. Original: kvpress, `TOVAPress`.

    Parameters
    ----------
    budget, keep_ratio, phase, interval, wrapper
        As of `ScoredPolicy`; the paper cuts at every token (``phase="both", interval=1``).

    Notes
    -----
    Where it differs from kvpress: of equal scores the older token stays; float32 for every cache. As there, the latest
    token always stays, which the paper does not say.
    """

    name = "tova"
    tensors = frozenset({"keys", "queries"})

    @property
    def query_window(self) -> int | None:
        return None if self.wrapper == "chunk" else 1

    def compute_scores(self, layer: LayerState) -> Floats:
        attention = compute_window_attention(layer, 1)
        means = attention[..., : layer.tokens - attention.shape[1]].mean(axis=0)
        return protect(np.repeat(means, len(widen(layer.keys)), axis=0), recent=1)


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(ScoredPolicy):
    """Keep the first `sink` tokens and those that queries of later positions are expected to attend to most.

    Paper: Devoto et al., "Expected Attention", arXiv 2510.00636. Original: kvpress, `ExpectedAttentionPress`.

    Parameters
    ----------
    future
        Later positions.
    sink
        First tokens that always stay, and whose queries do not count.
    covariance
        Whether the spread of queries counts as well as their mean.
    value_norm
        Whether scores are multiplied by the norms of the values.
    epsilon
        Added to scores before that.

    Notes
    -----
    Mean and covariance of the queries before their rotation are rotated by the mean rotation of the next `future`
    positions; a normal distribution of such queries gives each key an expected weight.

    Where it differs from kvpress: in decoding queries are the latest 256 with their true positions; queries are
    unrotated from rotated ones, so they differ by rounding; float32 for every cache; of equal scores the older stays.
    """

    name = "expected_attention"
    tensors: ClassVar[frozenset[TensorName]] = frozenset({"keys", "values", "queries", "rotation"})

    future: int = 512
    sink: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_int(self.future, f"{self.name}: future", 1)
        validate_count(f"{self.name}: sink", self.sink)
        validate_fraction(f"{self.name}: epsilon", self.epsilon)

    def compute_scores(self, layer: LayerState) -> Floats:
        sink = min(self.sink, layer.tokens - 1)
        keys, values = widen(layer.keys)[:, sink:], widen(layer.values)[:, sink:]
        queries = compute_unrotated_queries(layer)
        num_excluded = max(self.sink - get_first_query_position(layer), 0)
        queries = queries[:, min(num_excluded, queries.shape[1] - 1) :]
        kv_heads, _, head_dim = keys.shape
        mean = queries.mean(axis=1, keepdims=True)
        rotation = layer.parameters.rotation if layer.parameters else None
        matrix: Floats = np.eye(head_dim, dtype=np.float32)
        if rotation is not None:
            num_seen = layer.tokens if layer.num_seen is None else layer.num_seen
            matrix = rotation.build_mean_matrix(num_seen, self.future, head_dim)
        group = len(queries) // kv_heads
        repeated = np.repeat(keys, group, axis=0)
        scores = (repeated @ (mean @ matrix.T).transpose(0, 2, 1))[..., 0] / np.float32(math.sqrt(head_dim))
        if self.covariance:
            centred = queries - mean
            spread = centred.transpose(0, 2, 1) @ centred / np.float32(queries.shape[1])
            scores += ((repeated @ (matrix @ spread @ matrix.T)) * repeated).sum(axis=-1) / np.float32(2 * head_dim)
        means = average_groups(softmax(scores), kv_heads)
        if self.value_norm:
            means = (means + np.float32(self.epsilon)) * np.linalg.norm(values, axis=-1)
        return protect(means, sink=sink)
