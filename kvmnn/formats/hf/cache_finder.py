"""Find K and V of each layer among the tensors of a transformers cache, and other state of layers.

Objects are recognised by their attributes, not by their class: transformers 5 and late 4 have ``layers`` with ``keys``
and ``values``, earlier versions ``key_cache`` and ``value_cache``, and before that a cache was a tuple of (K, V).
Unknown objects are rejected by name. State of layers that is not K and V (linear attention, convolutions, indexes) is
named, and not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ..._util.dataclass import dataclass
from ...arrays.completeness import StateKind
from ...errors import SourceError

CacheForm = Literal["cache", "static", "pairs", "legacy", "dict", "generator"]
FORM_BY_CLASS: dict[str, CacheForm] = {"list": "pairs", "tuple": "legacy", "dict": "dict"}


class AnyTensor(Protocol):
    """A tensor in memory or in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of its axes."""

    @property
    def type_name(self) -> str:
        """Return the torch name of the element type, without ``torch.``."""

    def read_elements_unbounded(self) -> npt.NDArray[Any]:
        """Return its words; bfloat16 as uint16."""


TensorPredicate = Callable[[object], bool]


class StubObject:
    """A stand-in for a transformers object: the full name of its class, and its attributes."""

    __slots__ = ("full_name", "state")

    def __init__(self, full_name: str, state: Mapping[str, Any] | None = None) -> None:
        self.full_name = full_name
        self.state: Mapping[str, Any] = state or {}

    @property
    def class_name(self) -> str:
        """Return the name of the class without its module."""
        return self.full_name.rpartition(".")[2]


@dataclass(frozen=True)
class KVLayer:
    """K and V of one layer."""

    #: From 0.
    number: int
    #: ``[batch, kv_head, token, head_dim]`` unless specified otherwise.
    keys: AnyTensor
    values: AnyTensor
    #: Tokens that the layer has seen; None if it does not record that.
    num_seen: int | None = None
    #: Whether its tensors are buffers with rows for later tokens.
    is_buffer: bool = False
    #: Whether the layer has a sliding window, and only the rows of its last tokens.
    is_window: bool = False
    #: Tokens in the window; None if unknown.
    window: int | None = None
    #: Names of further tensors of the layer, which are not read.
    state_names: tuple[str, ...] = ()

    def with_state_names(self, names: tuple[str, ...]) -> KVLayer:
        """Return the layer with further tensors."""
        return replace(self, state_names=tuple(sorted({*self.state_names, *names}))) if names else self


@dataclass(frozen=True)
class StateOnlyLayer:
    """A layer without K and V, with other state or none."""

    #: From 0.
    number: int
    #: Kind of its state; ``"shared"`` for a layer that was never written to, which has no state of its own.
    kind: StateKind = "shared"
    #: Names of its tensors.
    state_names: tuple[str, ...] = ()
    #: The tensors by name; each item of a list or dict of tensors has a name of its own.
    tensors: tuple[tuple[str, AnyTensor], ...] = ()


@dataclass
class TransformersCache:
    """A transformers cache, as an object or as plain lists, tuples and dicts."""

    #: The class of the cache, or ``"list"``, ``"tuple"``, ``"dict"`` of pairs.
    class_name: str
    #: Form of the cache: an object, one with buffers longer than the text, a list or a tuple of pairs, or a dict.
    form: CacheForm = "cache"
    #: Layers with K and V.
    layers: list[KVLayer] = field(default_factory=list)
    #: Layers without K and V.
    other_layers: list[StateOnlyLayer] = field(default_factory=list)
    #: Name of the engine.
    engine: str = "transformers"
    #: Tensors next to the cache in a dict, by name.
    sidecar_tensors: dict[str, AnyTensor] = field(default_factory=dict)
    #: Tokens that the cache has counted (``_seen_tokens``); None if it does not count.
    num_seen: int | None = None
    #: Tokens at the start of the text that a ``SinkCache`` never evicts.
    num_sinks: int | None = None
    #: Whether K of such a cache is rotated to cache slots instead of text positions.
    is_rerotated: bool = False
    #: K and V of the encoder's output, if this is a decoder's cache.
    cross_attention: TransformersCache | None = None


_NON_STATE_ATTRIBUTES = ("keys", "values", "cumulative_length", "cumulative_length_int")
_NON_STATE_WORDS = ("key", "value", "cos", "sin", "beam", "layers", "device", "_buffers", "_parameters", "_modules")
_NAME_WORDS_BY_STATE_KIND: tuple[tuple[StateKind, tuple[str, ...]], ...] = (
    ("linear", ("recurrent", "linear")),
    ("recurrent", ("conv", "ssm", "rnn", "mamba", "state")),
    ("index", ("index", "compress")),
)


def infer_state_kind(names: tuple[str, ...]) -> StateKind:
    """Return the state kind of a layer without K and V by the names of its tensors; ``"shared"`` if it has none."""
    if not names:
        return "shared"
    for kind, words in _NAME_WORDS_BY_STATE_KIND:
        if any(word in name for name in names for word in words):
            return kind
    return "unknown"


def list_layer_state_names(state: Mapping[str, Any], is_tensor: TensorPredicate) -> tuple[str, ...]:
    """Return the names of a layer's attributes with tensors other than K and V."""
    names = [name for name in state if name not in _NON_STATE_ATTRIBUTES and not name.startswith("_")]
    return tuple(sorted(name for name in names if _contains_state_tensor(state[name], is_tensor)))


