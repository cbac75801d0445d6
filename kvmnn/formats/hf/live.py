"""Caches in memory: objects of transformers, pairs of tensors or arrays, a generator of ONNX Runtime GenAI.

Looked at by what they have: transformers, torch and onnxruntime_genai are never imported here. torch is taken from
`sys.modules`, where whoever made a tensor has put it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays.axes import laid_out
from ...arrays.source import Source
from ...arrays.valid_names import check_name
from ...dtypes import FLOAT8_NAMES, PARTS
from ...errors import LimitError, SourceError
from ..options import ReadOptions
from ..reading import chosen, select
from .arrays import cache_source, tensor_array
from .layers import find_cache
from .objects import Cache, Layer, Made

_MOST_LAYERS = 4096
_PARTS = ("keys", "values", "cumulative_length", "max_cache_len")
_LISTS = ("key_cache", "value_cache", "max_cache_len", "self_attention_cache", "cross_attention_cache")


class LiveTensor:
    """A tensor of torch, or any array that numpy takes."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its axes."""
        return tuple(int(length) for length in self.tensor.shape)

    @property
    def type_name(self) -> str:
        """Of its elements, without ``torch.``; 16-bit words of numpy are bf16, which it has no type for."""
        name = str(self.tensor.dtype).removeprefix("torch.")
        return "bfloat16" if isinstance(self.tensor, np.ndarray) and name == "uint16" else name

    def view(self) -> npt.NDArray[Any]:
        """Its words, on the host; of bfloat16 the bits."""
        tensor = self.tensor
        if hasattr(tensor, "detach"):
            tensor = tensor.detach().cpu()
            if self.type_name == "bfloat16":
                tensor = tensor.view(sys.modules["torch"].int16)
            elif self.type_name in FLOAT8_NAMES:
                tensor = tensor.view(sys.modules["torch"].uint8)
            tensor = tensor.numpy()
        words = np.asarray(tensor)
        return words.view(f"u{words.dtype.itemsize}")


def read(cache: object, options: ReadOptions) -> Source:
    """K and V of every layer of a cache in memory, as for a saved one.

    Raises
    ------
    TypeError
        For what is no cache.
    SourceError
        For a cache that is empty or not understood.
    LimitError
        Above `ReadOptions.max_bytes`.
    """
    where = f"<{type(cache).__name__} in memory>"
    source = _read(where, cache, options)
    if options.max_bytes is not None and source.nbytes > options.max_bytes:
        raise LimitError(f"{where}: holds {source.nbytes} raw bytes, above the limit of {options.max_bytes}")
    for name in source:
        check_name(name, where)
    source.inputs = (where,)
    return laid_out(chosen(source, where, options), options.laid, where)


def _read(where: str, cache: object, options: ReadOptions) -> Source:
    if callable(getattr(cache, "get_output", None)):
        return cache_source(where, _of_generator(where, cache), options)
    found = find_cache(where, _as_made(cache), lambda value: isinstance(value, LiveTensor))
    if found is not None:
        return cache_source(where, found, options)
    if isinstance(cache, Mapping):
        arrays = {str(name): LiveTensor(value) for name, value in cache.items() if _is_tensor(value)}
        if arrays:
            return _named(where, arrays, options)
    if _is_tensor(cache):
        return _named(where, {"tensor": LiveTensor(cache)}, options)
    raise TypeError(
        f"cannot open {type(cache).__name__}: expected a path, a cache of transformers, (K, V) of layers, a dict of "
        "arrays, or a generator of ONNX Runtime GenAI"
    )


def _named(where: str, tensors: Mapping[str, LiveTensor], options: ReadOptions) -> Source:
    wanted = {**dict.fromkeys(options.tensors or tensors), **tensors}
    entries = [(name, partial(tensor_array, where, name, tensor, options)) for name, tensor in wanted.items() if tensor]
    arrays, skipped = select(where, entries, options)
    return Source(arrays, skipped=skipped)


def _is_tensor(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _as_made(value: Any, depth: int = 4) -> object:
    """What a cache holds, in the form that a saved one is read in."""
    if _is_tensor(value):
        return LiveTensor(value)
    layers = None if isinstance(value, Mapping) else getattr(value, "layers", None)
    if isinstance(layers, Iterable):
        made = [_layer(layer) for layer in layers]
        return Made(type(value).__name__, {**_attributes(value, ("layers", *_LISTS)), "layers": made})
    if hasattr(value, "key_cache") or hasattr(value, "self_attention_cache"):
        return Made(type(value).__name__, _attributes(value))
    if depth and isinstance(value, Mapping):
        return {name: _as_made(item, depth - 1) for name, item in value.items()}
    if depth and isinstance(value, list | tuple):
        items = [_as_made(item, depth - 1) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _attributes(cache: Any, others: tuple[str, ...] = ()) -> dict[str, object]:
    """Of a cache: what it has of each layer, numbers, and what its class says of windows; without `others`."""
    found = {name: _as_made(getattr(cache, name)) for name in _LISTS if name not in others and hasattr(cache, name)}
    found |= _state(cache, (*others, *found))
    if hasattr(cache, "_quantized_key_cache"):
        found["_quantized_key_cache"] = None
    return found


def _layer(layer: Any) -> Made:
    """A layer of a cache of transformers 5: what it has, and its length where its buffers are longer."""
    state = {name: _as_made(getattr(layer, name)) for name in _PARTS if hasattr(layer, name)}
    state |= _state(layer, (*state, "device", "dtype"))
    if hasattr(layer, "_quantized_keys"):
        state["_quantized_keys"] = None
    is_window = state.get("is_sliding") is True or "cumulative_length" in state
    if "max_cache_len" in state and not is_window and getattr(layer, "is_initialized", True):
        state["cumulative_length"] = int(layer.get_seq_length())
    return Made(type(layer).__name__, state)


def _state(value: Any, others: tuple[str, ...]) -> dict[str, object]:
    """Attributes that are numbers or hold tensors, as a saved object would have them."""
    named = {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in others}
    found = {name: _as_made(item, 2) for name, item in named.items() if _is_state(item)}
    is_sliding = getattr(type(value), "is_sliding", None)
    return found | ({"is_sliding": is_sliding} if isinstance(is_sliding, bool) else {})


def _is_state(value: Any) -> bool:
    return _is_tensor(value) or isinstance(value, bool | int | list | tuple | dict)


def _of_generator(where: str, generator: Any) -> Cache:
    """``present.<n>.key`` and ``.value`` of a generator of ONNX Runtime GenAI, from layer 0 on."""
    found = Cache(type(generator).__name__, "generator", engine="ONNX Runtime GenAI")
    for number in range(_MOST_LAYERS):
        try:
            parts = [np.asarray(generator.get_output(f"present.{number}.{part}")) for part in PARTS]
        except Exception as error:  # its own type, without a class to name; the layers end so
            if not number:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise SourceError(f"{where}: has no output 'present.0.key': {reason[:200]}") from None
            break
        keys, values = map(LiveTensor, parts)
        found.layers.append(Layer(number, keys, values))
    return found
