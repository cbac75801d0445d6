"""State of layers that is not K and V: of linear attention, convolutions, indexes. It is named, and not read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...arrays.completeness import StateKind
from .objects import TensorPredicate

_NON_STATE_ATTRIBUTES = ("keys", "values", "cumulative_length", "cumulative_length_int")
_NON_STATE_WORDS = ("key", "value", "cos", "sin", "beam", "layers", "device", "_buffers", "_parameters", "_modules")
_NAME_WORDS_BY_STATE_KIND: tuple[tuple[StateKind, tuple[str, ...]], ...] = (
    ("linear", ("recurrent", "linear")),
    ("recurrent", ("conv", "ssm", "rnn", "mamba", "state")),
    ("index", ("index", "compress")),
)


def infer_state_kind(names: tuple[str, ...]) -> StateKind:
    """What a layer without K and V keeps, by the names of its tensors; ``"shared"`` where it keeps nothing."""
    if not names:
        return "shared"
    for kind, words in _NAME_WORDS_BY_STATE_KIND:
        if any(word in name for name in names for word in words):
            return kind
    return "unknown"


def list_layer_state_names(state: Mapping[str, Any], is_tensor: TensorPredicate) -> tuple[str, ...]:
    """The names of a layer's attributes that hold tensors other than K and V."""
    return tuple(
        sorted(
            name
            for name, value in state.items()
            if name not in _NON_STATE_ATTRIBUTES
            and not name.startswith("_")
            and _contains_state_tensor(value, is_tensor)
        )
    )


def collect_cache_state_names(
    state: Mapping[str, Any], is_tensor: TensorPredicate, max_layers: int
) -> dict[int, tuple[str, ...]]:
    """The same of a cache that has lists or dicts of tensors by layer, such as ``conv_states``."""
    state_names_by_layer: dict[int, tuple[str, ...]] = {}
    for name in sorted(name for name in state if isinstance(name, str)):
        value = state[name]
        if any(word in name for word in _NON_STATE_WORDS) or not isinstance(value, Mapping | list | tuple):
            continue
        numbered_items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for layer_number, item in numbered_items:
            if type(layer_number) is int and 0 <= layer_number < max_layers and _contains_state_tensor(item, is_tensor):
                state_names_by_layer[layer_number] = (*state_names_by_layer.get(layer_number, ()), name)
    return state_names_by_layer


def name_state_tensors(name: str, value: Any, is_tensor: TensorPredicate) -> tuple[tuple[str, Any], ...]:
    """The tensors of a state by name: its own, or of a list or dict of them ``<name>.<key>``."""
    if is_tensor(value):
        return ((name, value),) if 0 not in value.shape else ()
    if not isinstance(value, Mapping | list | tuple):
        return ()
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return tuple((f"{name}.{key}", item) for key, item in items if is_tensor(item) and 0 not in item.shape)


def collect_layer_tensors(
    state: Mapping[str, Any], names: Iterable[str], is_tensor: TensorPredicate, layer_number: int | None = None
) -> tuple[tuple[str, Any], ...]:
    """The tensors of the states with these names, in lists or dicts by layer those of layer `layer_number`."""
    named_tensors: list[tuple[str, Any]] = []
    for name in names:
        named_tensors += name_state_tensors(
            name, state[name] if layer_number is None else state[name][layer_number], is_tensor
        )
    return tuple(named_tensors)


def _contains_state_tensor(value: object, is_tensor: TensorPredicate) -> bool:
    """Whether a value is a tensor of state, with a batch and something in it, or a list or dict of such."""
    return any(len(item.shape) > 1 and 0 not in item.shape for item in _iter_tensors(value, is_tensor))


def _iter_tensors(value: object, is_tensor: TensorPredicate) -> Iterator[Any]:
    if is_tensor(value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        items = list(value.values()) if isinstance(value, Mapping) else value
        yield from filter(is_tensor, items)
