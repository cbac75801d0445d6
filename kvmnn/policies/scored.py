"""Policies that score every token of a layer and keep the highest: one mechanism, of which each policy is a formula.

A `ScoredPolicy` is one method, `ScoredPolicy.compute_scores`. Its options say when it cuts (a prompt, every so many
tokens of decoding, or both) and in which units (`wrappers`: tokens of a head, of all heads, chunks or blocks).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np

from .._util.dataclass import dataclass
from .._util.text import pluralize
from .._util.validation import validate_fraction, validate_int
from ..dtypes import Elements, Floats
from ..errors import KvmnnError, OptionError
from .policy import BudgetedPolicy, LayerState, PolicyInput, Selection
from .wrappers import DEFAULT_CHUNKS, SELECTORS, WrapperName

Phase = Literal["prompt", "decoding", "both"]
TensorName = Literal["keys", "values", "queries", "rotation", "output weights"]


@dataclass(frozen=True, kw_only=True)
class ScoredPolicy(BudgetedPolicy):
    """A policy that keeps the tokens of the highest scores of each KV head. A new one has a `compute_scores`.

    Of equal scores the older token stays, and NaN counts as the lowest. Tokens stay in temporal order. A share is
    rounded down as in kvpress, at least one token.

    Parameters
    ----------
    budget, keep_ratio
        Tokens of each KV head that stay at each cut; ``1 - compression_ratio`` of kvpress.
    phase
        ``"prompt"``: the prompt is cut once, at its end. ``"decoding"``: every `interval` later steps. ``"both"``.
    interval
        Steps between two cuts of decoding; a step of at least as many tokens as stay is cut, too.
    wrapper
        How scores become tokens (`kvmnn.policies.wrappers`).
    chunk
        Tokens of a chunk or block of a wrapper; None for kvpress' number.
    safeguard
        Of the wrappers that share a budget between heads: the part of it that each head keeps in any case.
    by_layer
        Relative budgets of the layers, such as ``(2, 1, 1)``, whose mean is the budget; none: all have the same.
    share_of
        Of what `keep_ratio` is a share: the tokens that are ``"stored"``, or all that were ``"seen"``.
    """

    requires = "tensors"
    is_rounded_up = False
    budget_help = "the tokens of each KV head that stay at each cut"
    #: What `compute_scores` reads of the layer.
    tensors: ClassVar[frozenset[TensorName]] = frozenset({"keys"})
    #: Whether scores need the queries of all tokens, so that only a prompt can be cut.
    requires_all_queries: ClassVar[bool] = False

    phase: Phase = "prompt"
    interval: int = 64
    wrapper: WrapperName = "none"
    chunk: int | None = None
    safeguard: float = 0.2
    by_layer: tuple[float, ...] = ()
    share_of: Literal["stored", "seen"] = "stored"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "by_layer", tuple(self.by_layer))
        choices_by_name = {"phase": Phase, "wrapper": WrapperName, "share_of": Literal["stored", "seen"]}
        for name, choices in ((name, get_args(hint)) for name, hint in choices_by_name.items()):
            if getattr(self, name) not in choices:
                raise KvmnnError(
                    f"{self.name}: {name} is {getattr(self, name)!r}: expected one of {', '.join(choices)}"
                )
        if self.requires_all_queries and self.phase != "prompt":
            raise KvmnnError(
                f"{self.name}: phase is {self.phase!r}: it needs the queries of all tokens, as a prompt has"
            )
        if self.requires_queries and self.wrapper == "block":
            raise KvmnnError(f"{self.name}: wrapper 'block' is for policies that look at keys and values only")
        for name in ("interval", "chunk"):
            if getattr(self, name) is not None:
                validate_int(getattr(self, name), f"{self.name}: {name}", 1)
        if self.chunk is not None and self.wrapper not in DEFAULT_CHUNKS:
            raise KvmnnError(f"{self.name}: chunk is for wrappers {', '.join(DEFAULT_CHUNKS)}, not {self.wrapper!r}")
        validate_share(f"{self.name}: safeguard", self.safeguard)
        for weight in self.by_layer:
            validate_fraction(f"{self.name}: by_layer", weight)
        if self.by_layer and not any(self.by_layer):
            raise KvmnnError(f"{self.name}: by_layer is {list(self.by_layer)}: expected a number above 0 among them")

    @abstractmethod
    def compute_scores(self, layer: LayerState) -> Floats:
        """Return the score of each token, float32 ``[kv_head, token]``; `layer` has what `tensors` names."""

    @property
    def query_window(self) -> int | None:
        """Return how many of the latest queries the policy needs, None for all."""
        return None if "queries" in self.tensors else 0

    @property
    def required_tensors(self) -> frozenset[TensorName]:
        """Return what the policy and its wrapper read of the layer."""
        is_critical = self.wrapper in ("critical", "critical_ada")
        return self.tensors | ({"values", "output weights"} if is_critical else set())

    @property
    def requires_queries(self) -> bool:
        return "queries" in self.required_tensors

    @property
    def is_prompt_only(self) -> bool:
        return self.phase == "prompt"

    def check_layers(self, num_layers: int) -> None:
        super().check_layers(num_layers)
        if self.by_layer and len(self.by_layer) != num_layers:
            raise OptionError(
                f"{self.name}: by_layer has relative budgets of {pluralize(len(self.by_layer), 'layer')}, the model "
                f"has {num_layers}: expected one for each"
            )

    def is_due(self, state: PolicyInput) -> bool:
        if state.is_prompt:
            return self.phase != "decoding"
        if self.phase == "prompt":
            return False
        is_large = (state.num_new or 0) >= self.resolve_budget(state.tokens)
        return is_large or state.num_steps is None or state.num_steps % self.interval == 0

    def explain_few_steps(self, num_steps: int) -> str | None:
        if self.phase == "prompt" or num_steps >= self.interval:
            return None
        return (
            f"later steps are cut once in interval={self.interval:,}, and {pluralize(num_steps, 'step')} followed the "
            "first: lower interval, or feed fewer tokens at a time"
        )

    @property
    def cuts_layers_apart(self) -> bool:
        return self.has_independent_layers or len(set(self.by_layer)) > 1

    def resolve_layer_budget(self, state: LayerState) -> int:
        """Return how many tokens of each head of this layer stay."""
        return self.resolve_budget(state.tokens)

    def resolve_share(self, tokens: int) -> float:
        """Return the budget as a share of `tokens`, at most 1."""
        share = (self.budget or 0) / max(tokens, 1) if self.keep_ratio is None else self.keep_ratio
        return min(share, 1.0)

    def select_tokens(self, state: PolicyInput) -> Selection:
        layer = self._check_tensors(state)
        policy = self._resolve_for_layer(layer)
        with np.errstate(all="ignore"):
            size = policy.resolve_layer_budget(layer)
            if size >= layer.tokens:
                return None
            if size == 0:
                return np.empty((layer.num_key_rows, 0), np.int64)
            return SELECTORS[self.wrapper](policy, layer, size)

    @property
    def edits_keys(self) -> bool:
        """Return whether `edit_keys` changes keys."""
        return False

    def edit_keys(self, layer: LayerState) -> Elements | None:
        """Return other keys for the tokens of a layer after a cut, of the same shape and dtype; None for these."""
        return None

    def _resolve_for_layer(self, layer: LayerState) -> Self:
        """Return the policy with the budget that it has in this layer, as a share of its tokens or their number."""
        policy = self
        if self.share_of == "seen" and self.keep_ratio is not None and layer.num_seen is not None:
            policy = replace(policy, budget=max(1, int(self.keep_ratio * layer.num_seen)), keep_ratio=None)
        if not self.by_layer:
            return policy
        if layer.layer >= len(self.by_layer):
            raise KvmnnError(
                f"layer {layer.layer}: {self.name} has relative budgets of {pluralize(len(self.by_layer), 'layer')}"
            )
        weight = self.by_layer[layer.layer] * len(self.by_layer) / sum(self.by_layer)
        share = min(weight * policy.resolve_share(layer.tokens), 1.0)
        return replace(policy, budget=None, keep_ratio=share, by_layer=(), share_of="stored")

    def _check_tensors(self, state: PolicyInput) -> LayerState:
        label = f"layer {state.layer}: {self.name} needs"
        if not isinstance(state, LayerState) or state.keys is None:
            raise KvmnnError(f"{label} the keys")
        required = self.required_tensors
        if "values" in required and state.values is None:
            raise KvmnnError(f"{label} the values")
        if "queries" in required and state.queries is None:
            raise KvmnnError(f"{label} queries, which only a model computes: kvmnn eval and generate give it these")
        if "output weights" in required and (state.parameters is None or state.parameters.read_output_weights is None):
            raise KvmnnError(f"{label} the output weights of attention, which graphs of kvmnn model import show")
        if "queries" in required and state.queries is not None and state.queries.shape[0] % state.num_key_rows:
            raise KvmnnError(f"{label} query heads that form groups for {state.num_key_rows} KV heads")
        if self.requires_all_queries and state.queries is not None and state.queries.shape[1] != state.tokens:
            raise KvmnnError(f"{label} queries of all {state.tokens} tokens, found {state.queries.shape[1]}")
        return state


def validate_share(label: str, share: Any) -> None:
    """Raise `KvmnnError` unless `share` is a number from 0 to 1."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise KvmnnError(f"{label} is {share!r}: expected a number from 0 to 1")
