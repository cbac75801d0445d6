"""Accumulate the attention of each step to token scores; a policy declares which accumulator it ranks by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.validation import validate_count
from ..dtypes import Floats
from ..errors import KvmnnError
from .h2o.scores import update_ema_scores


@dataclass(frozen=True)
class ScoreAccumulator(ABC):
    """How the attention of a step is summed and added to the scores."""

    #: Whether `sum_weights` needs each query's attention; otherwise sums over the queries are enough.
    requires_queries: ClassVar[bool] = False

    def normalize_sums(self, sums: Floats, rows: int) -> Floats:
        """Return the scores that a step adds, given its attention summed over `rows` rows (heads times queries)."""
        return sums

    def sum_weights(self, weights: npt.NDArray[Any], kv_heads: int, *, per_head: bool, num_summed: int = 1) -> Floats:
        """Return the scores that a step adds, given its attention.

        Parameters
        ----------
        weights
            Attention probabilities ``[query_head, query, key]`` of one sequence.
        kv_heads
            Adjacent query heads that share a KV head form a group.
        per_head
            Whether each KV head has scores of its own.
        num_summed
            Queries over which each row of `weights` is summed.

        Returns
        -------
        ndarray
            float32 ``[kv_head, key]``, the heads of each group summed; without `per_head` ``[key]``, all of them
            summed.
        """
        sums = sum_by_group(weights, kv_heads)
        if not per_head:
            sums = sum_by_group(sums[:, None], 1)[0]
        return self.normalize_sums(sums, weights.shape[0] * weights.shape[1] * num_summed)

    @abstractmethod
    def fold(self, scores: Floats, step_scores: Floats, num_new: int = 1) -> Floats:
        """Return the float32 scores after a step of `num_new` tokens that adds `step_scores`, of the same shape."""


@final
@dataclass(frozen=True)
class SumScores(ScoreAccumulator):
    """Sum of all attention that a token has drawn, multiplied by `decay` for each later token (1: no decay)."""

    decay: float = 1.0

    def fade_factor(self, num_new: int) -> float:
        """Return the factor of earlier scores when `num_new` tokens are added."""
        return float(self.decay) ** num_new

    def fold(self, scores: Floats, step_scores: Floats, num_new: int = 1) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            return scores * np.float32(self.fade_factor(num_new)) + step_scores


@final
@dataclass(frozen=True)
class EmaScores(ScoreAccumulator):
    """Running mean of the attention of each step, over heads and queries; `alpha`, 0 to 1, weighs earlier scores."""

    alpha: float

    def normalize_sums(self, sums: Floats, rows: int) -> Floats:
        mean: Floats = sums / np.float32(max(1, rows))
        return mean

    def fold(self, scores: Floats, step_scores: Floats, num_new: int = 1) -> Floats:
        return update_ema_scores(scores.reshape(-1), step_scores.reshape(-1), count=1, alpha=self.alpha).reshape(
            scores.shape
        )


@final
@dataclass(frozen=True)
class MeanScores(ScoreAccumulator):
    """Attention of a prompt, averaged over the queries that could see the token and the heads of its group.

    Later steps, which have fewer queries than keys, add 0.
    """

    requires_queries: ClassVar[bool] = True

    def sum_weights(
        self, weights: npt.NDArray[Any], kv_heads: int, *, per_head: bool = True, num_summed: int = 1
    ) -> Floats:
        """Return the scores of each head; raise `KvmnnError` for more queries than keys."""
        sums = sum_by_group(weights, kv_heads)
        queries, tokens = weights.shape[1] * num_summed, weights.shape[2]
        if queries > tokens:
            raise KvmnnError(f"attention of {queries} queries for {tokens} keys: expected at most as many")
        if queries < tokens:
            return np.zeros_like(sums)
        num_observers = np.arange(tokens, 0, -1, dtype=np.float32)
        scores: Floats = sums / num_observers / np.float32(weights.shape[0] // kv_heads)
        return scores

    def fold(self, scores: Floats, step_scores: Floats, num_new: int = 1) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            return scores + step_scores


def sum_by_group(weights: npt.NDArray[Any], kv_heads: int) -> Floats:
    """Sum attention ``[query_head, query, key]`` over the queries and the query heads of each group: float32."""
    array = np.asarray(weights)
    if array.dtype.kind != "f" or array.ndim != 3:
        raise KvmnnError(f"attention is {array.dtype} {list(array.shape)}: expected floats [query_head, query, key]")
    validate_count("kv_heads", kv_heads)
    if kv_heads == 0 or array.shape[0] % kv_heads:
        raise KvmnnError(f"{array.shape[0]} query heads do not form groups for {kv_heads} KV heads")
    with np.errstate(over="ignore", invalid="ignore"):
        sums = array.sum(axis=1, dtype=np.float32)
        by_group = sums.reshape(kv_heads, array.shape[0] // kv_heads, array.shape[2])
        group_totals: Floats = by_group.sum(axis=1, dtype=np.float32)
    return group_totals
