"""Which tensors of a cache of transformers are K and V of which layer, and what other state its layers have.

Objects are looked at by what they have, not by their class: transformers 5 and late 4 have ``layers`` with ``keys`` and
``values``, earlier ones ``key_cache`` and ``value_cache``; before that a cache was a tuple of (K, V). What is not
understood is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...errors import SourceError
from .objects import FORMS, Cache, IsTensor, Layer, Made, OtherLayer
from .other_states import cache_states, layer_states, layer_tensors, state_kind

_MOST_DEPTH = 4
_MOST_LAYERS = 1 << 16
_LISTS = (("key_cache", "value_cache"), ("keys", "values"), ("key", "value"), ("k", "v"))
_HALVES = (4, 6)  # K and V of the decoder and of the encoder; transformers 5 adds a sliding window or None to each pair
_WINDOW_WORDS = ("Sliding", "Chunked")


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
        states = sorted({name for other in cache.others for name in other.states})
        which = f"K and V: it has {', '.join(states)[:80]}" if states else "a layer that holds anything"
        raise SourceError(f"{where}: a {cache.kind} without {which}")
    for half in filter(None, (cache, cache.cross)):
        is_static = any(layer.is_buffer for layer in half.layers)
        half.form = "static" if is_static else FORMS.get("dict" if isinstance(root, Mapping) else half.kind, "cache")
        if isinstance(root, Mapping):
            half.beside = {name: value for name, value in root.items() if isinstance(name, str) and is_tensor(value)}
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
            lists = self._of_lists("dict", value)
            return self._of_dict(value) if lists is None else self._with_states(lists, value)
        if isinstance(value, list | tuple) and len(value) <= _MOST_LAYERS:
            pairs = list(map(self._as_pair, value))
            if self._are_pairs(pairs):
                return self._of_pairs(type(value).__name__, enumerate(pairs))
            if pairs and all(map(self._is_both_halves, pairs)):
                middle = len(pairs[0]) // 2
                kind = type(value).__name__
                cache = self._of_pairs(kind, enumerate(pair[:2] for pair in pairs))
                cache.cross = self._of_pairs(kind, enumerate(pair[middle : middle + 2] for pair in pairs))
                return cache
        return None

    def _of_object(self, value: Made) -> Cache | None:
        state = value.state
        if isinstance(modules := state.get("_modules"), Mapping):  # caches of transformers 4.47 were torch modules
            state = {**state, **{name: item for name, item in modules.items() if isinstance(name, str)}}
        if "self_attention_cache" in state or value.kind == "EncoderDecoderCache":
            return self._of_halves(value.kind, state)
        layers = state.get("layers")
        if isinstance(layers, list | tuple) and all(isinstance(layer, Made) for layer in layers):
            self._check_count(value.kind, len(layers))
            return self._with_states(self._of_layers(value.kind, layers), state)
        found = self._of_lists(value.kind, state) or self._of_buffers(value)
        return None if found is None else self._with_states(found, state)

    def _of_halves(self, kind: str, state: Mapping[str, Any]) -> Cache:
        """The decoder's cache, with that of the encoder's output in `Cache.cross`."""
        halves = []
        for name in ("self_attention_cache", "cross_attention_cache"):
            half = self._cache(state.get(name))
            if half is None:
                raise SourceError(f"{self.where}: a {kind} whose {name} is no cache that is known")
            halves.append(half)
        cache, cross = halves
        cache.kind, cache.cross = kind, cross if cross.layers else None
        return cache

    def _of_layers(self, kind: str, layers: list[Made] | tuple[Made, ...]) -> Cache:
        found = Cache(kind)
        for number, layer in enumerate(layers):
            keys, values = layer.state.get("keys"), layer.state.get("values")
            if _is_quantised(layer.kind, layer.state):
                raise self._not_read(number, layer.kind, "whose older tokens are quantised: expected a DynamicCache")
            states = layer_states(layer.state, self.is_tensor)
            if (keys is None and values is None) or (self._is_empty(keys) and self._is_empty(values)):
                tensors = layer_tensors(layer.state, states, self.is_tensor)
                found.others.append(OtherLayer(number, state_kind(states), states, tensors))
                continue
            if not (self.is_tensor(keys) and self.is_tensor(values)):
                raise self._not_read(number, layer.kind, "whose keys and values are not two tensors")
            found.layers.append(self._layer(number, layer, keys, values, states))
        return found

    def _with_states(self, cache: Cache, state: Mapping[str, Any]) -> Cache:
        """The same with what the cache itself has of each layer, and how many tokens it has counted."""
        counted = self._number(state.get("_seen_tokens", state.get("seen_tokens")))
        cache.seen = counted or None
        if cache.kind == "SinkCache":
            cache.sinks = self._number(state.get("num_sink_tokens"))
            cache.is_rerotated = self.is_tensor(state.get("_cos_cache"))
        states = cache_states(state, self.is_tensor, _MOST_LAYERS)
        with_pairs = {layer.number for layer in cache.layers}
        cache.layers = [layer.with_states(states.get(layer.number, ())) for layer in cache.layers]
        known = {other.number: other for other in cache.others} | {
            number: OtherLayer(number, state_kind(names), names, layer_tensors(state, names, self.is_tensor, number))
            for number, names in states.items()
            if number not in with_pairs
        }
        cache.others = [known[number] for number in sorted(known)]
        return cache

    def _check_count(self, kind: str, layers: int) -> None:
        if layers > _MOST_LAYERS:
            raise SourceError(f"{self.where}: a {kind} of {layers:,} layers: at most {_MOST_LAYERS:,} are read")

    def _layer(self, number: int, layer: Made, keys: Any, values: Any, states: tuple[str, ...]) -> Layer:
        """A layer with the numbers that it says of its rows."""
        state = layer.state
        # The int is right in all versions: the tensor of a window that is full is no longer counted on.
        seen = self._number(state.get("cumulative_length_int", state.get("cumulative_length")))
        window = self._number(state.get("sliding_window"))
        is_window = window is not None or state.get("is_sliding") is True or _is_window(layer.kind)
        is_buffer = "max_cache_len" in state or "Static" in layer.kind
        if is_window and window is None:
            window = self._number(state.get("max_cache_len"))
        rows = keys.shape[-2] if len(keys.shape) > 1 else 0
        if is_buffer and not is_window and seen is not None and seen > rows:
            raise self._not_read(number, layer.kind, f"that says {seen} tokens, and its buffers have {rows}")
        return Layer(
            number, keys, values, seen=seen, is_buffer=is_buffer, is_window=is_window, window=window, states=states
        )

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
        """The same with buffers and windows, where a cache of transformers 4 has them."""
        if not ("max_cache_len" in state or "Static" in cache.kind or _is_window(cache.kind)):
            return cache
        counted = self._number(state.get("_seen_tokens")) or None
        layers = []
        for layer in cache.layers:
            is_window = self._is_sliding(cache.kind, state, layer.number)
            seen, lengths = counted, state.get("cumulative_length")
            if is_window and isinstance(lengths, list | tuple) and layer.number < len(lengths):
                seen = self._number(lengths[layer.number]) or None
            window = int(layer.keys.shape[2]) if is_window and len(layer.keys.shape) > 2 else None
            if not is_window and seen is not None and len(layer.keys.shape) > 2 and seen > layer.keys.shape[2]:
                raise self._not_read(layer.number, cache.kind, f"that says {seen} tokens, and its buffers have fewer")
            layers.append(
                Layer(
                    layer.number,
                    layer.keys,
                    layer.values,
                    seen=seen,
                    is_buffer=True,
                    is_window=is_window,
                    window=window,
                )
            )
        cache.layers = layers
        return cache

    def _is_sliding(self, kind: str, state: Mapping[str, Any], number: int) -> bool:
        """Whether a layer of a static cache of transformers 4 has a window."""
        said = state.get("is_sliding_list", state.get("is_sliding"))
        if self.is_tensor(said):
            said = np.asarray(said.view()).reshape(-1).tolist()
        if isinstance(said, list | tuple):
            return number < len(said) and bool(said[number])
        return said is True or _is_window(kind)

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
                found.others.append(OtherLayer(number))
            else:
                found.layers.append(self._of_pair(number, pair))
        return found

    def _of_pair(self, number: int, pair: Any) -> Layer:
        """K and V, and the size of a window where iterating over a cache of transformers 5 has added it."""
        window = self._number(pair[2]) if len(pair) == 3 else None
        return Layer(number, pair[0], pair[1], is_window=window is not None, window=window)

    def _are_pairs(self, values: Any) -> bool:
        return any(map(self._is_pair, values)) and all(self._is_pair(item) or self._is_nothing(item) for item in values)

    def _is_both_halves(self, value: Any) -> bool:
        """K and V of the decoder, then of the encoder."""
        if not isinstance(value, list | tuple) or len(value) not in _HALVES:
            return False
        middle = len(value) // 2
        return self._is_pair(value[:middle]) and self._is_pair(value[middle:])

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


def _is_window(kind: str) -> bool:
    """Whether a class of layers or caches, by its name, keeps the last tokens alone."""
    return any(word in kind for word in _WINDOW_WORDS)


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
