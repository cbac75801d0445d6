"""Caches of transformers as they are found: tensors, objects by class name, layers, and what lies next to a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy.typing as npt

from ...arrays.completeness import StateKind

CacheForm = Literal["cache", "static", "pairs", "legacy", "dict", "generator"]
FORM_BY_CLASS: dict[str, CacheForm] = {"list": "pairs", "tuple": "legacy", "dict": "dict"}


class AnyTensor(Protocol):
    """A tensor in memory or in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its axes."""

    @property
    def type_name(self) -> str:
        """Of its elements, as torch calls it, without ``torch.``."""

    def read_elements_unbounded(self) -> npt.NDArray[Any]:
        """Its words; bfloat16 as uint16."""


TensorPredicate = Callable[[object], bool]


class StubObject:
    """An object of transformers: its class by name, and its attributes.

    Parameters
    ----------
    full_name
        Of the class.
    state
        Attributes; empty until they are set.
    """

    __slots__ = ("full_name", "state")

    def __init__(self, full_name: str, state: Mapping[str, Any] | None = None) -> None:
        self.full_name = full_name
        self.state: Mapping[str, Any] = state or {}

    @property
    def class_name(self) -> str:
        """The class without its module."""
        return self.full_name.rpartition(".")[2]


@dataclass(frozen=True)
class KVLayer:
    """K and V of one layer.

    Parameters
    ----------
    number
        From 0.
    keys, values
        ``[batch, kv_head, token, head_dim]``, if nothing says otherwise.
    num_seen
        Tokens that the layer has seen; None where it does not say.
    is_buffer
        Whether its tensors have rows for tokens that may still come.
    is_window
        Whether the layer attends to the last tokens alone, and its rows are those.
    window
        Tokens that such a layer attends to; None where nothing tells.
    state_names
        Names of further tensors of the layer, which are not read.
    """

    number: int
    keys: AnyTensor
    values: AnyTensor
    num_seen: int | None = None
    is_buffer: bool = False
    is_window: bool = False
    window: int | None = None
    state_names: tuple[str, ...] = ()

    def with_state_names(self, names: tuple[str, ...]) -> KVLayer:
        """Return the layer with further tensors."""
        return replace(self, state_names=tuple(sorted({*self.state_names, *names}))) if names else self


@dataclass(frozen=True)
class StateOnlyLayer:
    """A layer without K and V.

    Parameters
    ----------
    number
        From 0.
    kind
        What its state is; ``"shared"`` for a layer that was never written to, as it has none of its own.
    state_names
        Names of its tensors.
    tensors
        These by name; of a list or dict of them each by a name of its own.
    """

    number: int
    kind: StateKind = "shared"
    state_names: tuple[str, ...] = ()
    tensors: tuple[tuple[str, AnyTensor], ...] = ()


@dataclass
class TransformersCache:
    """A cache as it was found.

    Parameters
    ----------
    class_name
        The class of the cache, or ``"list"``, ``"tuple"``, ``"dict"`` of pairs.
    form
        What it was found as: an object, one with buffers longer than the text, a list of pairs, a tuple of pairs, or
        something in a dict.
    layers
        Those with K and V.
    other_layers
        Those without.
    engine
        Whose it is.
    sidecar_tensors
        Tensors that lie next to the cache in a dict, by their names.
    num_seen
        Tokens that the cache has counted (``_seen_tokens``); None where it does not count.
    num_sinks
        Tokens at the beginning of the text that a ``SinkCache`` keeps for good.
    is_rerotated
        Whether K of such a cache is rotated to places in the cache, not in the text.
    cross_attention
        K and V of the encoder's output, where this is the decoder's half of two.
    """

    class_name: str
    form: CacheForm = "cache"
    layers: list[KVLayer] = field(default_factory=list)
    other_layers: list[StateOnlyLayer] = field(default_factory=list)
    engine: str = "transformers"
    sidecar_tensors: dict[str, AnyTensor] = field(default_factory=dict)
    num_seen: int | None = None
    num_sinks: int | None = None
    is_rerotated: bool = False
    cross_attention: TransformersCache | None = None
