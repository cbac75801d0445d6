"""Keep a fixed number of tokens: a protected recent part, and older ones chosen by key norm or at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import numpy as np

from ..checks import validate_fraction
from ..dtypes import Floats, Indices
from ..errors import KvmnnError
from .base import BudgetedPolicy
from .ranking import select_middle_topk
from .view import PolicyInput

SelectionStrategy = Literal["keep_low", "keep_high", "random"]


@dataclass(frozen=True, kw_only=True)
class L2Fixed(BudgetedPolicy):
    """Keep `budget` tokens per KV head, the latest of them protected, the others chosen by key norm.

    Paper: arXiv 2406.11430 (Devoto et al., the norm criterion). Original: `fix_size_l2_compress` of the
    l2_compress / KnormPress project, which adds the protected part and the fixed size.

    Parameters
    ----------
    budget
        Tokens that stay, 1024 by default.
    recent_ratio
        Share of the budget that is protected: ``int(budget * recent_ratio)`` latest tokens (truncated in float64, so
        0.29 of 100 is 28). 0 by default: norms alone choose, and the newest token can go at once; the project's own
        runs protect 0.2. 1 keeps the latest tokens only; above 1 more than `budget` stay. The original calls it
        keep_ratio.
    strategy
        Which of the older tokens stay: ``"keep_low"`` or ``"keep_high"`` norms, or ``"random"``: uniformly without
        replacement, anew for each head and call.
    generator
        For ``"random"`` only, and required there.

    Notes
    -----
    Where it differs from the original, and why:

    * ``random`` takes its generator as an argument instead of a global one, so that a run can be repeated; which
      tokens it draws is numpy's matter, not torch's.
    * An unknown strategy is refused when the policy is made; the original notices it when a layer first evicts.
    * Norms are float32 for every cache, of equal norms the older token stays, and a NaN norm goes first for
      ``keep_high`` too.
    * The budget may be a share of the tokens (`keep_ratio`), which the original does not have. A budget of 0 keeps
      nothing.
    """

    name: ClassVar[str] = "l2_fixed"
    requires = "keys"
    default_budget = 1024
    budget_help = "the tokens that stay, `recent_ratio` of them the latest"

    recent_ratio: float = 0.0
    strategy: SelectionStrategy = "keep_low"
    skip_layers: tuple[int, ...] = (0, 1)
    generator: np.random.Generator | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_fraction(f"{self.name}: recent_ratio", self.recent_ratio)
        if self.strategy not in get_args(SelectionStrategy):
            raise KvmnnError(
                f"{self.name}: strategy is {self.strategy!r}: expected one of {', '.join(get_args(SelectionStrategy))}"
            )
        if (self.strategy == "random") != isinstance(self.generator, np.random.Generator):
            raise KvmnnError(f"{self.name}: strategy 'random', and no other, needs generator=numpy.random.Generator")

    @property
    def requires_norms(self) -> bool:
        return self.strategy != "random"

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = self.resolve_budget(state.tokens)
        if state.tokens <= size:
            return None
        num_recent = min(int(size * self.recent_ratio), state.tokens)
        num_selected = max(size - num_recent, 0)
        values = self._get_ranking_values(state, state.tokens - num_recent if num_selected else 0)
        select_highest = self.strategy == "keep_high"
        return select_middle_topk(
            values, state.tokens, sink=0, count=num_selected, recent=num_recent, highest=select_highest
        )

    def _get_ranking_values(self, state: PolicyInput, num_candidates: int) -> Floats:
        """What the first `num_candidates` tokens are chosen by, ``[kv_head, token]``."""
        if self.generator is not None:
            return self.generator.random((state.num_key_rows, num_candidates), np.float32)
        return state.get_key_norms(num_candidates)
