"""Keep the latest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..dtypes import Indices
from .base import Budgeted
from .view import View


@dataclass(frozen=True, kw_only=True)
class RecentOnly(Budgeted):
    """Keep the `budget` latest tokens (1024 by default): a sliding window, which the others are compared with.

    Paper: the window attention that StreamingLLM (arXiv 2309.17453) compares itself with. Original:
    `fix_size_l2_compress` of the l2_compress / KnormPress project, with everything protected. Where it differs: keys
    are not looked at, so it answers once for all heads; a budget of 0 keeps nothing.
    """

    name: ClassVar[str] = "recent_only"
    needs = "lengths"
    default_budget = 1024

    skip_layers: tuple[int, ...] = (0, 1)

    def rule(self, view: View) -> Indices | None:
        size = self.size(view.tokens)
        if view.tokens <= size:
            return None
        return np.arange(view.tokens - size, view.tokens, dtype=np.int64)
