"""Policies that are made of others, or that cut channels instead of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from .._util.dataclass import dataclass
from .._util.validation import validate_int
from ..dtypes import Elements, Floats, Indices
from ..errors import KvmnnError
from .option_parser import parse_options
from .policy import LayerState, PolicyInput, Selection
from .scored import ScoredPolicy, TensorName
from .tensors import average_groups, get_queries, widen
from .topk import argtopk_lowest
from .wrappers import take_tokens_of_cut_layer


@dataclass(frozen=True, kw_only=True)
class ThinK(ScoredPolicy):
    """Set the channels of K to 0 that matter least to the latest queries; all tokens stay.

    Paper: Xu et al., "ThinK", arXiv 2407.21018. Original: kvpress, `ThinKPress`.

    Parameters
    ----------
    budget, keep_ratio
        Share of the channels of each head that stay.
    window
        The latest tokens, whose queries are observed.

    Notes
    -----
    A channel's score is the mean square of the window's queries in it, averaged over the group, times that of all keys.
    Channels are numbers of a rotated key, as it is stored. Zeros take as much memory as before; frames shrink.

    Where it differs from kvpress: float32 for every cache; of equal scores the later channel stays. `budget` is a share
    of the tokens.
    """

    name = "think"
    tensors: ClassVar[frozenset[TensorName]] = frozenset({"keys", "queries"})
    budget_help = "the share of K's channels that stay"

    window: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_int(self.window, f"{self.name}: window", 1)
        if self.wrapper != "none" or self.phase != "prompt":
            raise KvmnnError(f"{self.name}: expected no wrapper and phase prompt, as it cuts channels of a prompt")

    @property
    def query_window(self) -> int | None:
        return self.window

    def select_tokens(self, state: PolicyInput) -> None:
        return None

    def compute_scores(self, layer: LayerState) -> Floats:
        """Return scores of channels, ``[kv_head, head_dim]``."""
        keys, queries = widen(layer.keys), get_queries(layer)[:, -self.window :]
        scores: Floats = average_groups((queries**2).mean(axis=1), len(keys)) * (keys**2).mean(axis=1)
        return scores

    @property
    def edits_keys(self) -> bool:
        return True

    def edit_keys(self, layer: LayerState) -> Elements | None:
        assert layer.keys is not None
        head_dim = layer.keys.shape[2]
        count = int(head_dim * (1 - self._resolve_for_layer(layer).resolve_share(layer.tokens)))
        keys = layer.keys.copy()
        for head, channels in enumerate(argtopk_lowest(self.compute_scores(layer), count)):
            keys[head, :, channels] = 0
        return keys


@dataclass(frozen=True, kw_only=True)
class Composed(ScoredPolicy):
    """Cut by several policies, one after another: each sees the tokens that those before it kept.

    Paper: a combination of others; each names its own, such as arXiv 2404.14469. Original: kvpress, `ComposedPress`.

    Parameters
    ----------
    policies
        Scored policies between ``+``, each with its options after ``@``: ``"keydiff+snapkv@window=32"``.
    budget, keep_ratio
        What stays after all of them. Policies without ``@keep_ratio`` or ``@budget`` of their own share it in equal
        steps: of two, each keeps the square root of the ratio.

    Notes
    -----
    Where it differs from kvpress: ratios follow from the budget. Policies that give the heads of a layer different
    numbers of tokens are refused, as there. Queries are those of all tokens that were fed.
    """

    name = "composed"
    has_independent_layers = True

    policies: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "parts", tuple(self._parse_parts()))
        if len(self.parts) < 2 or self.wrapper != "none" or self.by_layer:
            raise KvmnnError(
                f"{self.name}: policies is {self.policies!r}: expected two or more such as keydiff+snapkv, and wrapper "
                "and by_layer as options of these (keydiff@wrapper=chunk)"
            )
        if any(part.name == ThinK.name for part in self.parts[:-1]):
            raise KvmnnError(f"{self.name}: {ThinK.name} comes last, as it changes the keys of the tokens that stay")
        for part in self.parts:
            if part.wrapper in ("ada", "critical_ada") or part.name in ("composed", "duo_attention"):
                raise KvmnnError(f"{self.name}: {part.name} keeps different numbers of tokens in heads of one layer")
            if part.requires_all_queries and self.phase != "prompt":
                raise KvmnnError(f"{self.name}: {part.name} needs the queries of all tokens: expected phase prompt")

    #: The policies, in order.
    parts: ClassVar[tuple[ScoredPolicy, ...]] = ()

    @property
    def required_tensors(self) -> frozenset[TensorName]:
        return frozenset().union(*(part.required_tensors for part in self.parts))

    @property
    def query_window(self) -> int | None:
        windows = [part.query_window for part in self.parts]
        return None if None in windows else max(window or 0 for window in windows)

    def check_layers(self, num_layers: int) -> None:
        super().check_layers(num_layers)
        for part in self.parts:
            part.check_layers(num_layers)

    def compute_scores(self, layer: LayerState) -> Floats:
        return self.parts[-1].compute_scores(layer)

    def select_tokens(self, state: PolicyInput) -> Selection:
        layer = self._check_tensors(state)
        size, num_parts = self._resolve_for_layer(layer).resolve_layer_budget(layer), self._count_sharing_parts()
        kept_indices: Indices = np.tile(np.arange(layer.tokens), (layer.num_key_rows, 1))
        number = 0
        for part in self.parts:
            part_layer = take_tokens_of_cut_layer(layer, kept_indices)
            if self._shares_budget(part):
                number += 1
                share = (min(size, layer.tokens) / layer.tokens) ** (number / num_parts)
                part_size = size if number == num_parts else round(share * layer.tokens)
                part = replace(part, budget=part_size, keep_ratio=None)
            selection = part.select_tokens(part_layer)
            if isinstance(selection, list):
                raise KvmnnError(f"layer {layer.layer}: {part.name} keeps different numbers of tokens in its heads")
            if selection is not None:
                kept_indices = np.take_along_axis(kept_indices, np.atleast_2d(selection), axis=1)
        return None if kept_indices.shape[1] == layer.tokens else kept_indices

    @property
    def edits_keys(self) -> bool:
        return self.parts[-1].edits_keys

    def edit_keys(self, layer: LayerState) -> Elements | None:
        return self.parts[-1].edit_keys(layer)

    def _shares_budget(self, part: ScoredPolicy) -> bool:
        return part.budget == _SHARED_BUDGET

    def _count_sharing_parts(self) -> int:
        return sum(map(self._shares_budget, self.parts))

    def _parse_parts(self) -> Iterator[ScoredPolicy]:
        classes = {policy.name: policy for policy in _iter_subclasses(ScoredPolicy) if hasattr(policy, "name")}
        for text in self.policies.split("+") if self.policies else []:
            name, *option_texts = text.split("@")
            if name not in classes:
                raise KvmnnError(f"{self.name}: {name!r} is no scored policy: expected some of {', '.join(classes)}")
            pairs = [option.partition("=") for option in option_texts]
            if any(not value for _, _, value in pairs):
                raise KvmnnError(f"{self.name}: {text!r}: expected NAME@option=value")
            options = parse_options(classes[name], {key: value for key, _, value in pairs}, None)
            if "budget" not in options and "keep_ratio" not in options:
                if name == ThinK.name:
                    raise KvmnnError(f"{self.name}: {name} needs a keep_ratio of its own: {name}@keep_ratio=0.5")
                options["budget"] = _SHARED_BUDGET
            yield classes[name](**options)


_SHARED_BUDGET = 999_999_999
"""Budget of a part that has none of its own: no cache has so many tokens."""


def _iter_subclasses(policy: Any) -> Iterator[type[ScoredPolicy]]:
    for subclass in policy.__subclasses__():
        yield subclass
        yield from _iter_subclasses(subclass)
