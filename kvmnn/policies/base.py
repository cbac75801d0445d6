"""What every eviction policy is: a small value object that says which tokens of one layer stay.

A policy knows nothing of files, models or packed layouts. It declares what it looks at and when it acts, and has one
method, `Policy.rule`, that answers with token indices; `CacheState` and `EvictingCache` remember and cut.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..checks import check_count, check_share
from ..dtypes import Floats, Indices
from ..errors import KvmnnError, OptionError
from ..text import count
from .scoring import Scoring, Summed
from .view import Moment, View

BUFFER = 64
"""Tokens that the lazy caches of the StreamingLLM + H2O project store above their limit before they cut."""

Needs: TypeAlias = Literal["lengths", "keys", "scores", "head scores"]
Kept: TypeAlias = Indices | list[Indices] | None
"""Indices ``[kept]`` for all rows or ``[row, kept]``, a list of rows of different lengths, or None: all stay."""


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Which tokens of a layer stay. A new policy is a dataclass of its options with a `name` and a `rule`.

    Parameters
    ----------
    skip_layers
        Layers that are never cut.
    """

    name: ClassVar[str]
    """Its key in `kvmnn.policies.POLICIES`."""
    needs: ClassVar[Needs] = "lengths"
    """What it looks at. Scores are sums of attention: `"scores"` one for each token, `"head scores"` one for each token
    in each KV head. With keys or head scores each KV head keeps tokens of its own."""
    moments: ClassVar[frozenset[Moment]] = frozenset({Moment.ATTENDED})
    """When it acts; at other moments every token stays."""
    prompt_only: ClassVar[bool] = False
    """Whether it acts on a prompt and never again."""
    layers_apart: ClassVar[bool] = False
    """Whether layers are cut at different steps, and so hold different numbers of tokens."""
    budget_means: ClassVar[str] = "it has none"
    """What a budget is for it, in a few words."""

    skip_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for layer in self.skip_layers:
            check_count("skip_layers", layer)
        object.__setattr__(self, "skip_layers", tuple(self.skip_layers))

    @abstractmethod
    def rule(self, view: View) -> Kept:
        """The tokens that stay: the one method that a policy writes.

        It is asked only at its `moments`, for layers that are cut, with what `needs` names. It must treat every row of
        `View.row_scores` and `View.key_norms` by itself, because several layers are decided in one call.

        Returns
        -------
        ndarray, list or None
            Distinct indices of tokens in the order in which they are to be stored: int64 ``[row, kept]``, ``[kept]``
            where one set holds for all rows, a list of rows where they differ in length; None where all stay.
        """

    # -- what a special policy declares ---------------------------------------------------------------------------

    @property
    def scoring(self) -> Scoring:
        """How attention becomes scores; by default it is summed up and never fades."""
        return Summed()

    @property
    def needs_norms(self) -> bool:
        """Whether the norms of the keys decide."""
        return self.needs == "keys"

    # -- what callers ask -----------------------------------------------------------------------------------------

    @property
    def needs_attention(self) -> bool:
        """Whether it ranks tokens by the attention that they draw."""
        return self.needs in ("scores", "head scores")

    @property
    def by_head(self) -> bool:
        """Whether each KV head keeps tokens of its own."""
        return self.needs in ("keys", "head scores")

    @property
    def evicts(self) -> bool:
        """Whether any token can go."""
        return bool(self.moments)

    def skipped(self, layers: int) -> frozenset[int]:
        """The layers that are never cut of a model that has `layers`."""
        return frozenset(self.skip_layers) & frozenset(range(layers))

    def check_layers(self, layers: int) -> None:
        """Refuse layers to skip that a model of `layers` does not have; the defaults of a class may name more.

        Raises
        ------
        OptionError
            For layers that were said and are not there.
        """
        missing = [layer for layer in self.skip_layers if layer >= layers]
        if missing and self.skip_layers != type(self).skip_layers:
            raise OptionError(
                f"{self.name}: skip_layers names layer {missing[0]}, the model has {count(layers, 'layer')}: expected "
                f"0 to {layers - 1}"
            )

    def choose(self, view: View, moment: Moment | None = None) -> Indices | None:
        """The tokens of one layer that stay, in the order in which they are to be stored, or None where all stay.

        Parameters
        ----------
        view
            The layer.
        moment
            When; by default what `view` says.

        Returns
        -------
        ndarray or None
            int64, ``[kept]`` for all heads or ``[kv_head, kept]`` where every head keeps its own.

        Raises
        ------
        KvmnnError
            Where `view` lacks what the policy needs.
        """
        if moment is not None:
            view = view.at(moment)
        if view.moment not in self.moments or view.layer in self.skip_layers:
            return None
        if self.needs != "lengths":
            self._check(view)
        kept = self._ruled(view)
        if kept is None:
            return None
        if not self.by_head:
            return kept if isinstance(kept, np.ndarray) and kept.ndim == 1 else kept[0]
        kept = _stacked(kept)
        if isinstance(kept, list):
            raise KvmnnError(f"layer {view.layer}: {self.name} keeps different numbers of tokens in heads of one layer")
        return kept

    def keep(self, view: View, moment: Moment | None = None) -> Indices:
        """Like `choose`, with ``[0, 1, 2 ...]`` where all stay."""
        kept = self.choose(view, moment)
        return np.arange(view.tokens, dtype=np.int64) if kept is None else kept

    def choose_stacked(self, view: View, moment: Moment | None = None) -> Kept:
        """`choose` for several layers that store equally many tokens, at once.

        Parameters
        ----------
        view
            Rows of all the layers, none of which is skipped.
        moment
            When; by default what `view` says.

        Returns
        -------
        ndarray, list or None
            As `rule` answers.
        """
        if moment is not None:
            view = view.at(moment)
        return _stacked(self._ruled(view)) if view.moment in self.moments else None

    def column_sums(self, weights: npt.NDArray[Any], kv_heads: int) -> Floats:
        """What one step's attention adds to the scores, float32.

        Parameters
        ----------
        weights
            Attention probabilities ``[query_head, query, key]`` of one sequence.
        kv_heads
            Query heads in a row that share a KV head form a group.

        Returns
        -------
        ndarray
            ``[key]``, all heads summed, or ``[kv_head, key]``, the heads of each group summed, as `needs` says.
        """
        return self.scoring.from_weights(weights, kv_heads, by_head=self.by_head)

    def why_all_stay(self, prompt: int, tokens: int) -> str | None:
        """Why its options let every token of a text stay, as part of a sentence; None where they do not say.

        Parameters
        ----------
        prompt
            Tokens of the first step.
        tokens
            Of the text, those of the first step included.
        """
        return None

    def options(self) -> Mapping[str, Any]:
        """The arguments that make an equal policy (a random generator is not among them)."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}

    def _ruled(self, view: View) -> Kept:
        if self.prompt_only and not view.is_prompt:
            return None
        return self.rule(view)

    def _check(self, view: View) -> None:
        if self.needs == "keys" and not view.has_norms:
            raise KvmnnError(f"layer {view.layer}: {self.name} needs the keys")
        if self.needs_attention:
            axes = 2 if self.by_head else 1
            if view.scores is None or view.scores.ndim != axes:
                found = "none" if view.scores is None else list(view.scores.shape)
                expected = "[kv_head, token]" if self.by_head else "[token]"
                raise KvmnnError(f"layer {view.layer}: {self.name} needs scores {expected}, found {found}")


@dataclass(frozen=True, kw_only=True)
class Budgeted(Policy):
    """A policy with a budget: a number of tokens or a share of those there are, never both.

    Parameters
    ----------
    budget
        Tokens that stay. More than there are: all stay. 0: none stays.
    keep_ratio
        The same as a share of the stored tokens, rounded up (kvpress's policies round down), in float64 as the
        originals do. Of any tokens a share above 0 is at least one token.
    """

    default_budget: ClassVar[int | None] = None
    default_keep_ratio: ClassVar[float | None] = None
    rounds_up: ClassVar[bool] = True
    budget_means = "the tokens that stay"

    budget: int | None = None
    keep_ratio: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is None and self.keep_ratio is None:
            if self.default_budget is None and self.default_keep_ratio is None:
                raise KvmnnError(f"{self.name}: expected a budget (tokens) or a keep_ratio")
            object.__setattr__(self, "budget", self.default_budget)
            object.__setattr__(self, "keep_ratio", self.default_keep_ratio)
        elif self.budget is not None and self.keep_ratio is not None:
            raise KvmnnError(f"{self.name}: budget {self.budget} and keep_ratio {self.keep_ratio}: expected only one")
        if self.budget is not None:
            check_count(f"{self.name}: budget", self.budget)
        if self.keep_ratio is not None:
            check_share(f"{self.name}: keep_ratio", self.keep_ratio)

    def size(self, tokens: int) -> int:
        """How many of `tokens` the budget is; it may be more."""
        if self.keep_ratio is None:
            return self.budget or 0
        share = self.keep_ratio * tokens
        size = math.ceil(share) if self.rounds_up else int(share)
        return max(size, 1) if share > 0 else size  # attention over an empty cache is no number

    def why_all_stay(self, prompt: int, tokens: int) -> str | None:
        if self.size(tokens) >= tokens:
            return f"a text of {count(tokens, 'token')} fits its budget"
        if self.prompt_only and self.size(prompt) >= prompt:
            return f"it cuts the first step only, which has {count(prompt, 'token')}: expected a longer prompt"
        return None


def _stacked(kept: Kept) -> Kept:
    """Rows of equal lengths as one array."""
    if isinstance(kept, list) and len({len(row) for row in kept}) == 1:
        return np.stack(kept)
    return kept
