"""Keep heavy hitters and recent tokens, each head its own: H2O as its authors wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..checks import validate_count
from ..dtypes import Indices
from ..errors import KvmnnError
from .base import BudgetedPolicy
from .ranking import select_middle_topk
from .view import PolicyInput


@dataclass(frozen=True, kw_only=True)
class H2OHeads(BudgetedPolicy):
    """Keep, in each KV head, the tokens that drew the most attention and the latest ones.

    Paper: arXiv 2306.14048 (H2O). Original: FMInference/H2O, `H2OKVCache_LayerWise`.

    Parameters
    ----------
    budget
        Tokens that stay: 516 by default, of which ``budget - recent`` are heavy hitters.
    recent
        Latest tokens that always stay.

    Notes
    -----
    The step's attention is added to the scores first, then the cache is cut, at every step above the budget.

    Where it differs from the original, and why:

    * Of equal scores the older token stays; NaN counts as the lowest.
    * Query heads that share a KV head add their attention up; the original knows no groups. One head works, too, where
      the original loses an axis.
    * `recent` of 0 means none; the original would slice from -0.
    """

    name: ClassVar[str] = "h2o_heads"
    requires = "head scores"
    default_budget = 516
    budget_help = "heavy hitters and recent tokens together"

    recent: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_count(f"{self.name}: recent", self.recent)
        if self.budget is not None and self.budget < self.recent:
            raise KvmnnError(
                f"{self.name}: a budget of {self.budget} tokens is less than the {self.recent} recent ones"
            )

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = self.resolve_budget(state.tokens)
        if state.tokens <= size:
            return None
        num_recent = min(self.recent, size)
        return select_middle_topk(
            state.get_row_scores(), state.tokens, sink=0, count=size - num_recent, recent=num_recent, highest=True
        )
