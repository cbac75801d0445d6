"""Caches in memory: objects of transformers, pairs of tensors or arrays, a generator of ONNX Runtime GenAI.

Objects are recognised by their attributes: transformers, torch and onnxruntime_genai are never imported here. torch
comes from `sys.modules`, where the creator of a tensor has put it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays.axes import apply_axis_spec
from ...arrays.naming import check_name
from ...arrays.source import Source
from ...dtypes import FLOAT8_NAMES, PARTS
from ...errors import LimitError, SourceError
from ..options import ReadOptions
from ..tensor_selection import select_from_source, select_tensors
from .arrays import make_cache_source, make_tensor_array
from .cache_finder import KVLayer, StubObject, TransformersCache, find_cache

_MAX_LAYERS = 4096
_LAYER_ATTRIBUTES = ("keys", "values", "cumulative_length", "max_cache_len")
_CACHE_ATTRIBUTES = ("key_cache", "value_cache", "max_cache_len", "self_attention_cache", "cross_attention_cache")


class TensorView:
    """A tensor of torch, or any array that numpy accepts."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of its axes."""
        return tuple(int(length) for length in self.tensor.shape)

    @property
    def type_name(self) -> str:
        """Return the element type without ``torch.``; uint16 of numpy is bf16."""
        name = str(self.tensor.dtype).removeprefix("torch.")
        return "bfloat16" if isinstance(self.tensor, np.ndarray) and name == "uint16" else name

    def read_elements_unbounded(self) -> npt.NDArray[Any]:
        """Return its words on the host; of bfloat16 the bits."""
        tensor = self.tensor
        if hasattr(tensor, "detach"):
            tensor = tensor.detach().cpu()
            if self.type_name == "bfloat16":
                tensor = tensor.view(sys.modules["torch"].int16)
            elif self.type_name in FLOAT8_NAMES:
                tensor = tensor.view(sys.modules["torch"].uint8)
            tensor = tensor.numpy()
        elements = np.asarray(tensor)
        return elements.view(f"u{elements.dtype.itemsize}")


def read_in_memory(cache: object, options: ReadOptions) -> Source:
    """Return K and V of every layer of a cache in memory, as for a saved one."""
    label = f"<{type(cache).__name__} in memory>"
    source = _read_cache_object(label, cache, options)
    if options.max_bytes is not None and source.nbytes > options.max_bytes:
        raise LimitError(f"{label}: holds {source.nbytes} raw bytes, above the limit of {options.max_bytes}")
    for name in source:
        check_name(name, label)
    source.inputs = (label,)
    return apply_axis_spec(select_from_source(source, label, options), options.axis_spec, label)


def _read_cache_object(label: str, cache: object, options: ReadOptions) -> Source:
    if callable(getattr(cache, "get_output", None)):
        return make_cache_source(label, _read_generator(label, cache), options)
    parsed_cache = find_cache(label, _normalize(cache), lambda value: isinstance(value, TensorView))
    if parsed_cache is not None:
        return make_cache_source(label, parsed_cache, options)
    if isinstance(cache, Mapping):
        arrays = {str(name): TensorView(value) for name, value in cache.items() if _has_tensor_attributes(value)}
        if arrays:
            return _make_named_source(label, arrays, options)
    if _has_tensor_attributes(cache):
        return _make_named_source(label, {"tensor": TensorView(cache)}, options)
    raise TypeError(
        f"cannot open {type(cache).__name__}: expected a path, a cache of transformers, (K, V) of layers, a dict of "
        "arrays, or a generator of ONNX Runtime GenAI"
    )


def _make_named_source(label: str, tensors: Mapping[str, TensorView], options: ReadOptions) -> Source:
    requested_tensors = {**dict.fromkeys(options.tensors or tensors), **tensors}
    entries = [
        (name, partial(make_tensor_array, label, name, tensor, options))
        for name, tensor in requested_tensors.items()
        if tensor
    ]
    arrays, skipped = select_tensors(label, entries, options)
    return Source(arrays, skipped_arrays=skipped)


