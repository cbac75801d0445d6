"""How the attention of each step becomes the scores of tokens; a policy declares which of these it ranks by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt

from ..checks import check_count
from ..dtypes import Floats
from ..errors import KvmnnError
from ..h2o.scores import updated


@dataclass(frozen=True)
class Scoring(ABC):
    """How a step's attention is taken, and how it is added to the scores so far."""

    by_query: ClassVar[bool] = False
    """Whether `from_weights` needs each query's attention; otherwise sums over the queries are enough."""

    def from_sums(self, sums: Floats, rows: int) -> Floats:
        """What a step adds, given its attention summed over `rows` rows, heads times queries; the sums themselves."""
        return sums

    def from_weights(self, weights: npt.NDArray[Any], kv_heads: int, *, by_head: bool) -> Floats:
        """What a step adds, given its attention.

        Parameters
        ----------
        weights
            Attention probabilities ``[query_head, query, key]`` of one sequence.
        kv_heads
            Query heads in a row that share a KV head form a group.
        by_head
            Whether each KV head has scores of its own.

        Returns
        -------
        ndarray
            float32 ``[kv_head, key]``, the heads of each group summed; without `by_head` ``[key]``, all of them summed.
        """
        sums = group_sums(weights, kv_heads)
        if not by_head:
            sums = group_sums(sums[:, None], 1)[0]
        return self.from_sums(sums, weights.shape[0] * weights.shape[1])

    @abstractmethod
    def fold(self, scores: Floats, added: Floats, new: int = 1) -> Floats:
        """The scores after a step of `new` tokens that adds `added`, both of the same shape: float32."""


@final
@dataclass(frozen=True)
class Summed(Scoring):
    """All the attention that a token has drawn.

    Parameters
    ----------
    decay
        What the scores are multiplied by for each token that comes; 1: nothing fades.
    """

    decay: float = 1.0

    def fade(self, new: int) -> float:
        """What the scores before `new` tokens are multiplied by."""
        return float(self.decay) ** new

    def fold(self, scores: Floats, added: Floats, new: int = 1) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            return scores * np.float32(self.fade(new)) + added


@final
@dataclass(frozen=True)
class RunningMean(Scoring):
    """A running mean of the mean attention of each step, over heads and queries.

    Parameters
    ----------
    alpha
        Weight of the scores so far, 0 to 1.
    """

    alpha: float

    def from_sums(self, sums: Floats, rows: int) -> Floats:
        mean: Floats = sums / np.float32(max(1, rows))
        return mean

    def fold(self, scores: Floats, added: Floats, new: int = 1) -> Floats:
        return updated(scores.reshape(-1), added.reshape(-1), count=1, alpha=self.alpha).reshape(scores.shape)


@final
@dataclass(frozen=True)
class PromptMean(Scoring):
    """The attention of a prompt, averaged over the queries that could see the token and the heads of its group.

    Later steps, which have fewer queries than keys, add 0.
    """

    by_query: ClassVar[bool] = True

    def from_weights(self, weights: npt.NDArray[Any], kv_heads: int, *, by_head: bool = True) -> Floats:
        """As in `Scoring`, always by head.

        Raises
        ------
        KvmnnError
            For more queries than keys.
        """
        sums = group_sums(weights, kv_heads)
        queries, tokens = weights.shape[1:]
        if queries > tokens:
            raise KvmnnError(f"attention of {queries} queries for {tokens} keys: expected at most as many")
        if queries < tokens:
            return np.zeros_like(sums)
        seen_by = np.arange(tokens, 0, -1, dtype=np.float32)
        scores: Floats = sums / seen_by / np.float32(weights.shape[0] // kv_heads)
        return scores

    def fold(self, scores: Floats, added: Floats, new: int = 1) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            return scores + added


def group_sums(weights: npt.NDArray[Any], kv_heads: int) -> Floats:
    """Attention ``[query_head, query, key]`` summed over the queries and the query heads of each group: float32."""
    array = np.asarray(weights)
    if array.dtype.kind != "f" or array.ndim != 3:
        raise KvmnnError(f"attention is {array.dtype} {list(array.shape)}: expected floats [query_head, query, key]")
    check_count("kv_heads", kv_heads)
    if kv_heads == 0 or array.shape[0] % kv_heads:
        raise KvmnnError(f"{array.shape[0]} query heads do not form groups for {kv_heads} KV heads")
    with np.errstate(over="ignore", invalid="ignore"):
        sums = array.sum(axis=1, dtype=np.float32)
        by_group = sums.reshape(kv_heads, array.shape[0] // kv_heads, array.shape[2])
        grouped: Floats = by_group.sum(axis=1, dtype=np.float32)
    return grouped
