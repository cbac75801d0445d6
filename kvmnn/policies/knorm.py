"""Keep a share of the prompt by key norm, in kvpress's form."""

from dataclasses import dataclass

from ..dtypes import Indices
from .base import Budgeted
from .ranking import by_rank, lowest
from .view import View


@dataclass(frozen=True, kw_only=True)
class KNorm(Budgeted):
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
    needs = "keys"
    rounds_up = False
    prompt_only = True
    budget_means = "the tokens of the prompt that stay; later ones all stay"

    def rule(self, view: View) -> Indices | None:
        size = self.size(view.tokens)
        if size >= view.tokens:
            return None
        norms = view.key_norms()
        return by_rank(norms, lowest(norms, size))
