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
    """K and V of one layer."""

    #: From 0.
    number: int
    #: ``[batch, kv_head, token, head_dim]``, if nothing says otherwise.
    keys: AnyTensor
    values: AnyTensor
    #: Tokens that the layer has seen; None where it does not say.
    num_seen: int | None = None
    #: Whether its tensors have rows for tokens that may still come.
    is_buffer: bool = False
    #: Whether the layer attends to the last tokens alone, and its rows are those.
    is_window: bool = False
    #: Tokens that such a layer attends to; None where nothing tells.
    window: int | None = None
    #: Names of further tensors of the layer, which are not read.
    state_names: tuple[str, ...] = ()

    def with_state_names(self, names: tuple[str, ...]) -> KVLayer:
        """Return the layer with further tensors."""
        return replace(self, state_names=tuple(sorted({*self.state_names, *names}))) if names else self


@dataclass(frozen=True)
class StateOnlyLayer:
    """A layer without K and V."""

    #: From 0.
    number: int
    #: What its state is; ``"shared"`` for a layer that was never written to, as it has none of its own.
    kind: StateKind = "shared"
    #: Names of its tensors.
    state_names: tuple[str, ...] = ()
    #: These by name; of a list or dict of them each by a name of its own.
    tensors: tuple[tuple[str, AnyTensor], ...] = ()


@dataclass
class TransformersCache:
    """A cache as it was found."""

    #: The class of the cache, or ``"list"``, ``"tuple"``, ``"dict"`` of pairs.
    class_name: str
    #: What it was found as: an object, one with buffers longer than the text, a list of pairs, a tuple of pairs, or
    #: something in a dict.
    form: CacheForm = "cache"
    #: Those with K and V.
    layers: list[KVLayer] = field(default_factory=list)
    #: Those without.
    other_layers: list[StateOnlyLayer] = field(default_factory=list)
    #: Whose it is.
    engine: str = "transformers"
    #: Tensors that lie next to the cache in a dict, by their names.
    sidecar_tensors: dict[str, AnyTensor] = field(default_factory=dict)
    #: Tokens that the cache has counted (``_seen_tokens``); None where it does not count.
    num_seen: int | None = None
    #: Tokens at the beginning of the text that a ``SinkCache`` keeps for good.
    num_sinks: int | None = None
    #: Whether K of such a cache is rotated to places in the cache, not in the text.
    is_rerotated: bool = False
    #: K and V of the encoder's output, where this is the decoder's half of two.
    cross_attention: TransformersCache | None = None
