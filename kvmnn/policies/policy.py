"""Eviction policies: small value objects that select which tokens of one layer stay.

A policy is independent of files, models and packed layouts. It declares what it requires and when it acts, and has one
method, `Policy.select_tokens`, that returns token indices; `CacheState` and `EvictingCache` keep state and evict.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import field, fields
from enum import Enum
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.text import pluralize
from .._util.validation import validate_count, validate_fraction
from ..dtypes import Floats, Indices, Positions
from ..errors import KvmnnError, OptionError
from .layer_parameters import LayerParameters
from .scores import ScoreAccumulator, SumScores
from .topk import compute_key_norms


@dataclass(frozen=True)
class Budget:
    """A number of tokens, or a share of one, such as ``"256"`` and ``"25%"``."""

    #: Exactly one of the two is given; the share is taken as it is written: 0.29 of 100 is 29.
    tokens: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.share is None):
            raise KvmnnError("a budget is a number of tokens or a share of them: expected one of the two")
        if self.tokens is not None:
            validate_count("budget", self.tokens)
        if self.share is not None:
            validate_fraction("budget", self.share)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``"256"`` or ``"25%"``."""
        if re.fullmatch(r"\d{1,9}", text):
            return cls(tokens=int(text))
        match = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)%", text)
        if match is None:
            raise KvmnnError(f"{text!r} is not a whole number of tokens or a share such as 25%")
        return cls(share=float(Fraction(match[1]) / 100))

    def resolve(self, tokens: int) -> int:
        """Return the number of tokens; of a share of `tokens`, rounded down."""
        if self.tokens is not None:
            return self.tokens
        return int(Fraction(str(self.share)) * tokens)


class Trigger(Enum):
    """When a policy acts: after tokens were appended, after attention, or at the end of a chunk of text."""

    AFTER_APPEND = "appended"
    AFTER_ATTENTION = "attended"
    CHUNK_END = "chunk end"


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyInput:
    """The stored tokens of one layer, or of several layers that store equally many.

    Arrays have a row for each set of tokens to select: for each KV head if heads select separately, else for each
    layer; rows are ordered by layer.

    Parameters
    ----------
    tokens
        Number of stored tokens.
    layer
        The layer, from 0; of several the first.
    scores
        Attention that each token drew so far: float32 ``[row, token]`` (of one layer also ``[token]``).
    norms
        L2 norms of the keys, float32 ``[row, token]``.
    num_new
        Tokens of the latest step, or None where steps are not counted.
    num_seen
        Tokens the model has seen; None for as many as are stored.
    num_steps
        Decode steps since the tokens were last cut, or None where they are not counted.
    trigger
        When the policy acts.
    """

    tokens: int
    layer: int = 0
    scores: Floats | None = None
    norms: Floats | None = None
    num_new: int | None = None
    num_seen: int | None = None
    num_steps: int | None = None
    trigger: Trigger = Trigger.AFTER_ATTENTION

    @property
    def has_norms(self) -> bool:
        """Return whether `get_key_norms` is available."""
        return self.norms is not None

    @property
    def num_key_rows(self) -> int:
        """Return the number of rows of `get_key_norms`."""
        return len(self._require_norms())

    @property
    def is_prompt(self) -> bool:
        """Return whether all tokens came in the latest step, which is how kvpress recognises a prompt."""
        return self.num_new is None or self.num_new == (self.tokens if self.num_seen is None else self.num_seen)

    def get_key_norms(self, num_tokens: int | None = None) -> Floats:
        """Return L2 norms of the keys of the first `num_tokens` tokens, by default all: float32 ``[row, token]``."""
        return self._require_norms()[:, :num_tokens]

    def get_row_scores(self) -> Floats:
        """Return the scores as float32 ``[row, token]``, even if there is one row for the layer."""
        if self.scores is None:
            raise KvmnnError(f"layer {self.layer}: no scores are known")
        return self.scores if self.scores.ndim == 2 else self.scores[None]

    def with_trigger(self, trigger: Trigger) -> Self:
        """Return a copy with another trigger."""
        if trigger is self.trigger:
            return self
        copied_input = copy(self)
        object.__setattr__(copied_input, "trigger", trigger)
        return copied_input

    def _require_norms(self) -> Floats:
        if self.norms is None:
            raise KvmnnError(f"layer {self.layer}: neither keys nor their norms are known")
        return self.norms


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerState(PolicyInput):
    """One layer with its keys and values, all validated.

    Parameters
    ----------
    keys, values
        ``[kv_head, token, head_dim]``, float16, float32 or uint16 (bf16); None where the policy does not need them.
    scores
        ``[token]`` for all heads together or ``[kv_head, token]``; any numbers, which become float32.
    norms
        ``[kv_head, token]``, where they are known already; policies then need no keys.
    queries
        Rotated queries of the latest tokens, float32 ``[query_head, query, head_dim]``.
    positions
        True positions of the tokens, int64 ``[token]`` or ``[kv_head, token]``; None for 0, 1 and so on.
    parameters
        Rotations and weights of the layer.
    is_dead
        Tokens that no head of this row attends to any more, bool ``[kv_head, token]``; None without any.

    Raises
    ------
    KvmnnError
        For numbers below 0 and shapes that do not fit `tokens`.
    TypeError
        For values of the wrong type.
    """

    keys: npt.NDArray[Any] | None = None
    values: npt.NDArray[Any] | None = None
    queries: Floats | None = None
    positions: Positions | None = None
    parameters: LayerParameters | None = None
    is_dead: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        location = f"layer {self.layer}"
        for name in ("tokens", "layer", "num_new", "num_seen", "num_steps"):
            number = getattr(self, name)
            if number is not None:
                validate_count(f"{location}: {name}", number)
        for name in ("keys", "values"):
            array = getattr(self, name)
            if array is not None and not isinstance(array, np.ndarray):
                raise TypeError(f"{location}: {name} must be a numpy array, not {type(array).__name__}")
            if array is not None and (array.ndim != 3 or array.shape[1] != self.tokens):
                raise KvmnnError(
                    f"{location}: {name} have shape {list(array.shape)}: expected [kv_head, {self.tokens}, head_dim]"
                )
        if self.scores is not None:
            object.__setattr__(self, "scores", to_scores(location, self.scores, self.tokens))
        if self.norms is not None and (self.norms.ndim != 2 or self.norms.shape[1] != self.tokens):
            raise KvmnnError(
                f"{location}: norms have shape {list(self.norms.shape)}: expected [kv_head, {self.tokens}]"
            )

    @property
    def has_norms(self) -> bool:
        return self.norms is not None or self.keys is not None

    @property
    def num_key_rows(self) -> int:
        return super().num_key_rows if self.keys is None else int(self.keys.shape[0])

    def get_key_norms(self, num_tokens: int | None = None) -> Floats:
        if self.norms is None and self.keys is not None:
            return compute_key_norms(self.keys[:, :num_tokens])
        return super().get_key_norms(num_tokens)


