"""Keep a share of the tokens: those whose keys have the lowest norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..checks import validate_count
from ..dtypes import Indices
from ..errors import KvmnnError
from ..text import pluralize
from .base import BudgetedPolicy
from .ranking import argtopk_lowest, sort_by_value
from .view import PolicyInput


@dataclass(frozen=True, kw_only=True)
class L2Ratio(BudgetedPolicy):
    """Keep the tokens with the lowest key norms, each KV head its own.

    Paper: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv 2406.11430.
    Original: the paper's l2compress; `l2_compress` of the l2_compress / KnormPress project.

    Parameters
    ----------
    prune_after
        The form ``"seed"`` cuts above this many tokens, ``"original"`` from this many on.
    form
        ``"seed"``, the project's: what stays is stored in temporal order, and a cache that would lose nothing is left
        alone. ``"original"``, the paper's: it is stored by ascending norm, even where nothing is lost.
    skip_layers
        The project's default is 0 and 1; `from_paper` has none.

    Notes
    -----
    Where it differs from the originals, and why:

    * Norms are float32 for every cache; the originals take them in the cache's type, where float16 rounds many norms
      to the same value and leaves the choice among them to the sort.
    * Of equal norms the older token stays; the originals promise no order. A NaN norm goes first.
    * The newest token competes like any other, as in both originals: it can go at once.
    * The order of storage changes nothing for keys that already carry their rotary position, only what later rules
      call recent; the gain that the project ascribes to it cannot come from attention.
    """

    name: ClassVar[str] = "l2_ratio"
    requires = "keys"
    budget_help = "the tokens that stay where more than `prune_after` are stored; up to there all stay"

    prune_after: int = 1000
    form: Literal["seed", "original"] = "seed"
    skip_layers: tuple[int, ...] = (0, 1)

    @classmethod
    def from_paper(
        cls, keep_ratio: float = 1.0, *, prune_after: int = 2048, skip_layers: tuple[int, ...] = ()
    ) -> L2Ratio:
        """The paper's own code with its defaults."""
        return cls(keep_ratio=keep_ratio, prune_after=prune_after, skip_layers=skip_layers, form="original")

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_count(f"{self.name}: prune_after", self.prune_after)
        if self.form not in ("seed", "original"):
            raise KvmnnError(f"{self.name}: form is {self.form!r}: expected 'seed' or 'original'")

    def explain_no_eviction(self, prompt_tokens: int, tokens: int) -> str | None:
        if tokens < self.prune_after or (tokens == self.prune_after and self.form == "seed"):
            return (
                f"it cuts above prune_after {self.prune_after:,}, the text has {pluralize(tokens, 'token')}: lower it"
            )
        return super().explain_no_eviction(prompt_tokens, tokens)

    def select_tokens(self, state: PolicyInput) -> Indices | None:
        size = min(self.resolve_budget(state.tokens), state.tokens)
        if self.form == "original":
            keeps_all = state.tokens < self.prune_after
        else:
            keeps_all = state.tokens <= self.prune_after or size == state.tokens
        if keeps_all:
            return None
        norms = state.get_key_norms()
        indices = argtopk_lowest(norms, size)
        return sort_by_value(norms, indices) if self.form == "original" else indices
