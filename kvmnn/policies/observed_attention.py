"""Keep a share of the prompt by the attention it drew, in kvpress's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..dtypes import Floats, Indices
from ..errors import KvmnnError
from .base import Budgeted, group_sums
from .ranking import by_rank, highest
from .view import LayerView, Moment


@dataclass(frozen=True, kw_only=True)
class ObservedAttention(Budgeted):
    """Keep the tokens of the prompt that later tokens attended to most on average, highest first.

    Paper: the criterion of H2O (arXiv 2306.14048) without its recent part. Seed: 004 has the same sums. Original:
    kvpress, `ObservedAttentionPress`..

    Parameters
    ----------
    keep_ratio
        ``1 - compression_ratio`` of kvpress; rounded down in float64.

    Notes
    -----
    A token's score is its attention, summed over the queries and divided by the number of queries that could see it,
    averaged over the query heads of the KV head's group (`column_sums`).

    Where it differs from kvpress, and why: of equal scores the older token comes first, so that the answer is defined;
    NaN comes last; the budget may also be a number of tokens.
    """

    name: ClassVar[str] = "observed_attention"
    needs = "head scores"
    rounds_up = False
    prompt_only = True

    def column_sums(self, weights: npt.NDArray[Any], kv_heads: int) -> Floats:
        """Scores of a prompt from its attention ``[query_head, query, key]``; 0 for a later step (fewer queries).

        Raises
        ------
        KvmnnError
            For more queries than keys.
        """
        sums = group_sums(weights, kv_heads)
        queries, tokens = weights.shape[1:]
        if queries > tokens:
            raise KvmnnError(f"{self.name}: {queries} queries for {tokens} keys: expected at most as many")
        if queries < tokens:
            return np.zeros_like(sums)
        seen_by = np.arange(tokens, 0, -1, dtype=np.float32)
        scores: Floats = sums / seen_by / np.float32(weights.shape[0] // kv_heads)
        return scores

    def _choose(self, view: LayerView, moment: Moment) -> Indices | None:
        size = self.size(view.tokens)
        if size >= view.tokens or not view.is_prompt or view.scores is None:
            return None
        return by_rank(view.scores, highest(view.scores, size), highest=True)
