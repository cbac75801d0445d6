"""A prompt cache for frames: its tensors of words as they lie there, padding included."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ... import dtypes
from ...arrays.completeness import Completeness
from ...arrays.layers import format_array_name
from ...arrays.named_array import LazyArray
from ...arrays.source import Source
from ...dtypes import PARTS
from ...errors import SourceError
from ...files.mapped import MappedFile
from .. import keeping
from ..keeping import Region
from ..options import ReadOptions
from ..reading import check_declared_dtype
from ..safetensors_header import TensorEntry
from .classes import PromptCacheLayer, describe_states, has_keys_and_values, read_layers
from .states import PromptCacheStates

FORMAT_NAME = "mlx-prompt-cache"

_MIN_ARRAY_AXES = 2
"""Of a tensor that becomes an array; states with fewer are a few numbers."""
_ELEMENT_TYPES_BY_KIND = {
    "F16": ("fp16", "<f2"),
    "BF16": ("bf16", "<u2"),
    "F32": ("fp32", "<f4"),
    "U32": ("fp32", "<u4"),
}
_STATE_NAME_REGEX = re.compile(r"(\d{1,5})\.([01])(?:\.([012]))?")
_FIELD_NAMES = ("codes", "scales", "biases")


def capture(file: MappedFile, options: ReadOptions) -> Source:
    """All tensors of fp16, bf16, fp32 and packed codes, of any class of cache.

    Names are ``layer_<n>.key`` and ``.value``, of quantised groups with ``.codes``, ``.scales`` and ``.biases``; what
    is neither K nor V is called ``state_`` and its own name.

    Raises
    ------
    SourceError
        For a header that is damaged, and a file without such tensors.
    """
    states = PromptCacheStates(file)
    regions = []
    for tensor in states.header.tensors:
        if tensor.kind in _ELEMENT_TYPES_BY_KIND and len(tensor.shape) >= _MIN_ARRAY_AXES and 0 not in tensor.shape:
            declared_dtype = (
                None if tensor.kind == "U32" else _ELEMENT_TYPES_BY_KIND[tensor.kind][0]
            )  # codes are words of any type
            check_declared_dtype(declared_dtype, options, f"{file.label}: {tensor.name}")
            regions.append(_make_region(file, states, tensor))
    if not regions:
        raise SourceError(f"{file.label}: holds no K and no V, there is nothing to encode")
    try:
        layers = read_layers(states)
    except SourceError:
        layers = []
    source = keeping.capture(
        file, FORMAT_NAME, regions, None, unused_bytes_by_array=_count_unused_bytes(states, layers)
    )
    completeness = describe_states(states, layers)
    source.completeness = Completeness(layers=tuple(replace(state, included=True) for state in completeness.layers))
    return source


def _count_unused_bytes(states: PromptCacheStates, layers: Sequence[PromptCacheLayer]) -> dict[str, int]:
    """Bytes of K and V behind the valid tokens, by array; none where nothing says how many tokens are valid."""
    unused_bytes_by_array = {
        _make_array_name(states, tensor.name): (tensor.end - tensor.begin)
        // tensor.shape[2]
        * (tensor.shape[2] - layer.num_tokens)
        for layer in layers
        for tensor in (*layer.keys, *layer.values)
    }
    return {name: nbytes for name, nbytes in unused_bytes_by_array.items() if nbytes}


def _make_region(file: MappedFile, states: PromptCacheStates, tensor: TensorEntry) -> Region:
    start = states.header.data_start
    dtype, code_dtype = _ELEMENT_TYPES_BY_KIND[tensor.kind]
    nbytes = tensor.end - tensor.begin
    array = LazyArray(
        name=_make_array_name(states, tensor.name),
        dtype=dtype,
        shape=tensor.shape,
        array_dtype=code_dtype if tensor.kind == "U32" else dtypes.parse_dtype(dtype).numpy_dtype.str,
        reader=partial(file.iter_chunks, start + tensor.begin, nbytes),
    )
    return Region(start + tensor.begin, nbytes, ((array, nbytes),))


def _make_array_name(states: PromptCacheStates, name: str) -> str:
    name_match = _STATE_NAME_REGEX.fullmatch(name)
    if name_match is None or not has_keys_and_values(states, int(name_match[1])):
        return f"state_{name}"
    field_suffix = f".{_FIELD_NAMES[int(name_match[3])]}" if name_match[3] else ""
    return format_array_name(int(name_match[1]), PARTS[int(name_match[2])]) + field_suffix