def _has_tensor_attributes(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _normalize(value: Any, depth: int = 4) -> object:
    """Convert an object of transformers to what unpickling its file gives: `StubObject` and `TensorView`."""
    if _has_tensor_attributes(value):
        return TensorView(value)
    layers = None if isinstance(value, Mapping) else getattr(value, "layers", None)
    if isinstance(layers, Iterable):
        layer_objects = [_normalize_layer(layer) for layer in layers]
        return StubObject(
            type(value).__name__,
            {**_collect_cache_attributes(value, ("layers", *_CACHE_ATTRIBUTES)), "layers": layer_objects},
        )
    if hasattr(value, "key_cache") or hasattr(value, "self_attention_cache"):
        return StubObject(type(value).__name__, _collect_cache_attributes(value))
    if depth and isinstance(value, Mapping):
        return {name: _normalize(item, depth - 1) for name, item in value.items()}
    if depth and isinstance(value, list | tuple):
        items = [_normalize(item, depth - 1) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _collect_cache_attributes(cache: Any, excluded_names: tuple[str, ...] = ()) -> dict[str, object]:
    """Return a cache's states by layer, numbers and window settings, without `excluded_names`."""
    attributes = {
        name: _normalize(getattr(cache, name))
        for name in _CACHE_ATTRIBUTES
        if name not in excluded_names and hasattr(cache, name)
    }
    attributes |= _collect_state_attributes(cache, (*excluded_names, *attributes))
    if hasattr(cache, "_quantized_key_cache"):
        attributes["_quantized_key_cache"] = None
    return attributes


def _normalize_layer(layer: Any) -> StubObject:
    """Return a layer of a transformers 5 cache with its attributes, and its length if its buffers are longer."""
    state = {name: _normalize(getattr(layer, name)) for name in _LAYER_ATTRIBUTES if hasattr(layer, name)}
    state |= _collect_state_attributes(layer, (*state, "device", "dtype"))
    if hasattr(layer, "_quantized_keys"):
        state["_quantized_keys"] = None
    is_window = state.get("is_sliding") is True or "cumulative_length" in state
    if "max_cache_len" in state and not is_window and getattr(layer, "is_initialized", True):
        state["cumulative_length"] = int(layer.get_seq_length())
    return StubObject(type(layer).__name__, state)


def _collect_state_attributes(value: Any, excluded_names: tuple[str, ...]) -> dict[str, object]:
    """Return the attributes that are numbers or contain tensors, as in a saved object."""
    candidate_attributes = {
        name: item for name, item in getattr(value, "__dict__", {}).items() if name not in excluded_names
    }
    attributes = {name: _normalize(item, 2) for name, item in candidate_attributes.items() if _can_be_state(item)}
    is_sliding = getattr(type(value), "is_sliding", None)
    return attributes | ({"is_sliding": is_sliding} if isinstance(is_sliding, bool) else {})


def _can_be_state(value: Any) -> bool:
    return _has_tensor_attributes(value) or isinstance(value, bool | int | list | tuple | dict)


def _read_generator(label: str, generator: Any) -> TransformersCache:
    """Return ``present.<n>.key`` and ``.value`` of a generator of ONNX Runtime GenAI, from layer 0 on."""
    cache = TransformersCache(type(generator).__name__, "generator", engine="ONNX Runtime GenAI")
    for layer_number in range(_MAX_LAYERS):
        try:
            parts = [np.asarray(generator.get_output(f"present.{layer_number}.{part}")) for part in PARTS]
        except Exception as error:  # its own type, without a class to name; the layers end so
            if not layer_number:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise SourceError(f"{label}: has no output 'present.0.key': {reason[:200]}") from None
            break
        keys, values = map(TensorView, parts)
        cache.layers.append(KVLayer(layer_number, keys, values))
    return cache