def collect_cache_state_names(
    state: Mapping[str, Any], is_tensor: TensorPredicate, max_layers: int
) -> dict[int, tuple[str, ...]]:
    """Return the names of states by layer, for a cache with lists or dicts of tensors by layer (``conv_states``)."""
    state_names_by_layer: dict[int, tuple[str, ...]] = {}
    for name in sorted(name for name in state if isinstance(name, str)):
        for layer_number, item in () if any(word in name for word in _NON_STATE_WORDS) else _iter_items(state[name]):
            if type(layer_number) is int and 0 <= layer_number < max_layers and _contains_state_tensor(item, is_tensor):
                state_names_by_layer[layer_number] = (*state_names_by_layer.get(layer_number, ()), name)
    return state_names_by_layer


def name_state_tensors(name: str, value: Any, is_tensor: TensorPredicate) -> tuple[tuple[str, Any], ...]:
    """Return the tensors of a state by name: its own name, or ``<name>.<key>`` for a list or dict of tensors."""
    if is_tensor(value):
        return ((name, value),) if 0 not in value.shape else ()
    items = _iter_items(value)
    return tuple((f"{name}.{key}", item) for key, item in items if is_tensor(item) and 0 not in item.shape)


def collect_layer_tensors(
    state: Mapping[str, Any], names: Iterable[str], is_tensor: TensorPredicate, layer_number: int | None = None
) -> tuple[tuple[str, Any], ...]:
    """Return the tensors of the named states; from lists or dicts by layer, those of layer `layer_number`."""
    values = [(name, state[name] if layer_number is None else state[name][layer_number]) for name in names]
    return tuple(entry for name, value in values for entry in name_state_tensors(name, value, is_tensor))


def _contains_state_tensor(value: Any, is_tensor: TensorPredicate) -> bool:
    """Return whether a value is a nonempty tensor with a batch axis, or a list or dict of such."""
    tensors = [value] if is_tensor(value) else [item for _, item in _iter_items(value) if is_tensor(item)]
    return any(len(tensor.shape) > 1 and 0 not in tensor.shape for tensor in tensors)


