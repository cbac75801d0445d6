"""Which tensors of a cache of transformers are K and V of which layer, and how many of their tokens are valid.

Objects are looked at by what they have, not by their class: transformers 5 and late 4 have ``layers`` with ``keys`` and
``values``, earlier ones ``key_cache`` and ``value_cache``; before that a cache was a tuple of (K, V). What is not
understood is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ...errors import SourceError

_MOST_DEPTH = 4
_MOST_LAYERS = 1 << 16
_LISTS = (("key_cache", "value_cache"), ("keys", "values"), ("key", "value"), ("k", "v"))


Form = Literal["cache", "static", "pairs", "legacy", "dict", "generator"]
_FORMS: dict[str, Form] = {"list": "pairs", "tuple": "legacy", "dict": "dict"}


class AnyTensor(Protocol):
    """A tensor in memory or in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its axes."""

    @property
    def type_name(self) -> str:
        """Of its elements, as torch calls it, without ``torch.``."""

    def view(self) -> npt.NDArray[Any]:
        """Its words; bfloat16 as uint16."""


class Made:
    """An object of transformers: its class by name, and its attributes.

    Parameters
    ----------
    name
        Of the class.
    state
        Attributes; empty until they are set.
    """

    __slots__ = ("name", "state")

    def __init__(self, name: str, state: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.state: Mapping[str, Any] = state or {}

    @property
    def kind(self) -> str:
        """The class without its module."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Layer:
    """K and V of one layer.

    Parameters
    ----------
    number
        From 0.
    keys, values
        ``[batch, kv_head, token, head_dim]``, if nothing says otherwise.
    valid
        Rows that hold tokens, where the buffers are longer; None for all.
    seen
        Tokens that the layer has seen; None where it says no more than `keys` does.
    """

    number: int
    keys: AnyTensor
    values: AnyTensor
    valid: int | None = None
    seen: int | None = None


@dataclass
class Cache:
    """What was found.

    Parameters
    ----------
    kind
        The class of the cache, or ``"list"``, ``"tuple"``, ``"dict"`` of pairs.
    form
        What it was found as: an object, one with buffers longer than the text, a list of pairs, a tuple of pairs, or
        something in a dict.
    layers
        Those that hold something.
    empty
        The numbers of those that do not.
    engine
        Whose it is.
    beside
        Tensors that lie beside the cache in a dict, by their names.
    """

    kind: str
    form: Form = "cache"
    layers: list[Layer] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    engine: str = "transformers"
    beside: dict[str, AnyTensor] = field(default_factory=dict)


IsTensor = Callable[[object], bool]


def find_cache(where: str, root: object, is_tensor: IsTensor) -> Cache | None:
    """The one cache in an object that was saved or is in memory; None where there is none.

    Parameters
    ----------
    where
        What messages call it.
    root
        A cache, a list, tuple or dict of (K, V) or of ``{"key": K, "value": V}``, or a dict that holds a cache among
        other things.
    is_tensor
        Tells tensors from everything else.

    Raises
    ------
    SourceError
        For several caches, and for one that is not understood.
    """
    finder = _Finder(where, is_tensor)
    found = list(finder.caches(root, _MOST_DEPTH))
    if len(found) > 1:
        names = ", ".join(repr(name[:40]) for name, _ in found[:4])
        raise SourceError(f"{where}: holds {len(found)} caches ({names}): save each in a file of its own")
    if not found:
        return None
    cache = found[0][1]
    if not cache.layers:
        raise SourceError(f"{where}: a {cache.kind} without a layer that holds anything")
    is_static = any(layer.valid is not None for layer in cache.layers)
    cache.form = "static" if is_static else _FORMS.get("dict" if isinstance(root, Mapping) else cache.kind, "cache")
    if isinstance(root, Mapping):
        cache.beside = {name: value for name, value in root.items() if isinstance(name, str) and is_tensor(value)}
    return cache


