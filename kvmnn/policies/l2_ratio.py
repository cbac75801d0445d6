"""Keep a share of the tokens: those whose keys have the lowest norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..checks import check_count
from ..dtypes import Indices
from ..errors import KvmnnError
from ..text import count
from .base import Budgeted
from .ranking import by_rank, lowest
from .view import View


@dataclass(frozen=True, kw_only=True)
class L2Ratio(Budgeted):
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
        The project's default is 0 and 1; `original` has none.

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
    needs = "keys"
    budget_means = "the tokens that stay where more than `prune_after` are stored; up to there all stay"

    prune_after: int = 1000
    form: Literal["seed", "original"] = "seed"
    skip_layers: tuple[int, ...] = (0, 1)

    @classmethod
    def original(
        cls, keep_ratio: float = 1.0, *, prune_after: int = 2048, skip_layers: tuple[int, ...] = ()
    ) -> L2Ratio:
        """The paper's own code with its defaults."""
        return cls(keep_ratio=keep_ratio, prune_after=prune_after, skip_layers=skip_layers, form="original")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(f"{self.name}: prune_after", self.prune_after)
        if self.form not in ("seed", "original"):
            raise KvmnnError(f"{self.name}: form is {self.form!r}: expected 'seed' or 'original'")

    def why_all_stay(self, prompt: int, tokens: int) -> str | None:
        if tokens < self.prune_after or (tokens == self.prune_after and self.form == "seed"):
            return f"it cuts above prune_after {self.prune_after:,}, the text has {count(tokens, 'token')}: lower it"
        return super().why_all_stay(prompt, tokens)

    def rule(self, view: View) -> Indices | None:
        size = min(self.size(view.tokens), view.tokens)
        if self.form == "original":
            untouched = view.tokens < self.prune_after
        else:
            untouched = view.tokens <= self.prune_after or size == view.tokens
        if untouched:
            return None
        norms = view.key_norms()
        kept = lowest(norms, size)
        return by_rank(norms, kept) if self.form == "original" else kept
