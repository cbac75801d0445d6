"""Keep a share of the prompt by the attention it drew, in kvpress's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..dtypes import Indices
from .base import BudgetedPolicy
from .ranking import argtopk_highest, sort_by_value
from .scoring import MeanScores
from .view import PolicyInput


@dataclass(frozen=True, kw_only=True)
class ObservedAttention(BudgetedPolicy):
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
    averaged over the query heads of the KV head's group (`MeanScores`).

    Where it differs from kvpress, and why: of equal scores the older token comes first, so that the answer is defined;
    NaN comes last; at least one token stays, of which kvpress may leave none; the budget may also be a number of
    tokens.
    """

    name: ClassVar[str] = "observed_attention"
    requires = "head scores"
    is_rounded_up = False
    prompt_only = True
    budget_help = "the tokens of the prompt that stay; later ones all stay"

    @property
    def score_accumulator(self) -> MeanScores:
        return MeanScores()

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = self.resolve_budget(state.tokens)
        if size >= state.tokens:
            return None
        scores = state.get_row_scores()
        return sort_by_value(scores, argtopk_highest(scores, size), highest=True)
