"""State of layers that is not K and V: of linear attention, convolutions, indexes. It is named, and not read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...arrays.completeness import StateKind
from .objects import IsTensor

_NOT_STATES = ("keys", "values", "cumulative_length", "cumulative_length_int")
_NOT_OF_CACHES = ("key", "value", "cos", "sin", "beam", "layers", "device", "_buffers", "_parameters", "_modules")
_KINDS: tuple[tuple[StateKind, tuple[str, ...]], ...] = (
    ("linear", ("recurrent", "linear")),
    ("recurrent", ("conv", "ssm", "rnn", "mamba", "state")),
    ("index", ("index", "compress")),
)


def state_kind(names: tuple[str, ...]) -> StateKind:
    """What a layer without K and V keeps, by the names of its tensors; ``"shared"`` where it keeps nothing."""
    if not names:
        return "shared"
    for kind, words in _KINDS:
        if any(word in name for name in names for word in words):
            return kind
    return "unknown"


def layer_states(state: Mapping[str, Any], is_tensor: IsTensor) -> tuple[str, ...]:
    """The names of a layer's attributes that hold tensors other than K and V."""
    return tuple(
        sorted(
            name
            for name, value in state.items()
            if name not in _NOT_STATES and not name.startswith("_") and _holds_tensor(value, is_tensor)
        )
    )


def cache_states(state: Mapping[str, Any], is_tensor: IsTensor, max_layers: int) -> dict[int, tuple[str, ...]]:
    """The same of a cache that has lists or dicts of tensors by layer, such as ``conv_states``."""
    found: dict[int, tuple[str, ...]] = {}
    for name in sorted(name for name in state if isinstance(name, str)):
        value = state[name]
        if any(word in name for word in _NOT_OF_CACHES) or not isinstance(value, Mapping | list | tuple):
            continue
        named = value.items() if isinstance(value, Mapping) else enumerate(value)
        for number, item in named:
            if type(number) is int and 0 <= number < max_layers and _holds_tensor(item, is_tensor):
                found[number] = (*found.get(number, ()), name)
    return found


def named_tensors(name: str, value: Any, is_tensor: IsTensor) -> tuple[tuple[str, Any], ...]:
    """The tensors of a state by name: its own, or of a list or dict of them ``<name>.<key>``."""
    if is_tensor(value):
        return ((name, value),) if 0 not in value.shape else ()
    if not isinstance(value, Mapping | list | tuple):
        return ()
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return tuple((f"{name}.{key}", item) for key, item in items if is_tensor(item) and 0 not in item.shape)


def layer_tensors(
    state: Mapping[str, Any], names: Iterable[str], is_tensor: IsTensor, number: int | None = None
) -> tuple[tuple[str, Any], ...]:
    """The tensors of the states with these names, in lists or dicts by layer those of layer `number`."""
    found: list[tuple[str, Any]] = []
    for name in names:
        found += named_tensors(name, state[name] if number is None else state[name][number], is_tensor)
    return tuple(found)


def _holds_tensor(value: object, is_tensor: IsTensor) -> bool:
    """Whether a value is a tensor of state, with a batch and something in it, or a list or dict of such."""
    return any(len(item.shape) > 1 and 0 not in item.shape for item in _tensors(value, is_tensor))


def _tensors(value: object, is_tensor: IsTensor) -> Iterator[Any]:
    if is_tensor(value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        items = list(value.values()) if isinstance(value, Mapping) else value
        yield from filter(is_tensor, items)
