"""Keep a share of the prompt by the attention it drew, in kvpress's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..dtypes import Indices
from .base import Budgeted
from .ranking import by_rank, highest
from .scoring import PromptMean
from .view import View


@dataclass(frozen=True, kw_only=True)
class ObservedAttention(Budgeted):
    """Keep the tokens of the prompt that later tokens attended to most on average, highest first.

    Paper: the criterion of H2O (arXiv 2306.14048) without its recent part. Original: kvpress,
    `ObservedAttentionPress`.

    Parameters
    ----------
    keep_ratio
        ``1 - compression_ratio`` of kvpress; rounded down in float64.

    Notes
    -----
    A token's score is its attention, summed over the queries and divided by the number of queries that could see it,
    averaged over the query heads of the KV head's group (`PromptMean`).

    Where it differs from kvpress, and why: of equal scores the older token comes first, so that the answer is defined;
    NaN comes last; at least one token stays, of which kvpress may leave none; the budget may also be a number of
    tokens.
    """

    name: ClassVar[str] = "observed_attention"
    needs = "head scores"
    rounds_up = False
    prompt_only = True
    budget_means = "the tokens of the prompt that stay; later ones all stay"

    @property
    def scoring(self) -> PromptMean:
        return PromptMean()

    def rule(self, view: View) -> Indices | None:
        size = self.size(view.tokens)
        if size >= view.tokens:
            return None
        scores = view.row_scores()
        return by_rank(scores, highest(scores, size), highest=True)