def _iter_items(value: object) -> Iterable[tuple[Any, Any]]:
    """The names or numbers and items of a dict, list or tuple; empty for all else."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


_MAX_DEPTH = 4
_MAX_LAYERS = 1 << 16
_LIST_NAME_PAIRS = (("key_cache", "value_cache"), ("keys", "values"), ("key", "value"), ("k", "v"))
_BOTH_HALVES_LENGTHS = (
    4,
    6,
)  # K and V of the decoder and of the encoder; transformers 5 adds a sliding window or None to each pair
_WINDOW_CLASS_WORDS = ("Sliding", "Chunked")


def find_cache(label: str, root: object, is_tensor: TensorPredicate) -> TransformersCache | None:
    """Return the only cache in a saved or in-memory object; None if there is none."""
    finder = _CacheFinder(label, is_tensor)
    named_caches = list(finder.iter_caches(root, _MAX_DEPTH))
    if len(named_caches) > 1:
        names = ", ".join(repr(name[:40]) for name, _ in named_caches[:4])
        raise SourceError(f"{label}: holds {len(named_caches)} caches ({names}): save each in a file of its own")
    if not named_caches:
        return None
    cache = named_caches[0][1]
    if not cache.layers:
        state_names = sorted({name for other_layer in cache.other_layers for name in other_layer.state_names})
        missing_text = (
            f"K and V: it has {', '.join(state_names)[:80]}" if state_names else "a layer that holds anything"
        )
        raise SourceError(f"{label}: a {cache.class_name} without {missing_text}")
    for half_cache in filter(None, (cache, cache.cross_attention)):
        half_cache.form = FORM_BY_CLASS.get("dict" if isinstance(root, Mapping) else half_cache.class_name, "cache")
        if any(layer.is_buffer for layer in half_cache.layers):
            half_cache.form = "static"
        for name, value in root.items() if isinstance(root, Mapping) else ():
            if isinstance(name, str) and is_tensor(value):
                half_cache.sidecar_tensors[name] = value
    return cache


class _CacheFinder:
    def __init__(self, label: str, is_tensor: TensorPredicate) -> None:
        self.label = label
        self.is_tensor = is_tensor
        self.visited_ids: set[int] = set()

    def iter_caches(self, value: object, depth: int) -> Iterator[tuple[str, TransformersCache]]:
        """Yield every cache in a value and in the dicts and lists below it, once, with its name."""
        if id(value) in self.visited_ids:
            return
        self.visited_ids.add(id(value))
        parsed_cache = self._parse_cache(value)
        if parsed_cache is not None:
            yield parsed_cache.class_name, parsed_cache
        elif depth:
            for name, item in _iter_containers(value):
                for _, cache in self.iter_caches(item, depth - 1):
                    yield name, cache

    def _parse_cache(self, value: object) -> TransformersCache | None:
        """Parse a value as a cache; return None if it is not one."""
        if isinstance(value, StubObject):
            return self._parse_object(value)
        if isinstance(value, Mapping):
            list_cache = self._parse_list_pair("dict", value)
            return self._parse_dict(value) if list_cache is None else self._add_cache_states(list_cache, value)
        if isinstance(value, list | tuple) and len(value) <= _MAX_LAYERS:
            pairs = list(map(self._to_pair, value))
            if self._are_kv_pairs(pairs):
                return self._parse_pairs(type(value).__name__, enumerate(pairs))
            if pairs and all(map(self._is_both_halves_pair, pairs)):
                middle = len(pairs[0]) // 2
                class_name = type(value).__name__
                cache = self._parse_pairs(class_name, enumerate(pair[:2] for pair in pairs))
                cache.cross_attention = self._parse_pairs(
                    class_name, enumerate(pair[middle : middle + 2] for pair in pairs)
                )
                return cache
        return None

    def _parse_object(self, value: StubObject) -> TransformersCache | None:
        state = value.state
        if isinstance(modules := state.get("_modules"), Mapping):  # caches of transformers 4.47 were torch modules
            state = {**state, **{name: item for name, item in modules.items() if isinstance(name, str)}}
        if "self_attention_cache" in state or value.class_name == "EncoderDecoderCache":
            return self._parse_halves(value.class_name, state)
        layers = state.get("layers")
        if isinstance(layers, list | tuple) and all(isinstance(layer, StubObject) for layer in layers):
            self._check_layer_count(value.class_name, len(layers))
            return self._add_cache_states(self._parse_layers(value.class_name, layers), state)
        cache = self._parse_list_pair(value.class_name, state) or self._parse_buffers(value)
        return None if cache is None else self._add_cache_states(cache, state)

    def _parse_halves(self, class_name: str, state: Mapping[str, Any]) -> TransformersCache:
        """Return the decoder's cache, with that of the encoder's output in `TransformersCache.cross_attention`."""
        half_caches = []
        for name in ("self_attention_cache", "cross_attention_cache"):
            half_cache = self._parse_cache(state.get(name))
            if half_cache is None:
                raise SourceError(f"{self.label}: a {class_name} whose {name} is no cache that is known")
            half_caches.append(half_cache)
        cache, cross = half_caches
        cache.class_name, cache.cross_attention = class_name, cross if cross.layers else None
        return cache

    def _parse_layers(self, class_name: str, layers: list[StubObject] | tuple[StubObject, ...]) -> TransformersCache:
        cache = TransformersCache(class_name)
        for layer_number, layer in enumerate(layers):
            keys, values = layer.state.get("keys"), layer.state.get("values")
            if _is_quantized(layer.class_name, layer.state):
                raise self._make_unsupported_error(
                    layer_number, layer.class_name, "whose older tokens are quantised: expected a DynamicCache"
                )
            state_names = list_layer_state_names(layer.state, self.is_tensor)
            if (keys is None and values is None) or (self._is_empty_tensor(keys) and self._is_empty_tensor(values)):
                tensors = collect_layer_tensors(layer.state, state_names, self.is_tensor)
                cache.other_layers.append(
                    StateOnlyLayer(layer_number, infer_state_kind(state_names), state_names, tensors)
                )
                continue
            if not (self.is_tensor(keys) and self.is_tensor(values)):
                raise self._make_unsupported_error(
                    layer_number, layer.class_name, "whose keys and values are not two tensors"
                )
            cache.layers.append(self._make_kv_layer(layer_number, layer, keys, values, state_names))
        return cache

    def _add_cache_states(self, cache: TransformersCache, state: Mapping[str, Any]) -> TransformersCache:
        """Return the cache with the layer states that it stores itself, and its count of tokens."""
        num_counted = self._parse_natural(state.get("_seen_tokens", state.get("seen_tokens")))
        cache.num_seen = num_counted or None
        if cache.class_name == "SinkCache":
            cache.num_sinks = self._parse_natural(state.get("num_sink_tokens"))
            cache.is_rerotated = self.is_tensor(state.get("_cos_cache"))
        state_names_by_layer = collect_cache_state_names(state, self.is_tensor, _MAX_LAYERS)
        cache.layers = [layer.with_state_names(state_names_by_layer.pop(layer.number, ())) for layer in cache.layers]
        other_layers = {other_layer.number: other_layer for other_layer in cache.other_layers}
        for number, names in state_names_by_layer.items():
            tensors = collect_layer_tensors(state, names, self.is_tensor, number)
            other_layers[number] = StateOnlyLayer(number, infer_state_kind(names), names, tensors)
        cache.other_layers = [other_layers[number] for number in sorted(other_layers)]
        return cache

    def _check_layer_count(self, class_name: str, num_layers: int) -> None:
        if num_layers > _MAX_LAYERS:
            raise SourceError(
                f"{self.label}: a {class_name} of {num_layers:,} layers: at most {_MAX_LAYERS:,} are read"
            )

    def _make_kv_layer(
        self, layer_number: int, layer: StubObject, keys: Any, values: Any, state_names: tuple[str, ...]
    ) -> KVLayer:
        """Return a layer with the numbers that describe its rows."""
        state = layer.state
        # The int is right in all versions: the tensor of a window that is full is no longer counted on.
        num_seen = self._parse_natural(state.get("cumulative_length_int", state.get("cumulative_length")))
        window = self._parse_natural(state.get("sliding_window"))
        is_window = window is not None or state.get("is_sliding") is True or _has_window_class_name(layer.class_name)
        is_buffer = "max_cache_len" in state or "Static" in layer.class_name
        if is_window and window is None:
            window = self._parse_natural(state.get("max_cache_len"))
        num_rows = keys.shape[-2] if len(keys.shape) > 1 else 0
        if is_buffer and not is_window and num_seen is not None and num_seen > num_rows:
            raise self._make_unsupported_error(
                layer_number, layer.class_name, f"that says {num_seen} tokens, and its buffers have {num_rows}"
            )
        return KVLayer(layer_number, keys, values, num_seen, is_buffer, is_window, window, state_names)

    def _parse_natural(self, value: object) -> int | None:
        """Return a whole number, or the only element of a tensor; None for anything else."""
        if self.is_tensor(value):
            elements = np.asarray(value.read_elements_unbounded())  # type: ignore[attr-defined]
            if elements.size != 1 or elements.dtype.kind not in "iu":
                return None
            value = int(elements.reshape(-1)[0])
        return value if type(value) is int and value >= 0 else None

    def _parse_list_pair(self, class_name: str, state: Mapping[str, Any]) -> TransformersCache | None:
        """Parse an object with two lists, one of K and one of V; return None for others."""
        for names in _LIST_NAME_PAIRS:
            keys, values = (state.get(name) for name in names)
            if isinstance(keys, list | tuple) and isinstance(values, list | tuple) and keys:
                if len(keys) != len(values):
                    raise SourceError(
                        f"{self.label}: a {class_name} with {len(keys)} {names[0]} and {len(values)} {names[1]}"
                    )
                if _is_quantized(class_name, state):
                    raise self._make_unsupported_error(
                        0, class_name, "whose older tokens are quantised: expected a DynamicCache"
                    )
                self._check_layer_count(class_name, len(keys))
                pairs = list(zip(keys, values, strict=True))
                if all(self._is_kv_pair(pair) or self._is_unused_layer(pair) for pair in pairs):
                    return self._add_static_lengths(self._parse_pairs(class_name, enumerate(pairs)), state)
        return None

    def _parse_buffers(self, cache: StubObject) -> TransformersCache | None:
        """Parse the buffers ``key_cache_<n>`` and ``value_cache_<n>``: some versions made static caches modules."""
        buffers = cache.state.get("_buffers")
        if not isinstance(buffers, Mapping) or "key_cache_0" not in buffers:
            return None
        num_layers = sum(isinstance(name, str) and name.startswith("key_cache_") for name in buffers)
        self._check_layer_count(cache.class_name, num_layers)
        pairs = [
            (buffers.get(f"key_cache_{layer_number}"), buffers.get(f"value_cache_{layer_number}"))
            for layer_number in range(num_layers)
        ]
        if not all(map(self._is_kv_pair, pairs)):
            raise SourceError(
                f"{self.label}: a {cache.class_name} whose buffers are not K and V of {num_layers} layers"
            )
        return self._add_static_lengths(self._parse_pairs(cache.class_name, enumerate(pairs)), cache.state)

    def _add_static_lengths(self, cache: TransformersCache, state: Mapping[str, Any]) -> TransformersCache:
        """Add the lengths of buffers and windows to a cache of transformers 4, if it has any."""
        if not ("max_cache_len" in state or "Static" in cache.class_name or _has_window_class_name(cache.class_name)):
            return cache
        num_counted = self._parse_natural(state.get("_seen_tokens")) or None
        layers = []
        for layer in cache.layers:
            is_window = self._is_sliding(cache.class_name, state, layer.number)
            num_seen, layer_lengths = num_counted, state.get("cumulative_length")
            if is_window and isinstance(layer_lengths, list | tuple) and layer.number < len(layer_lengths):
                num_seen = self._parse_natural(layer_lengths[layer.number]) or None
            num_rows = int(layer.keys.shape[2]) if len(layer.keys.shape) > 2 else None
            window = num_rows if is_window else None
            if not is_window and num_seen is not None and num_rows is not None and num_seen > num_rows:
                raise self._make_unsupported_error(
                    layer.number, cache.class_name, f"that says {num_seen} tokens, and its buffers have fewer"
                )
            layers.append(replace(layer, num_seen=num_seen, is_buffer=True, is_window=is_window, window=window))
        cache.layers = layers
        return cache

    def _is_sliding(self, class_name: str, state: Mapping[str, Any], layer_number: int) -> bool:
        """Return whether a layer of a static cache of transformers 4 has a window."""
        sliding_flags = state.get("is_sliding_list", state.get("is_sliding"))
        if self.is_tensor(sliding_flags):
            sliding_flags = np.asarray(sliding_flags.read_elements_unbounded()).reshape(-1).tolist()
        if isinstance(sliding_flags, list | tuple):
            return layer_number < len(sliding_flags) and bool(sliding_flags[layer_number])
        return sliding_flags is True or _has_window_class_name(class_name)

    def _parse_dict(self, value: Mapping[Any, Any]) -> TransformersCache | None:
        """Parse a dict of pairs by layer number: ``{0: (K, V), 1: (K, V)}``."""
        if not value or len(value) > _MAX_LAYERS:
            return None
        pairs = list(map(self._to_pair, value.values()))
        if not self._are_kv_pairs(pairs):
            return None
        layer_numbers = [_parse_layer_number(name) for name in value]
        if None in layer_numbers or len(set(layer_numbers)) < len(layer_numbers):
            return None
        return self._parse_pairs("dict", sorted(zip(layer_numbers, pairs, strict=True), key=lambda item: item[0] or 0))

    def _parse_pairs(self, class_name: str, pairs: Any) -> TransformersCache:
        cache = TransformersCache(class_name)
        for layer_number, pair in pairs:
            if self._is_unused_layer(pair) or (self._is_empty_tensor(pair[0]) and self._is_empty_tensor(pair[1])):
                cache.other_layers.append(StateOnlyLayer(layer_number))
            else:
                cache.layers.append(self._make_pair_layer(layer_number, pair))
        return cache

    def _make_pair_layer(self, layer_number: int, pair: Any) -> KVLayer:
        """Make a layer of K and V, and of the window size that iterating over a cache of transformers 5 adds."""
        window = self._parse_natural(pair[2]) if len(pair) == 3 else None
        return KVLayer(layer_number, pair[0], pair[1], is_window=window is not None, window=window)

    def _are_kv_pairs(self, values: Any) -> bool:
        return any(map(self._is_kv_pair, values)) and all(
            self._is_kv_pair(item) or self._is_unused_layer(item) for item in values
        )

    def _is_both_halves_pair(self, value: Any) -> bool:
        """Return whether a value consists of K and V of the decoder, then of the encoder."""
        if not isinstance(value, list | tuple) or len(value) not in _BOTH_HALVES_LENGTHS:
            return False
        middle = len(value) // 2
        return self._is_kv_pair(value[:middle]) and self._is_kv_pair(value[middle:])

    def _to_pair(self, value: Any) -> Any:
        """Convert a dict of K and V to a pair; return anything else unchanged."""
        if isinstance(value, Mapping):
            for names in _LIST_NAME_PAIRS:
                if value.keys() == set(names):
                    return tuple(value[name] for name in names)
        return value

    def _is_kv_pair(self, value: Any) -> bool:
        """Return whether a value is a pair of K and V, with or without the third item of transformers 5.

        Iterating over a cache of transformers 5 adds a sliding window or None.
        """
        if not isinstance(value, list | tuple) or not 2 <= len(value) <= 3:
            return False
        third = value[2] if len(value) == 3 else None
        return all(map(self.is_tensor, value[:2])) and (third is None or (self.is_tensor(third) and not third.shape))

    def _is_unused_layer(self, value: Any) -> bool:
        """Return whether a value is the placeholder of a layer that was never used."""
        if not isinstance(value, list | tuple):
            return value is None
        return len(value) in (2, 3) and all(item is None or item in ([], ()) for item in value[:2])

    def _is_empty_tensor(self, value: Any) -> bool:
        return self.is_tensor(value) and 0 in value.shape

    def _make_unsupported_error(self, layer_number: int, class_name: str, reason: str) -> SourceError:
        return SourceError(f"{self.label}: layer {layer_number} is a {class_name}, {reason}")


def _has_window_class_name(class_name: str) -> bool:
    """Return whether a class of layers or caches contains only the last tokens, judged by its name."""
    return any(word in class_name for word in _WINDOW_CLASS_WORDS)


def _is_quantized(class_name: str, state: Mapping[Any, Any]) -> bool:
    return "Quantized" in class_name or any(isinstance(name, str) and "quantized" in name for name in state)


def _iter_containers(value: object) -> Iterator[tuple[str, object]]:
    """Yield the name and value of each container in a container."""
    for name, item in _iter_items(value.state if isinstance(value, StubObject) else value):
        if isinstance(item, StubObject | Mapping | list | tuple):
            yield (str(name) if isinstance(name, str | int) else "?"), item


def _parse_layer_number(name: object) -> int | None:
    if type(name) is int and 0 <= name < _MAX_LAYERS:
        return name
    if isinstance(name, str):
        digits = name.removeprefix("layer_").removeprefix("layer").removeprefix(".")
        return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 6 else None
    return None
