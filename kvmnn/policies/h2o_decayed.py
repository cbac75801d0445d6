"""Keep sinks, heavy hitters of late, and recent tokens: H2O whose scores fade, cut after every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..checks import validate_count
from ..dtypes import Indices
from ..errors import KvmnnError
from .base import BudgetedPolicy, RequiredStats
from .ranking import select_middle_topk
from .scoring import SumScores
from .view import PolicyInput


@dataclass(frozen=True, kw_only=True)
class H2ODecayed(BudgetedPolicy):
    """Keep the first tokens, the latest, and between them those with the highest fading scores; one set for all heads.

    Paper: arXiv 2306.14048 (H2O), which does not fade scores. Original: kvmnn's own; the StreamingLLM + H2O project has
    the three kinds of tokens.

    Sums that never fade favour tokens that have been there for long. Here every token of the text multiplies the scores
    before it by `decay`, so attention of long ago counts less.

    Parameters
    ----------
    budget
        Tokens that stay, all three kinds: 256 by default.
    sink
        First tokens that always stay.
    recent
        Latest tokens that always stay; None for half of the budget.
    decay
        0 to 1 for each token; 1 is H2O without fading.

    Notes
    -----
    Where it differs from `h2o_tokens`: the step's attention is added to the scores first, then the cache is cut, at
    every step above the budget. Of equal scores the older token stays; NaN counts as the lowest.
    """

    name: ClassVar[str] = "h2o_decayed"
    requires: ClassVar[RequiredStats] = "scores"
    default_budget = 256
    budget_help = "sinks, heavy hitters and recent tokens together"

    sink: int = 4
    recent: int | None = None
    decay: float = 0.98

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_count(f"{self.name}: sink", self.sink)
        if self.recent is not None:
            validate_count(f"{self.name}: recent", self.recent)
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float) or not 0 <= self.decay <= 1:
            raise KvmnnError(f"{self.name}: decay is {self.decay!r}: expected a number from 0 to 1")
        if self.budget is not None and self.budget < self.sink + self._resolve_recent(self.budget):
            raise KvmnnError(
                f"{self.name}: a budget of {self.budget} tokens is less than {self.sink} sinks and "
                f"{self._resolve_recent(self.budget)} recent ones"
            )

    @property
    def score_accumulator(self) -> SumScores:
        return SumScores(self.decay)

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = self.resolve_budget(state.tokens)
        if state.tokens <= size:
            return None
        num_sinks = min(self.sink, size)
        num_recent = min(self._resolve_recent(size), size - num_sinks)
        num_heavy = size - num_sinks - num_recent
        return select_middle_topk(
            state.get_row_scores(), state.tokens, sink=num_sinks, count=num_heavy, recent=num_recent, highest=True
        )

    def _resolve_recent(self, size: int) -> int:
        return size // 2 if self.recent is None else self.recent


@dataclass(frozen=True, kw_only=True)
class H2ODecayedHeads(H2ODecayed):
    """`h2o_decayed` with scores and a set of tokens for each KV head.

    Paper: arXiv 2306.14048 (H2O), whose code has a set for each head. Original: kvmnn's own.

    Parameters
    ----------
    budget, sink, recent, decay
        As for `h2o_decayed`.

    Notes
    -----
    Where it differs from the original: `h2o_heads` names the sizes as its authors do, and does not fade. With ``sink=0,
    decay=1`` it keeps what that keeps. Query heads that share a KV head add their attention up.
    """

    name: ClassVar[str] = "h2o_decayed_heads"
    requires: ClassVar[RequiredStats] = "head scores"
