"""Distinguish the layers of a prefix cache: those with K and V, and those with other state in their two files.

MNN stores one prefix file for K and one for V of each layer. A layer with linear attention writes its convolution state
in place of K and its recurrent state in place of V: of constant size for any number of tokens, and valid only after the
last token. The graph or the settings of the model identify such layers. Without a model, file sizes and ends do: the
engine reserves capacity for 64 more tokens, so that files of K and V end with empty rows, and those of state do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from ..._util.text import format_layers, pluralize
from ...arrays.completeness import Completeness, LayerStateInfo, StateKind
from ...arrays.opaque_state import OpaqueState
from ...dtypes import Part
from ...errors import OptionError, SourceError
from ...files.mapped_file import MappedFile
from ...packed.cache_info import STATE_KINDS, CacheInfo, StateLayer
from ..options import PackedOptions
from .model import ModelGeometry, read_model_geometry
from .packed_files import PackedFiles, PackedLayer

STATE_LOCATION_TEXT: Final = "in files without K and V, valid after the last token alone"
"""Location of the state of such layers, for messages about completeness."""

_EMPTY_TAIL_BYTES: Final = (
    32  # minimum run of equal bytes at the end of a file of K or V, unless its capacity is used up
)
_MIN_GROUP_LAYERS: Final = 2
_MIN_STATE_LAYERS: Final = 2  # one layer alone that differs from the others was rather damaged


def separate_state_layers(files: PackedFiles, options: PackedOptions, sidecar_info: CacheInfo | None) -> PackedFiles:
    """Return the files with those of layers without K and V moved to `PackedFiles.states`."""
    if files.kind != "prefix":
        return files
    model = read_model_geometry(options.model) if options.model else ModelGeometry()
    is_mixed = None if model.attention_type is None else model.attention_type == "mix"
    files = replace(files, model_states=model.states, is_mixed=is_mixed)
    recorded_states = sidecar_info.states if sidecar_info else options.recorded_states
    if recorded_states is not None:
        files = _split_states(files, {state.layer: state.kind for state in recorded_states})
    elif model.states:
        # `check_layer_count` rejects a model with another number of layers
        kinds = {number: state.kind for number, state in enumerate(model.file_states) if state.kind in STATE_KINDS}
        files = _split_states(files, kinds)
    else:
        files = _split_by_content(files, is_mixed=bool(is_mixed))
    if sidecar_info:
        return _group_by_heads(files, [info.heads for info in sidecar_info.layers])
    if options.heads:
        return _group_by_heads(files, options.heads)
    return _group_by_heads(files, model.full_layer_heads) if model.layer_geometry else _group_by_sizes(files)


def _group_by_heads(files: PackedFiles, heads: Sequence[object]) -> PackedFiles:
    """Group layers of equal kv heads and head_dim; ignore `heads` if there are not as many as files."""
    if len(heads) != len(files.layers):
        return files
    group_by_heads = {layer_heads: group for group, layer_heads in enumerate(dict.fromkeys(heads))}
    groups = [group_by_heads[layer_heads] for layer_heads in heads]
    layers = tuple(replace(layer, group=group) for layer, group in zip(files.layers, groups, strict=True))
    return replace(files, layers=layers)


def _group_by_sizes(files: PackedFiles) -> PackedFiles:
    """Assign layers with different file sizes to groups with different heads, unless files seem truncated."""
    sizes = Counter(files.sizes)
    if len(sizes) == 1 or min(sizes.values()) < _MIN_GROUP_LAYERS or files.missing_files:
        return files
    if any(_find_empty_ends(layer) != (True, True) for layer in files.layers):
        return files
    return _group_by_heads(files, files.sizes)


def _split_states(files: PackedFiles, kind_by_layer: Mapping[int, str], note: str = "") -> PackedFiles:
    """Move the layers of other kinds to `PackedFiles.states`."""
    layers = tuple(layer for layer in files.layers if layer.layer not in kind_by_layer)
    other_layers = [layer for layer in files.layers if layer.layer in kind_by_layer]
    states = tuple(replace(layer, kind=_to_state_kind(kind_by_layer[layer.layer])) for layer in other_layers)
    if not layers:
        raise SourceError(f"{files.path}: {format_layers([state.layer for state in states])}: no K and V, but state")
    return replace(files, layers=layers, states=states, notes=(*files.notes, note) if note and states else files.notes)


def _to_state_kind(kind: str) -> StateKind:
    kinds: tuple[StateKind, ...] = ("linear", "recurrent")
    return next((state_kind for state_kind in kinds if state_kind == kind), "unknown")


def _split_by_content(files: PackedFiles, *, is_mixed: bool) -> PackedFiles:
    """Separate K and V from linear attention state by the sizes and ends of the files."""
    empty_ends = {layer.layer: _find_empty_ends(layer) for layer in files.layers if all(layer.sizes)}
    kv_layers = [layer for layer in files.layers if empty_ends.get(layer.layer) == (True, True)]
    state_layers = [layer for layer in files.layers if empty_ends.get(layer.layer) == (False, False)]
    layers_text = format_layers([layer.layer for layer in state_layers])
    sizes = {layer.sizes for layer in state_layers}
    if not kv_layers or not state_layers or len(kv_layers) + len(state_layers) < len(files.layers):
        return files
    if len(sizes) > 1 or (len(state_layers) < _MIN_STATE_LAYERS and not is_mixed):
        if sizes == {layer.sizes for layer in kv_layers}:
            raise SourceError(
                f"{files.path}: {layers_text}: files do not end with empty "
                "rows as those of the other layers do: either their room is used up in part of the layers, or they are "
                "no K and V; --model DIR may tell"
            )
        return files
    note = (
        f"{format_layers([layer.layer for layer in state_layers])}: taken for state of linear attention, not for K and "
        f"V: {_describe_reason(kv_layers, state_layers)}; --model DIR knows"
    )
    return _split_states(files, {layer.layer: "linear" for layer in state_layers}, note)


def _describe_reason(kv_layers: Sequence[PackedLayer], state_layers: Sequence[PackedLayer]) -> str:
    size_pair = state_layers[0].sizes
    if all(layer.sizes == size_pair for layer in kv_layers):
        return f"unlike those of {pluralize(len(kv_layers), 'layer')} their files do not end with empty rows"
    return f"their files have {size_pair[0]:,} and {size_pair[1]:,} bytes and do not end with empty rows"


def _find_empty_ends(layer: PackedLayer) -> tuple[bool, bool]:
    """Return whether the files of K and of V end with empty rows."""
    return _ends_with_equal_bytes(layer.key), _ends_with_equal_bytes(layer.value)


def _ends_with_equal_bytes(path: str) -> bool:
    file = MappedFile(path)
    size = min(file.size, _EMPTY_TAIL_BYTES)
    tail = file.view(file.size - size, size)
    return bool(np.all(tail == tail[-1]))


def check_layer_count(files: PackedFiles, model: ModelGeometry, model_label: str | None) -> None:
    """Raise `SourceError` if the model in `model_label` has a different number of layers than there are files."""
    num_layers = len(model.file_states) or model.num_layers
    if files.is_whole_prefix and num_layers is not None and num_layers != len(files.all_layers):
        num_shared = len(model.states) - len(model.file_states)
        own_layers_text = (
            f" of its own K and V or state, and {num_shared} that read those of other layers" if num_shared else ""
        )
        raise SourceError(
            f"{files.path}: has files of {pluralize(len(files.all_layers), 'layer')}, but the model in {model_label} "
            f"has {num_layers}{own_layers_text}"
        )


def build_state_layers(files: PackedFiles) -> tuple[StateLayer, ...]:
    """Return the entries for layers without K and V in the description of a cache."""
    return tuple(
        StateLayer(layer=state.layer, kind=state.kind, key_bytes=state.key_bytes, value_bytes=state.value_bytes)
        for state in files.states
    )


def list_opaque_states(files: PackedFiles) -> list[OpaqueState]:
    """Return the state in files without K and V, as bytes by MNN's names."""
    return [
        OpaqueState(
            layer=state.layer,
            name=name,
            dtype="bytes",
            shape=(state.get_size(part),),
            nbytes=state.get_size(part),
            reader=partial(_read_file, state.get_path(part)),
        )
        for state in files.states
        for part, name in _STATE_NAME_BY_PART.items()
    ]


