"""What every eviction policy is: a small value object that says which tokens of one layer stay.

A policy knows nothing of files, models or packed layouts. It is asked about one layer at a time and answers with token
indices; `CacheState` and `EvictingCache` remember and cut.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from ..errors import KvmnnError
from .ranking import Floats, Indices, key_norms

BUFFER = 64
"""Tokens that the lazy caches of seed 004 store above their limit before they cut."""


class Moment(Enum):
    """When a policy is asked: tokens have been appended, they have been attended, or a chunk of text has ended."""

    APPENDED = "appended"
    ATTENDED = "attended"
    CHUNK_END = "chunk end"


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerView:
    """One layer as a policy sees it.

    Parameters
    ----------
    tokens
        How many are stored.
    layer
        Which layer, from 0.
    keys, values
        ``[kv_head, token, head_dim]``, float16, float32 or uint16 (bf16); None where the policy does not look at them.
    scores
        Accumulated attention: ``[token]`` for all heads together or ``[kv_head, token]``.
    norms
        L2 norms of the keys, ``[kv_head, token]``, where they are known already; policies then need no keys.
    new
        Tokens of the latest step, or None where nobody counts steps.
    seen
        Tokens the model has seen; None for as many as are stored.
    steps
        Decode steps since the layer was last cut, or None where nobody counts them.

    Raises
    ------
    KvmnnError
        For numbers below 0 and shapes that do not fit `tokens`.
    TypeError
        For values of the wrong type.
    """

    tokens: int
    layer: int = 0
    keys: npt.NDArray[Any] | None = None
    values: npt.NDArray[Any] | None = None
    scores: Floats | None = None
    norms: Floats | None = None
    new: int | None = None
    seen: int | None = None
    steps: int | None = None

    @classmethod
    def trusted(cls, **fields: Any) -> LayerView:
        """A view of fields that fit, unchecked; those left out are as in the constructor."""
        view = object.__new__(cls)
        view.__dict__.update(fields)
        return view

    def __post_init__(self) -> None:
        where = f"layer {self.layer}"
        for name in ("tokens", "layer", "new", "seen", "steps"):
            number = getattr(self, name)
            if number is not None:
                check_count(f"{where}: {name}", number)
        for name in ("keys", "values"):
            array = getattr(self, name)
            if array is not None and not isinstance(array, np.ndarray):
                raise TypeError(f"{where}: {name} must be a numpy array, not {type(array).__name__}")
            if array is not None and (array.ndim != 3 or array.shape[1] != self.tokens):
                raise KvmnnError(
                    f"{where}: {name} have shape {list(array.shape)}: expected [kv_head, {self.tokens}, head_dim]"
                )
        if self.scores is not None:
            object.__setattr__(self, "scores", as_scores(where, self.scores, self.tokens))
        if self.norms is not None and (self.norms.ndim != 2 or self.norms.shape[1] != self.tokens):
            raise KvmnnError(f"{where}: norms have shape {list(self.norms.shape)}: expected [kv_head, {self.tokens}]")

    @property
    def kv_heads(self) -> int:
        """Heads of the keys, or of their norms."""
        known = self.norms if self.norms is not None else self.keys
        if known is None:
            raise KvmnnError(f"layer {self.layer}: neither keys nor their norms are known")
        return int(known.shape[0])

    def key_norms(self, first: int | None = None) -> Floats:
        """L2 norms of the keys of the `first` tokens (of all of them without it), float32 ``[kv_head, token]``."""
        if self.norms is not None:
            return self.norms[:, :first]
        if self.keys is None:
            raise KvmnnError(f"layer {self.layer}: neither keys nor their norms are known")
        return key_norms(self.keys[:, :first])

    @property
    def is_prompt(self) -> bool:
        """Whether everything seen came in the latest step, which is how kvpress tells a prompt from decoding."""
        return self.new is None or self.new == (self.tokens if self.seen is None else self.seen)


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


def check_count(what: str, number: object) -> None:
    """Refuse what is not an integer of at least 0."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise TypeError(f"{what} must be an integer, not {type(number).__name__}")
    if number < 0:
        raise KvmnnError(f"{what} is {number}: expected at least 0")


def check_share(what: str, number: object) -> None:
    """Refuse what is not a finite number of at least 0 that can be multiplied with a number of tokens."""
    if isinstance(number, bool) or not isinstance(number, int | float | np.integer | np.floating):
        raise TypeError(f"{what} must be a number, not {type(number).__name__}")
    if not 0 <= number <= 1e9:
        raise KvmnnError(f"{what} is {number}: expected a share from 0 on")


def as_scores(where: str, scores: npt.NDArray[Any], tokens: int) -> Floats:
    """Scores as float32 of one or two axes whose last has the length `tokens`."""
    array = np.asarray(scores)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{where}: scores are {array.dtype}: expected numbers")
    if array.ndim not in (1, 2) or array.shape[-1] != tokens:
        raise KvmnnError(f"{where}: scores have shape {list(array.shape)}: expected [{tokens}] or [kv_head, {tokens}]")
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32, copy=False)


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