class _Finder:
    def __init__(self, where: str, is_tensor: IsTensor) -> None:
        self.where = where
        self.is_tensor = is_tensor
        self.seen: set[int] = set()

    def caches(self, value: object, depth: int) -> Iterator[tuple[str, Cache]]:
        """Every cache in a value and in the dicts and lists below it, once, by its name."""
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        found = self._cache(value)
        if found is not None:
            yield found.kind, found
        elif depth:
            for name, item in _items(value):
                for _, cache in self.caches(item, depth - 1):
                    yield name, cache

    def _cache(self, value: object) -> Cache | None:
        """A value as a cache; None if it is none."""
        if isinstance(value, Made):
            return self._of_object(value)
        if isinstance(value, Mapping):
            return self._of_lists("dict", value) or self._of_dict(value)
        if isinstance(value, list | tuple) and len(value) <= _MOST_LAYERS:
            pairs = list(map(self._as_pair, value))
            if self._are_pairs(pairs):
                return self._of_pairs(type(value).__name__, enumerate(pairs))
        return None

    def _of_object(self, value: Made) -> Cache | None:
        if "self_attention_cache" in value.state or value.kind == "EncoderDecoderCache":
            raise SourceError(
                f"{self.where}: a {value.kind} holds two caches: expected one; its self_attention_cache is that of the "
                "decoder"
            )
        layers = value.state.get("layers")
        if isinstance(layers, list | tuple) and all(isinstance(layer, Made) for layer in layers):
            self._check_count(value.kind, len(layers))
            return self._of_layers(value, layers)
        return self._of_lists(value.kind, value.state) or self._of_buffers(value)

    def _of_layers(self, cache: Made, layers: list[Made] | tuple[Made, ...]) -> Cache:
        found = Cache(cache.kind)
        for number, layer in enumerate(layers):
            keys, values = layer.state.get("keys"), layer.state.get("values")
            if _is_quantised(layer.kind, layer.state):
                raise self._not_read(number, layer.kind, "whose older tokens are quantised: expected a DynamicCache")
            if (keys is None and values is None) or (self._is_empty(keys) and self._is_empty(values)):
                others = sorted(name for name, item in layer.state.items() if self.is_tensor(item))
                if keys is None and others and not others[0].startswith("_"):
                    raise self._not_read(
                        number, layer.kind, f"which holds {', '.join(others)[:80]}, not keys and values"
                    )
                found.empty.append(number)
                continue
            if not (self.is_tensor(keys) and self.is_tensor(values)):
                raise self._not_read(number, layer.kind, "whose keys and values are not two tensors")
            found.layers.append(self._layer(number, layer, keys, values))
        return found

    def _check_count(self, kind: str, layers: int) -> None:
        if layers > _MOST_LAYERS:
            raise SourceError(f"{self.where}: a {kind} of {layers:,} layers: at most {_MOST_LAYERS:,} are read")

    def _layer(self, number: int, layer: Made, keys: Any, values: Any) -> Layer:
        """A layer with the number of its valid rows."""
        seen = self._number(layer.state.get("cumulative_length"))
        rows = keys.shape[-2] if len(keys.shape) > 1 else 0
        if "max_cache_len" not in layer.state and "Static" not in layer.kind:
            return Layer(number, keys, values, None, seen if seen != rows else None)
        if seen is None:
            return Layer(number, keys, values, used_rows(keys))
        if seen > rows and "Sliding" not in layer.kind:
            raise self._not_read(number, layer.kind, f"that says {seen} tokens, and its buffers have {rows}")
        return Layer(number, keys, values, min(seen, rows), seen)

    def _number(self, value: object) -> int | None:
        """A whole number, or the one element of a tensor."""
        if self.is_tensor(value):
            words = np.asarray(value.view())  # type: ignore[attr-defined]
            if words.size != 1 or words.dtype.kind not in "iu":
                return None
            value = int(words.reshape(-1)[0])
        return value if type(value) is int and value >= 0 else None

    def _of_lists(self, kind: str, state: Mapping[str, Any]) -> Cache | None:
        """Two lists, of K and of V."""
        for names in _LISTS:
            keys, values = (state.get(name) for name in names)
            if isinstance(keys, list | tuple) and isinstance(values, list | tuple) and keys:
                if len(keys) != len(values):
                    raise SourceError(
                        f"{self.where}: a {kind} with {len(keys)} {names[0]} and {len(values)} {names[1]}"
                    )
                if _is_quantised(kind, state):
                    raise self._not_read(0, kind, "whose older tokens are quantised: expected a DynamicCache")
                self._check_count(kind, len(keys))
                pairs = list(zip(keys, values, strict=True))
                if all(self._is_pair(pair) or self._is_nothing(pair) for pair in pairs):
                    return self._static(self._of_pairs(kind, enumerate(pairs)), state)
        return None

    def _of_buffers(self, cache: Made) -> Cache | None:
        """``key_cache_<n>`` and ``value_cache_<n>``: the static caches of a few versions were modules."""
        buffers = cache.state.get("_buffers")
        if not isinstance(buffers, Mapping) or "key_cache_0" not in buffers:
            return None
        count = sum(isinstance(name, str) and name.startswith("key_cache_") for name in buffers)
        self._check_count(cache.kind, count)
        pairs = [(buffers.get(f"key_cache_{number}"), buffers.get(f"value_cache_{number}")) for number in range(count)]
        if not all(map(self._is_pair, pairs)):
            raise SourceError(f"{self.where}: a {cache.kind} whose buffers are not K and V of {count} layers")
        return self._static(self._of_pairs(cache.kind, enumerate(pairs)), cache.state)

    def _static(self, cache: Cache, state: Mapping[str, Any]) -> Cache:
        """The same with valid rows, where buffers are as long as the longest text."""
        if "max_cache_len" in state or "Static" in cache.kind:
            seen = self._number(state.get("valid_tokens"))
            cache.layers = [
                Layer(layer.number, layer.keys, layer.values, used_rows(layer.keys) if seen is None else seen)
                for layer in cache.layers
            ]
        return cache

    def _of_dict(self, value: Mapping[Any, Any]) -> Cache | None:
        """Pairs by the numbers of their layers: ``{0: (K, V), 1: (K, V)}``."""
        if not value or len(value) > _MOST_LAYERS:
            return None
        pairs = list(map(self._as_pair, value.values()))
        if not self._are_pairs(pairs):
            return None
        numbers = [_layer_number(name) for name in value]
        if None in numbers or len(set(numbers)) < len(numbers):
            return None
        return self._of_pairs("dict", sorted(zip(numbers, pairs, strict=True), key=lambda item: item[0] or 0))

    def _of_pairs(self, kind: str, pairs: Any) -> Cache:
        found = Cache(kind)
        for number, pair in pairs:
            if self._is_nothing(pair) or (self._is_empty(pair[0]) and self._is_empty(pair[1])):
                found.empty.append(number)
            else:
                found.layers.append(Layer(number, pair[0], pair[1]))
        return found

    def _are_pairs(self, values: Any) -> bool:
        return any(map(self._is_pair, values)) and all(self._is_pair(item) or self._is_nothing(item) for item in values)

    def _as_pair(self, value: Any) -> Any:
        """A dict of K and V as a pair; everything else as it is."""
        if isinstance(value, Mapping):
            for names in _LISTS:
                if value.keys() == set(names):
                    return tuple(value[name] for name in names)
        return value

    def _is_pair(self, value: Any) -> bool:
        """K and V; iterating over a cache of transformers 5 adds a sliding window or None."""
        if not isinstance(value, list | tuple) or not 2 <= len(value) <= 3:
            return False
        third = value[2] if len(value) == 3 else None
        return all(map(self.is_tensor, value[:2])) and (third is None or (self.is_tensor(third) and not third.shape))

    def _is_nothing(self, value: Any) -> bool:
        """What stands for a layer that was never used."""
        if isinstance(value, list | tuple):
            return len(value) in (2, 3) and all(item is None or self._is_nothing_at_all(item) for item in value[:2])
        return value is None

    def _is_nothing_at_all(self, value: Any) -> bool:
        return isinstance(value, list | tuple) and not value

    def _is_empty(self, value: Any) -> bool:
        return self.is_tensor(value) and 0 in value.shape

    def _not_read(self, number: int, kind: str, why: str) -> SourceError:
        return SourceError(f"{self.where}: layer {number} is a {kind}, {why}")