_STATE_NAME_BY_PART: Final[dict[Part, str]] = {"key": "conv_state", "value": "recurrent_state"}


def index_states(states: Sequence[OpaqueState]) -> dict[tuple[int, Part], OpaqueState]:
    """Return state by layer and by the part whose file MNN stores it in."""
    part_by_state_name = {name: part for part, name in _STATE_NAME_BY_PART.items()}
    state_by_file: dict[tuple[int, Part], OpaqueState] = {}
    for state in states:
        if state.name not in part_by_state_name or state.dtype != "bytes":
            raise OptionError(
                f"layer {state.layer}: state {state.name!r} ({state.dtype}) is another engine's: a prefix cache of MNN "
                "has state that MNN wrote"
            )
        state_by_file[state.layer, part_by_state_name[state.name]] = state
    for layer in sorted({state.layer for state in states}):
        if any((layer, part) not in state_by_file for part in _STATE_NAME_BY_PART):
            raise OptionError(f"layer {layer}: has one of the two states that MNN keeps of such a layer")
    return state_by_file


def build_state_file_layers(states: Mapping[tuple[int, Part], OpaqueState]) -> tuple[StateLayer, ...]:
    """Return the entries for the files of `index_states` in the description of a cache."""
    return tuple(
        StateLayer(
            layer=layer,
            kind="linear",
            key_bytes=states[layer, "key"].nbytes,
            value_bytes=states[layer, "value"].nbytes,
        )
        for layer in sorted({layer for layer, _ in states})
    )


def _read_file(path: str) -> bytes:
    file = MappedFile(path)
    return file.view(0, file.size).tobytes()


def build_completeness(info: CacheInfo, model_states: Sequence[LayerStateInfo] = ()) -> Completeness | None:
    """Return the state of every layer of a packed cache; None if all layers have K and V."""
    shared_states = [state for state in model_states if state.kind == "shared"]
    if not info.states and not shared_states:
        return None
    kinds = {state.layer: state.kind for state in info.states}
    layer_numbers = info.numbers
    if shared_states:
        own_layers = [state.layer for state in model_states if state.kind != "shared"]
        if len(own_layers) != len(layer_numbers):
            return None
        layer_numbers = own_layers
    states = [
        _make_layer_state(layer_number, kinds.get(file_number))
        for layer_number, file_number in zip(layer_numbers, info.numbers, strict=True)
    ]
    return Completeness(layers=tuple(sorted([*states, *shared_states], key=lambda state: state.layer)))


def _make_layer_state(layer_number: int, kind: str | None) -> LayerStateInfo:
    if kind is None:
        return LayerStateInfo(layer=layer_number)
    return LayerStateInfo(layer=layer_number, kind=_to_state_kind(kind), included=False, location=STATE_LOCATION_TEXT)
