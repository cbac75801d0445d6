"""What every eviction policy is: a small value object that says which tokens of one layer stay.

A policy knows nothing of files, models or packed layouts. It is asked about one layer at a time and answers with token
indices; `CacheState` and `EvictingCache` remember and cut.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from ..checks import check_count, check_share
from ..dtypes import Floats, Indices
from ..errors import KvmnnError
from .view import LayerView, Moment

BUFFER = 64
"""Tokens that the lazy caches of seed 004 store above their limit before they cut."""


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Which tokens of a layer stay.

    Parameters
    ----------
    skip_layers
        Layers that are never cut.
    """

    name: ClassVar[str]
    """Its key in `kvmnn.policies.POLICIES`."""
    needs: ClassVar[Literal["lengths", "keys", "scores", "head scores"]]
    """What it looks at; `"scores"` are ``[token]``, `"head scores"` ``[kv_head, token]``."""
    moments: ClassVar[frozenset[Moment]] = frozenset({Moment.ATTENDED})
    """When it acts; at other moments every token stays."""
    prompt_only: ClassVar[bool] = False
    """Whether it acts on a prompt and never again."""

    skip_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for layer in self.skip_layers:
            check_count("skip_layers", layer)
        object.__setattr__(self, "skip_layers", tuple(self.skip_layers))

    def choose(self, view: LayerView, moment: Moment = Moment.ATTENDED) -> Indices | None:
        """The tokens that stay, in the order in which they are to be stored, or None where all stay as they are.

        Returns
        -------
        ndarray or None
            int64, ``[kept]`` for all heads or ``[kv_head, kept]`` where every head keeps its own.

        Raises
        ------
        KvmnnError
            Where `view` lacks what the policy needs.
        """
        if moment not in self.moments or view.layer in self.skip_layers:
            return None
        self._check(view)
        return self._choose(view, moment)

    def keep(self, view: LayerView, moment: Moment = Moment.ATTENDED) -> Indices:
        """Like `choose`, with ``[0, 1, 2 ...]`` where all stay."""
        kept = self.choose(view, moment)
        return np.arange(view.tokens, dtype=np.int64) if kept is None else kept

    def choose_stacked(self, view: LayerView, moment: Moment = Moment.ATTENDED) -> Sequence[Indices] | Indices | None:
        """`choose` for several layers that store equally many tokens, at once.

        Parameters
        ----------
        view
            Scores and norms with the heads of one layer after the other on their first axis: ``[layer x kv_head,
            token]``, or ``[layer, token]`` for scores of all heads together. No layer of it is one that is skipped.

        Returns
        -------
        ndarray, list or None
            ``[kept]`` where one set holds for every layer; ``[row, kept]``; a list of rows where they differ in length;
            or None where all stay.
        """
        if moment not in self.moments:
            return None
        if self.needs != "scores" or view.scores is None:
            return self._choose(view, moment)
        rows = [self._choose(replace(view, scores=row), moment) for row in view.scores]
        if all(row is None for row in rows):
            return None
        whole = np.arange(view.tokens, dtype=np.int64)
        kept = [whole if row is None else row for row in rows]
        return np.stack(kept) if len({len(row) for row in kept}) == 1 else kept

    def column_sums(self, weights: Floats, kv_heads: int) -> Floats:
        """What one step's attention adds to the scores: sums over the queries, float32.

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
        by_head = group_sums(weights, kv_heads)
        sums = by_head if self.needs == "head scores" else group_sums(by_head[:, None], 1)[0]
        return self.scaled(sums, weights.shape[0] * weights.shape[1])

    def scaled(self, sums: Floats, rows: int) -> Floats:
        """Attention summed over `rows` rows, heads times queries, as it enters the scores; here unchanged."""
        return sums

    def fold(self, scores: Floats, sums: Floats, new: int = 1) -> Floats:
        """The scores after a step of `new` tokens, of as many tokens as `sums`: float32, the old ones times `fade`."""
        with np.errstate(over="ignore", invalid="ignore"):
            return scores * np.float32(self.fade(new)) + sums

    @property
    def uses_norms(self) -> bool:
        """Whether the norms of the keys decide."""
        return self.needs == "keys"

    def fade(self, new: int) -> float:
        """What the scores before `new` tokens are multiplied by; here 1, so nothing fades."""
        return 1.0

    def options(self) -> Mapping[str, Any]:
        """The arguments that make an equal policy (a random generator is not among them)."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}

    @abstractmethod
    def _choose(self, view: LayerView, moment: Moment) -> Indices | None:
        """`choose` for a layer that is not skipped, at one of `moments`, with what `needs` names."""

    def _check(self, view: LayerView) -> None:
        if self.needs == "keys" and view.keys is None and view.norms is None:
            raise KvmnnError(f"layer {view.layer}: {self.name} needs the keys")
        if self.needs in ("scores", "head scores"):
            axes = 1 if self.needs == "scores" else 2
            if view.scores is None or view.scores.ndim != axes:
                found = "none" if view.scores is None else list(view.scores.shape)
                expected = "[token]" if axes == 1 else "[kv_head, token]"
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
        originals do.
    """

    default_budget: ClassVar[int | None] = None
    rounds_up: ClassVar[bool] = True

    budget: int | None = None
    keep_ratio: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is None and self.keep_ratio is None:
            if self.default_budget is None:
                raise KvmnnError(f"{self.name}: expected a budget (tokens) or a keep_ratio")
            object.__setattr__(self, "budget", self.default_budget)
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
        return math.ceil(share) if self.rounds_up else int(share)


def group_sums(weights: npt.NDArray[Any], kv_heads: int) -> Floats:
    """Attention ``[query_head, query, key]`` summed over the queries and the query heads of each group: float32."""
    array = np.asarray(weights)
    if array.dtype.kind != "f" or array.ndim != 3:
        raise KvmnnError(f"attention is {array.dtype} {list(array.shape)}: expected floats [query_head, query, key]")
    check_count("kv_heads", kv_heads)
    if kv_heads == 0 or array.shape[0] % kv_heads:
        raise KvmnnError(f"{array.shape[0]} query heads do not form groups for {kv_heads} KV heads")
    with np.errstate(over="ignore", invalid="ignore"):
        sums = array.sum(axis=1, dtype=np.float32)
        by_group = sums.reshape(kv_heads, array.shape[0] // kv_heads, array.shape[2])
        grouped: Floats = by_group.sum(axis=1, dtype=np.float32)
    return grouped