def to_scores(location: str, scores: npt.NDArray[Any], tokens: int) -> Floats:
    """Return scores as float32 of one or two axes whose last has the length `tokens`."""
    array = np.asarray(scores)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{location}: scores are {array.dtype}: expected numbers")
    if array.ndim not in (1, 2) or array.shape[-1] != tokens:
        raise KvmnnError(
            f"{location}: scores have shape {list(array.shape)}: expected [{tokens}] or [kv_head, {tokens}]"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float32, copy=False)


#: Tokens that the lazy caches of the StreamingLLM + H2O project store above their limit before they cut.
DEFAULT_BUFFER_TOKENS = 64

RequiredStats: TypeAlias = Literal["lengths", "keys", "scores", "head scores", "tensors"]
#: Indices ``[kept]`` for all rows or ``[row, kept]``, a list of rows of different lengths, or None: all stay.
Selection: TypeAlias = Indices | list[Indices] | None


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """An eviction policy. A new one is a dataclass of its options with a `name` and a `select_tokens`.

    Parameters
    ----------
    skip_layers
        Layers in which nothing is ever evicted.
    """

    #: Name of the policy in `kvmnn.policies.POLICIES`.
    name: ClassVar[str]
    #: Statistics to rank by. Scores are sums of attention: `"scores"` one for each token, `"head scores"` one for each
    #: token in each KV head; `"tensors"` are K, V and more of one layer at a time (`kvmnn.policies.ScoredPolicy`). With
    #: keys, head scores or tensors each KV head selects its own tokens.
    requires: ClassVar[RequiredStats] = "lengths"
    #: When the policy acts; at other times every token stays.
    triggers: ClassVar[frozenset[Trigger]] = frozenset({Trigger.AFTER_ATTENTION})
    #: Whether the policy only acts on a prompt.
    prompt_only: ClassVar[bool] = False
    #: Whether layers are cut at different steps, and so hold different numbers of tokens.
    has_independent_layers: ClassVar[bool] = False
    #: Short explanation of the budget.
    budget_help: ClassVar[str] = "it has none"

    skip_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for layer in self.skip_layers:
            validate_count("skip_layers", layer)
        object.__setattr__(self, "skip_layers", tuple(self.skip_layers))

    @abstractmethod
    def select_tokens(self, state: PolicyInput) -> Selection:
        """Select the tokens that stay; the only method that a policy must implement.

        It is only called at its `triggers`, for layers that are not skipped, with the statistics in `requires`. It must
        treat the rows of `PolicyInput.get_row_scores` and `PolicyInput.get_key_norms` independently, because one call
        decides several layers.

        Returns
        -------
        ndarray, list or None
            Distinct indices of tokens in the order in which they are to be stored: int64 ``[row, kept]``, ``[kept]``
            where one set holds for all rows, a list of rows where they differ in length; None where all stay.
        """

    # -- declared by special policies ------------------------------------------------------------------------------

    @property
    def score_accumulator(self) -> ScoreAccumulator:
        """Return the accumulator of attention to scores; by default the sum without decay."""
        return SumScores()

    @property
    def requires_norms(self) -> bool:
        """Return whether the policy ranks tokens by key norms."""
        return self.requires == "keys"

    # -- for callers -----------------------------------------------------------------------------------------------

    @property
    def requires_attention(self) -> bool:
        """Return whether the policy ranks tokens by attention."""
        return self.requires in ("scores", "head scores")

    @property
    def is_per_head(self) -> bool:
        """Return whether each KV head selects its own tokens."""
        return self.requires in ("keys", "head scores", "tensors")

    @property
    def requires_queries(self) -> bool:
        """Return whether the policy ranks tokens by queries, which a model has to return."""
        return False

    @property
    def is_prompt_only(self) -> bool:
        """Return whether the policy only acts on a prompt."""
        return self.prompt_only

    @property
    def cuts_layers_apart(self) -> bool:
        """Return whether layers may contain different numbers of tokens, besides those that are skipped."""
        return self.has_independent_layers

    @property
    def can_evict(self) -> bool:
        """Return whether the policy can evict any token."""
        return bool(self.triggers)

    def resolve_skip_layers(self, num_layers: int) -> frozenset[int]:
        """Return those of a model's `num_layers` layers in which nothing is ever evicted."""
        return frozenset(self.skip_layers) & frozenset(range(num_layers))

    def check_layers(self, num_layers: int) -> None:
        """Check a policy against a model of so many layers, and its files, before the model runs.

        Raises `OptionError` for skipped layers that the model lacks (the defaults of a class may name more), and
        `KvmnnError` for files that are missing or of another model.
        """
        missing_layers = [layer for layer in self.skip_layers if layer >= num_layers]
        if missing_layers and self.skip_layers != type(self).skip_layers:
            raise OptionError(
                f"{self.name}: skip_layers names layer {missing_layers[0]}, the model has "
                f"{pluralize(num_layers, 'layer')}: expected 0 to {num_layers - 1}"
            )

    def select(self, state: PolicyInput, trigger: Trigger | None = None) -> Indices | None:
        """Select the tokens of one layer that stay, in the order in which they are to be stored; None where all stay.

        Parameters
        ----------
        state
            The layer.
        trigger
            When; by default that of `state`.

        Returns
        -------
        ndarray or None
            int64, ``[kept]`` for all heads or ``[kv_head, kept]`` where every head keeps its own.

        Raises
        ------
        KvmnnError
            Where `state` lacks what the policy needs, and for selections that are not distinct tokens of `state`.
        """
        if trigger is not None:
            state = state.with_trigger(trigger)
        if state.trigger not in self.triggers or state.layer in self.skip_layers:
            return None
        if self.requires == "keys" and not state.has_norms:
            raise KvmnnError(f"layer {state.layer}: {self.name} needs the keys")
        if self.requires_attention and (state.scores is None or state.scores.ndim != (2 if self.is_per_head else 1)):
            shape_text = "none" if state.scores is None else list(state.scores.shape)
            expected_axes = "[kv_head, token]" if self.is_per_head else "[token]"
            raise KvmnnError(f"layer {state.layer}: {self.name} needs scores {expected_axes}, found {shape_text}")
        selection = self.select_stacked(state)
        if selection is None:
            return None
        if not self.is_per_head:
            selection = selection if isinstance(selection, np.ndarray) and selection.ndim == 1 else selection[0]
        elif isinstance(selection, list):
            raise KvmnnError(
                f"layer {state.layer}: {self.name} keeps different numbers of tokens in heads of one layer"
            )
        self._check_indices(selection, state)
        return selection

    def _check_indices(self, indices: Indices, state: PolicyInput) -> None:
        """Raise `KvmnnError` unless the tokens of each head are distinct and among those of `state`."""
        ascending = np.sort(np.atleast_2d(indices), axis=1)
        outside = ascending[(ascending < 0) | (ascending >= state.tokens)]
        repeated = ascending[:, 1:][ascending[:, 1:] == ascending[:, :-1]]
        if outside.size or repeated.size:
            reason = f"token {outside[0]}" if outside.size else f"token {repeated[0]} more than once"
            raise KvmnnError(
                f"layer {state.layer}: {self.name} selects {reason}: expected distinct tokens among the "
                f"{state.tokens:,} that are stored"
            )

    def select_or_all(self, state: PolicyInput, trigger: Trigger | None = None) -> Indices:
        """Select as `select` does; return all indices if every token stays."""
        indices = self.select(state, trigger)
        return np.arange(state.tokens, dtype=np.int64) if indices is None else indices

    def select_stacked(self, state: PolicyInput, trigger: Trigger | None = None) -> Selection:
        """Select for several layers that store equally many tokens; none of them is skipped.

        Parameters
        ----------
        state
            Rows of all the layers.
        trigger
            When; by default that of `state`.

        Returns
        -------
        ndarray, list or None
            As `select_tokens` returns.
        """
        if trigger is not None:
            state = state.with_trigger(trigger)
        if state.trigger not in self.triggers or not self.is_due(state):
            return None
        selection = self.select_tokens(state)
        for row in selection if isinstance(selection, list) else [selection]:
            if row is not None and (indices := np.asarray(row)).size and indices.dtype.kind not in "iu":
                raise KvmnnError(f"{self.name} selects tokens by {indices.dtype}: expected integers")
            if row is not None and not np.ndim(row):
                raise KvmnnError(
                    f"{self.name} selects tokens by a list of {type(row).__name__}: expected an array of indices, or a "
                    "list of arrays, one for each head"
                )
        if isinstance(selection, list) and len({len(row) for row in selection}) == 1:
            return np.stack(selection)
        return selection

    def is_due(self, state: PolicyInput) -> bool:
        """Return whether the policy acts at this step."""
        return state.is_prompt or not self.is_prompt_only

    def sum_columns(self, weights: npt.NDArray[Any], kv_heads: int) -> Floats:
        """Return the scores that one step's attention adds, float32.

        Parameters
        ----------
        weights
            Attention probabilities ``[query_head, query, key]`` of one sequence.
        kv_heads
            Adjacent query heads that share a KV head form a group.

        Returns
        -------
        ndarray
            ``[key]``, all heads summed, or ``[kv_head, key]``, the heads of each group summed, as `requires` specifies.
        """
        return self.score_accumulator.sum_weights(weights, kv_heads, per_head=self.is_per_head)

    def explain_no_eviction(self, prompt_tokens: int, tokens: int) -> str | None:
        """Explain, as part of a sentence, why the policy keeps every token of a text; None if it evicts.

        Parameters
        ----------
        prompt_tokens
            Tokens of the first step.
        tokens
            Tokens of the text, those of the first step included.
        """
        return None

    def explain_few_steps(self, num_steps: int) -> str | None:
        """Explain, as part of a sentence, why so many steps after the first one are too few; None if they are not.

        It tells of the steps alone, so that a large step may have evicted tokens all the same.
        """
        return None

    def to_options(self) -> Mapping[str, Any]:
        """Return the arguments that create an equal policy (a random generator is not among them)."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}


@dataclass(frozen=True, kw_only=True)
class BudgetedPolicy(Policy):
    """A policy with a budget: a number of tokens or a share of the stored ones, never both.

    Parameters
    ----------
    budget
        Tokens that stay. More than there are: all stay. 0: none stays.
    keep_ratio
        Budget as a share of the stored tokens, rounded up (kvpress's policies round down), in float64 like the
        originals. A share above 0 is at least one token.
    """

    default_budget: ClassVar[int | None] = None
    default_keep_ratio: ClassVar[float | None] = None
    is_rounded_up: ClassVar[bool] = True
    budget_help = "the tokens that stay"

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
            validate_count(f"{self.name}: budget", self.budget)
        if self.keep_ratio is not None:
            validate_fraction(f"{self.name}: keep_ratio", self.keep_ratio)

    def resolve_budget(self, tokens: int) -> int:
        """Return the budget for `tokens` tokens as a number, which may exceed them."""
        if self.keep_ratio is None:
            return self.budget or 0
        share = self.keep_ratio * tokens
        size = math.ceil(share) if self.is_rounded_up else int(share)
        return max(size, 1) if share > 0 else size  # attention over an empty cache is no number

    def explain_no_eviction(self, prompt_tokens: int, tokens: int) -> str | None:
        if self.resolve_budget(tokens) >= tokens:
            return f"a text of {pluralize(tokens, 'token')} fits its budget"
        if self.is_prompt_only and self.resolve_budget(prompt_tokens) >= prompt_tokens:
            return (
                f"it cuts the first step only, which has {pluralize(prompt_tokens, 'token')}: expected a longer prompt"
            )
        return None


@dataclass(frozen=True, kw_only=True)
class FullCache(Policy):
    """The full cache, the reference for eviction. LOSSLESS: it never evicts, so no layer needs to be skipped."""

    name: ClassVar[str] = "full"
    budget_help = "it has none: all tokens stay"
    triggers: ClassVar[frozenset[Trigger]] = frozenset()

    skip_layers: tuple[int, ...] = field(default=(), init=False, repr=False)

    def select_tokens(self, state: PolicyInput) -> None:
        return None