def _is_quantised(kind: str, state: Mapping[Any, Any]) -> bool:
    return "Quantized" in kind or any(isinstance(name, str) and "quantized" in name for name in state)


def _items(value: object) -> Iterator[tuple[str, object]]:
    """The containers in a container, by name."""
    if isinstance(value, Made):
        value = value.state
    if isinstance(value, Mapping):
        named: Iterator[tuple[object, object]] = iter(value.items())
    else:
        named = enumerate(value) if isinstance(value, list | tuple) else iter(())
    for name, item in named:
        if isinstance(item, Made | Mapping | list | tuple):
            yield (str(name) if isinstance(name, str | int) else "?"), item


def _layer_number(name: object) -> int | None:
    if type(name) is int and 0 <= name < _MOST_LAYERS:
        return name
    if isinstance(name, str):
        digits = name.removeprefix("layer_").removeprefix("layer").removeprefix(".")
        return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 6 else None
    return None


def used_rows(tensor: AnyTensor) -> int:
    """Tokens of a ``[batch, kv_head, token, head_dim]`` buffer up to the last one that is not all zeros."""
    words = tensor.view()
    if words.ndim != 4:
        return 0
    words = words.view(f"u{words.dtype.itemsize}")
    low, high = 0, int(words.shape[2])
    while high > low:  # from the end: of a buffer that is nearly full only the end is read
        begin = max(low, high - _ROWS)
        used = np.flatnonzero(words[:, :, begin:high].any(axis=(0, 1, 3)))
        if used.size:
            return begin + int(used[-1]) + 1
        high = begin
    return 0


_ROWS = 256
