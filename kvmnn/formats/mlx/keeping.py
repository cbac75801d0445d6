"""A prompt cache for frames: its tensors of words as they lie there, padding included."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ... import dtypes
from ...arrays.completeness import Completeness
from ...arrays.layers import array_name
from ...arrays.named_array import NamedArray
from ...arrays.source import Source
from ...dtypes import PARTS
from ...errors import SourceError
from ...files.mapped import MappedFile
from .. import keeping
from ..keeping import Region
from ..options import ReadOptions
from ..reading import check_own_type
from ..safetensors_header import Tensor
from .classes import Layer, describe_states, has_keys_and_values, read_layers
from .states import States

NAME = "mlx-prompt-cache"

_LEAST_AXES = 2
"""Of a tensor that becomes an array; states with fewer are a few numbers."""
_WORDS = {"F16": ("fp16", "<f2"), "BF16": ("bf16", "<u2"), "F32": ("fp32", "<f4"), "U32": ("fp32", "<u4")}
_NAME = re.compile(r"(\d{1,5})\.([01])(?:\.([012]))?")
_FIELDS = ("codes", "scales", "biases")


def keep(file: MappedFile, options: ReadOptions) -> Source:
    """All tensors of fp16, bf16, fp32 and packed codes, of any class of cache.

    Names are ``layer_<n>.key`` and ``.value``, of quantised groups with ``.codes``, ``.scales`` and ``.biases``; what
    is neither K nor V is called ``state_`` and its own name.

    Raises
    ------
    SourceError
        For a header that is damaged, and a file without such tensors.
    """
    states = States(file)
    regions = []
    for tensor in states.header.tensors:
        if tensor.kind in _WORDS and len(tensor.shape) >= _LEAST_AXES and 0 not in tensor.shape:
            own = None if tensor.kind == "U32" else _WORDS[tensor.kind][0]  # codes are words of any type
            check_own_type(own, options, f"{file.label}: {tensor.name}")
            regions.append(_region(file, states, tensor))
    if not regions:
        raise SourceError(f"{file.label}: holds no K and no V, there is nothing to encode")
    try:
        layers = read_layers(states)
    except SourceError:
        layers = []
    kept = keeping.keep(file, NAME, regions, None, array_room=_room(states, layers))
    described = describe_states(states, layers)
    kept.completeness = Completeness(layers=tuple(replace(state, included=True) for state in described.layers))
    return kept


def _room(states: States, layers: Sequence[Layer]) -> dict[str, int]:
    """Bytes of K and V behind the valid tokens, by array; none where nothing says how many tokens are valid."""
    room = {
        _array_name(states, tensor.name): (tensor.end - tensor.begin)
        // tensor.shape[2]
        * (tensor.shape[2] - layer.tokens)
        for layer in layers
        for tensor in (*layer.keys, *layer.values)
    }
    return {name: nbytes for name, nbytes in room.items() if nbytes}


def _region(file: MappedFile, states: States, tensor: Tensor) -> Region:
    start = states.header.start
    dtype, word = _WORDS[tensor.kind]
    nbytes = tensor.end - tensor.begin
    array = NamedArray(
        name=_array_name(states, tensor.name),
        dtype=dtype,
        shape=tensor.shape,
        array_dtype=word if tensor.kind == "U32" else dtypes.by_name(dtype).numpy.str,
        reader=partial(file.runs, start + tensor.begin, nbytes),
    )
    return Region(start + tensor.begin, nbytes, ((array, nbytes),))


def _array_name(states: States, name: str) -> str:
    found = _NAME.fullmatch(name)
    if found is None or not has_keys_and_values(states, int(found[1])):
        return f"state_{name}"
    field = f".{_FIELDS[int(found[3])]}" if found[3] else ""
    return array_name(int(found[1]), PARTS[int(found[2])]) + field
