"""Keep sinks, heavy hitters and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..checks import validate_count
from ..dtypes import Indices
from .base import DEFAULT_BUFFER_TOKENS, BudgetedPolicy
from .ranking import select_middle_topk
from .view import PolicyInput, Trigger


@dataclass(frozen=True, kw_only=True)
class H2OTokens(BudgetedPolicy):
    """Keep the first tokens, the latest, and between them those that drew the most attention; one set for all heads.

    Paper: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
    arXiv 2306.14048. Original: `H2ODynamicCache` of the StreamingLLM + H2O project.

    Scores are sums of attention over heads and queries, never decayed (`SumScores`).

    Parameters
    ----------
    budget
        Tokens that stay, all three kinds: 256 by default. ``budget - sink - recent`` are heavy hitters; where that is
        below 1 there are none, and sinks and recent tokens stay nevertheless.
    sink, recent
        First and latest tokens that always stay.
    buffer
        When tokens come, the cache is cut *before* they are attended once more than ``budget + buffer`` are stored; at
        the end of a chunk it is cut where more than `budget` are.

    Notes
    -----
    Where it differs from the original, and why:

    * Of equal scores the older token stays, and a NaN score counts as the lowest; the original leaves both to topk. It
      matters where a prompt exceeds ``budget + buffer``: its tokens have not been attended then and all score 0.
    * Kept from the original: new tokens have no score at their first cut, so of a chunk longer than `recent` most is
      lost before anything attends to it; use chunks of at most `recent` tokens.
    * The cut returns indices, and `EvictingCache` says what was cut before attention, so a mask can follow; the
      original's own mask does not.
    """

    name: ClassVar[str] = "h2o_tokens"
    requires = "scores"
    triggers = frozenset({Trigger.AFTER_APPEND, Trigger.CHUNK_END})
    default_budget = 256
    budget_help = "sinks, heavy hitters and recent tokens together; up to `buffer` more are held until it cuts"

    sink: int = 4
    recent: int = 32
    buffer: int = DEFAULT_BUFFER_TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("sink", "recent", "buffer"):
            validate_count(f"{self.name}: {field}", getattr(self, field))

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = self.resolve_budget(state.tokens)
        if state.tokens <= size + (self.buffer if state.trigger is Trigger.AFTER_APPEND else 0):
            return None
        num_sinks = min(self.sink, state.tokens)
        recent_start = max(state.tokens - self.recent, num_sinks)
        num_heavy = min(max(size - self.sink - self.recent, 0), recent_start - num_sinks)
        scores, num_recent = state.get_row_scores(), state.tokens - recent_start
        return select_middle_topk(
            scores, state.tokens, sink=num_sinks, count=num_heavy, recent=num_recent, highest=True
        )
