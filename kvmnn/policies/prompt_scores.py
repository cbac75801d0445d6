"""Scored policies that look at the queries of a whole prompt: what later queries will be like, and what all see."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from .._util.dataclass import dataclass
from .._util.validation import validate_count, validate_fraction, validate_int
from ..dtypes import Floats
from .key_value_scores import compute_leverage
from .policy import LayerState
from .scored import ScoredPolicy, TensorName, validate_share
from .tensors import (
    average_groups,
    average_neighbours,
    compute_unrotated_queries,
    get_first_query_position,
    get_queries,
    protect,
    softmax,
    standardize,
    widen,
)
from .wrappers import take_tokens_of_layer


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
        mean, spread = self.describe_queries(layer)
        matrix = build_later_rotation(layer, self.future)
        kv_heads, _, head_dim = keys.shape
        group = len(mean) // kv_heads
        repeated = np.repeat(keys, group, axis=0)
        scores = (repeated @ (mean @ matrix.T).transpose(0, 2, 1))[..., 0] / np.float32(math.sqrt(head_dim))
        if self.covariance:
            scores += ((repeated @ (matrix @ spread @ matrix.T)) * repeated).sum(axis=-1) / np.float32(2 * head_dim)
        means = average_groups(softmax(scores.astype(np.float32, copy=False)), kv_heads)
        if self.value_norm:
            means = (means + np.float32(self.epsilon)) * np.linalg.norm(values, axis=-1)
        return protect(means, sink=sink)

    def describe_queries(self, layer: LayerState) -> tuple[Floats, Floats]:
        """Return mean ``[query_head, 1, head_dim]`` and covariance of queries before their rotation."""
        queries = collect_later_queries(layer, self.sink)
        mean = queries.mean(axis=1, keepdims=True)
        centred = queries - mean
        return mean, centred.transpose(0, 2, 1) @ centred / np.float32(queries.shape[1])


@dataclass(frozen=True, kw_only=True)
class CapKV(ScoredPolicy):
    """Keep the first tokens, and those whose values add most to what later queries are expected to read.

    Paper: CapKV, arXiv 2604.25975. Original: kvpress, `CapPress`.

    Parameters
    ----------
    tau
        How much more tokens count whose keys resemble the mean later query.
    future, sink, epsilon
        As of `ExpectedAttention`.

    Notes
    -----
    A score is a weight times the leverage of the value in the weighted values of all tokens.

    Where it differs from kvpress: as `ExpectedAttention`.
    """

    name = "capkv"
    tensors: ClassVar[frozenset[TensorName]] = frozenset({"keys", "values", "queries", "rotation"})

    tau: float = 5.0
    future: int = 512
    sink: int = 4
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_int(self.future, f"{self.name}: future", 1)
        validate_count(f"{self.name}: sink", self.sink)
        for name in ("tau", "epsilon"):
            validate_fraction(f"{self.name}: {name}", getattr(self, name))

    def compute_scores(self, layer: LayerState) -> Floats:
        sink = min(self.sink, layer.tokens - 1)
        keys, values = widen(layer.keys)[:, sink:], widen(layer.values)[:, sink:]
        mean = collect_later_queries(layer, self.sink).mean(axis=1, keepdims=True)
        anchor = normalize(mean @ build_later_rotation(layer, self.future).T)
        group = len(anchor) // len(keys)
        cosines = (np.repeat(normalize(keys), group, axis=0) @ anchor.transpose(0, 2, 1))[..., 0]
        logits = np.float32(self.tau) * np.clip(cosines, -1, 1)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        repeated = np.repeat(values, group, axis=0)
        scaled = repeated * np.sqrt(weights + np.float32(self.epsilon))[..., np.newaxis]
        matrix = np.eye(values.shape[2], dtype=np.float32) + scaled.transpose(0, 2, 1) @ scaled
        if not np.isfinite(matrix).all():
            return np.full((len(keys), layer.tokens), np.nan, np.float32)
        solution = np.linalg.solve(matrix, repeated.transpose(0, 2, 1))
        leverage = (repeated * solution.transpose(0, 2, 1)).sum(axis=-1)
        return protect(average_groups(weights * leverage, len(keys)), sink=sink)


@dataclass(frozen=True, kw_only=True)
class NonCausal(ScoredPolicy):
    """Keep the tokens that the queries of their part of a prompt, earlier and later ones, attend to most.

    Paper: Chari and Van Durme, "Compactor", arXiv 2507.08143. Original: kvpress, `NonCausalAttnPress`.

    Parameters
    ----------
    part
        Tokens of a part.

    Notes
    -----
    A score is the attention of all queries of the part, times the norm of the value, averaged over neighbours.

    Where it differs from kvpress: float32 for every cache; of equal scores the older token stays. As there, scores are
    not divided by the root of the dimension, and what a last part lacks counts as tokens of score 0.
    """

    name = "non_causal"
    tensors: ClassVar[frozenset[TensorName]] = frozenset({"keys", "values", "queries"})
    requires_all_queries = True

    part: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_int(self.part, f"{self.name}: part", 1)

    def compute_scores(self, layer: LayerState) -> Floats:
        return compute_non_causal_attention(layer, self.part)


@dataclass(frozen=True, kw_only=True)
class Compactor(ScoredPolicy):
    """Keep the first and the last tokens of a prompt, and those of the highest `NonCausal` and `Leverage` scores.

    Paper: Chari and Van Durme, "Compactor", arXiv 2507.08143. Original: kvpress, `CompactorPress`.

    Parameters
    ----------
    sink, recent
        First and last tokens that have the highest scores.
    part, sketch, seed
        As of `NonCausal` and `Leverage`.
    blending
        Weight of leverage scores; None for the share of tokens that go.

    Notes
    -----
    Where it differs from kvpress: as `Leverage` and `NonCausal`.
    """

    name = "compactor"
    tensors: ClassVar[frozenset[TensorName]] = frozenset({"keys", "values", "queries", "rotation"})
    requires_all_queries = True

    sink: int = 8
    recent: int = 4
    part: int = 256
    sketch: int = 48
    seed: int = 0
    blending: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sink", "recent", "seed"):
            validate_count(f"{self.name}: {name}", getattr(self, name))
        for name in ("part", "sketch"):
            validate_int(getattr(self, name), f"{self.name}: {name}", 1)
        if self.blending is not None:
            validate_share(f"{self.name}: blending", self.blending)

    def compute_scores(self, layer: LayerState) -> Floats:
        sink = min(self.sink, layer.tokens)
        recent = min(self.recent, layer.tokens - sink)
        heads, indices = layer.num_key_rows, np.arange(sink, layer.tokens - recent)
        if not len(indices):
            return np.zeros((heads, layer.tokens), np.float32)
        middle = take_tokens_of_layer(layer, np.tile(indices, (heads, 1)))
        blending = 1 - self.resolve_share(layer.tokens) if self.blending is None else self.blending
        scores = np.float32(blending) * compute_leverage(middle, self.sketch, self.seed)
        scores = scores + compute_non_causal_attention(middle, self.part)
        return np.pad(scores, [(0, 0), (sink, recent)], constant_values=np.fmax.reduce(scores, axis=None))


def collect_later_queries(layer: LayerState, sink: int) -> Floats:
    """Return the queries, before their rotation, of all but the first `sink` tokens of the text."""
    queries = compute_unrotated_queries(layer)
    num_excluded = max(sink - get_first_query_position(layer), 0)
    return queries[:, min(num_excluded, queries.shape[1] - 1) :]


def build_later_rotation(layer: LayerState, future: int) -> Floats:
    """Return the mean rotation by the next `future` positions, ``[head_dim, head_dim]``."""
    head_dim = widen(layer.keys).shape[2]
    if layer.parameters is None or layer.parameters.rotation is None:
        return np.eye(head_dim, dtype=np.float32)
    num_seen = layer.tokens if layer.num_seen is None else layer.num_seen
    return layer.parameters.rotation.build_mean_matrix(num_seen, future, head_dim)


def compute_non_causal_attention(layer: LayerState, part: int) -> Floats:
    """Return standardized scores of `NonCausal`, ``[kv_head, token]``; queries are those of the layer's tokens."""
    queries, keys, tokens = get_queries(layer), widen(layer.keys), layer.tokens
    kv_heads, group = len(keys), len(queries) // len(keys)
    keys = np.repeat(keys, group, axis=0)
    sums = np.empty(queries.shape[:2], np.float32)
    for begin in range(0, tokens, part):
        end = min(begin + part, tokens)
        dots = np.zeros((len(queries), part, part), np.float32)
        dots[:, : end - begin, : end - begin] = queries[:, begin:end] @ keys[:, begin:end].transpose(0, 2, 1)
        sums[:, begin:end] = softmax(dots).sum(axis=1)[:, : end - begin]
    scores = average_groups(sums, kv_heads) * np.linalg.norm(widen(layer.values), axis=-1)
    return standardize(average_neighbours(scores, 3))


def normalize(vectors: Floats) -> Floats:
    """Return vectors of length 1."""
    units: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32(1e-12))
    return units
