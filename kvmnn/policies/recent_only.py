"""Keep the latest tokens."""

from dataclasses import dataclass

import numpy as np

from ..dtypes import Indices
from .base import BudgetedPolicy
from .view import PolicyInput


@dataclass(frozen=True, kw_only=True)
class RecentOnly(BudgetedPolicy):
    """Keep the `budget` latest tokens: a sliding window, which the others are compared with.

    Paper: the window attention that StreamingLLM (arXiv 2309.17453) compares itself with. Original:
    `fix_size_l2_compress` of the l2_compress / KnormPress project, with everything protected.

    Parameters
    ----------
    budget
        Tokens that stay, 1024 by default.

    Notes
    -----
    Where it differs from the original: keys are not looked at, heads keep the same; a budget of 0 keeps nothing.
    """

    name = "recent_only"
    requires = "lengths"
    default_budget = 1024
    skip_layers: tuple[int, ...] = (0, 1)

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = self.resolve_budget(state.tokens)
        if state.tokens <= size:
            return None
        return np.arange(state.tokens - size, state.tokens, dtype=np.int64)
