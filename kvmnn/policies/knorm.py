"""Keep a share of the prompt by key norm, in kvpress's form."""

from dataclasses import dataclass

from ..dtypes import Indices
from .base import BudgetedPolicy
from .ranking import argtopk_lowest, sort_by_value
from .view import PolicyInput


@dataclass(frozen=True, kw_only=True)
class KNorm(BudgetedPolicy):
    """Keep the tokens of the prompt with the lowest key norms, lowest first; decoding is left alone.

    Paper: arXiv 2406.11430. Original: kvpress, `KnormPress`.

    Parameters
    ----------
    keep_ratio
        ``1 - compression_ratio`` of kvpress; rounded down in float64.

    Notes
    -----
    Where it differs from kvpress, and why: norms are float32 for every cache and of equal norms the older token comes
    first, so that the answer is defined; NaN comes last; at least one token stays, of which kvpress may leave none; the
    budget may also be a number of tokens.
    """

    name = "knorm"
    requires = "keys"
    is_rounded_up = False
    prompt_only = True
    budget_help = "the tokens of the prompt that stay; later ones all stay"

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = self.resolve_budget(state.tokens)
        if size >= state.tokens:
            return None
        norms = state.get_key_norms()
        return sort_by_value(norms, argtopk_lowest(norms, size))
