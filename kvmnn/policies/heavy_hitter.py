"""Policies that keep heavy hitters: H2O as published, H2O with decaying scores, and prompt attention as in kvpress."""

from __future__ import annotations

from typing import ClassVar

from .._util.dataclass import dataclass
from .._util.validation import validate_count
from ..dtypes import Indices
from ..errors import KvmnnError
from .policy import DEFAULT_BUFFER_TOKENS, BudgetedPolicy, PolicyInput, RequiredStats, Trigger
from .scores import MeanScores, SumScores
from .topk import argtopk_highest, select_middle_topk, sort_by_value


@dataclass(frozen=True, kw_only=True)
class H2OTokens(BudgetedPolicy):
    """Keep the first tokens, the latest, and between them those that drew the most attention; one set for all heads.

    Paper: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
    arXiv 2306.14048. Original: `H2ODynamicCache` of the StreamingLLM + H2O project.

    Scores are sums of attention over heads and queries, never decayed (`SumScores`).

    Parameters
    ----------
    budget
        Tokens that stay, of all three kinds: 256 by default. ``budget - sink - recent`` of them are heavy hitters; if
        that is below 1 there are none, and sinks and recent tokens still stay.
    sink, recent
        First and latest tokens that always stay.
    buffer
        When tokens come, the cache is cut *before* they are attended once more than ``budget + buffer`` are stored; at
        the end of a chunk it is cut where more than `budget` are.

    Notes
    -----
    Where it differs from the original:

    * Of equal scores the older token stays, and a NaN score counts as the lowest; the original leaves both to topk. It
      matters where a prompt exceeds ``budget + buffer``: its tokens have not been attended then and all score 0.
    * As in the original, new tokens have no score at their first cut. If that comes before they are attended, a chunk
      of `recent` tokens or more replaces all recent ones before it, and of a longer one most is lost; use chunks of
      at most `buffer` tokens, which are attended first.
    * The cut returns indices, and `EvictingCache` reports what was cut before attention, so that a mask can follow; the
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

    Where it differs from the original: of equal scores the older token stays; NaN counts as the lowest. Query heads
    that share a KV head add their attention up, and a single head works. `recent` of 0 means none; the original would
    slice from -0.
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


@dataclass(frozen=True, kw_only=True)
class H2ODecayed(BudgetedPolicy):
    """Keep the first tokens, the latest, and between them those with the highest decaying scores; one set for all
    heads.

    Paper: arXiv 2306.14048 (H2O), which does not fade scores. Original: kvmnn's own; the StreamingLLM + H2O project has
    the three kinds of tokens.

    Sums that never fade favour old tokens. Here every token of the text multiplies the scores before it by `decay`, so
    attention of long ago counts less.

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
    """`h2o_decayed` with separate scores and tokens for each KV head.

    Paper: arXiv 2306.14048 (H2O), whose code has a set for each head. Original: kvmnn's own.

    Parameters
    ----------
    budget, sink, recent, decay
        As for `h2o_decayed`.

    Notes
    -----
    Where it differs from the original: scores fade. With ``sink=0, decay=1`` it keeps what `h2o_heads` keeps. Query
    heads that share a KV head add their attention up.
    """

    name: ClassVar[str] = "h2o_decayed_heads"
    requires: ClassVar[RequiredStats] = "head scores"


@dataclass(frozen=True, kw_only=True)
class ObservedAttention(BudgetedPolicy):
    """Keep the tokens of the prompt that later tokens attended to most on average, highest first.

    Paper: the criterion of H2O (arXiv 2306.14048) without its recent part. Original: kvpress, `ObservedAttentionPress`.

    Parameters
    ----------
    keep_ratio
        ``1 - compression_ratio`` of kvpress; rounded down in float64.

    Notes
    -----
    A token's score is its attention, summed over the queries and divided by the number of queries that could see it,
    averaged over the query heads of the KV head's group (`MeanScores`).

    Where it differs from kvpress: of equal scores the older token comes first, so that the result is defined; NaN comes
    last; at least one token stays; the budget may also be a number of tokens.
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
