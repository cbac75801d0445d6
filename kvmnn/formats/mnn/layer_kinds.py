"""Which layers of a prefix cache hold K and V, and which hold state of another kind in their two files.

MNN keeps one prefix file for K and one for V of each layer. A layer with linear attention writes its convolution state
in the place of K and its recurrent state in the place of V: as many bytes whatever the number of tokens, and valid
after the last token alone. The graph or the settings of the model tell such layers; without a model their sizes do, and
the ends of their files: the engine leaves room for 64 tokens, so that files of K and V end with empty rows, and those
of state do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from ...arrays.completeness import Completeness, LayerState, StateKind
from ...arrays.layer_states import spell_layers
from ...arrays.opaque_state import OpaqueState
from ...dtypes import Part
from ...errors import OptionError, SourceError
from ...files.mapped import MappedFile
from ...packed.cache_info import STATE_KINDS, CacheInfo, StateLayer
from ...text import count
from ..options import PackedOptions
from .model import ModelGeometry, read_geometry
from .packed_files import PackedFiles, PackedLayer

STATE_LOCATION: Final = "in files without K and V, valid after the last token alone"
"""Where the state of such layers is, as messages about completeness have it."""

_ROOM_BYTES: Final = 32  # of equal bytes that a file of K or V ends with at least, unless its room is used up
_MIN_GROUP: Final = 2
_MIN_STATES: Final = 2  # one layer alone that differs from the others was rather damaged


def sort_layers(files: PackedFiles, options: PackedOptions, known: CacheInfo | None) -> PackedFiles:
    """Return the files with those of layers without K and V apart, as `PackedFiles.states`.

    Parameters
    ----------
    files
        What was found.
    options
        With the model, where it is known, and with what frames of the same files note down.
    known
        What the document alongside the files says.

    Raises
    ------
    SourceError
        When the model or the words tell that some layer has no K and V, and nothing tells which; when no layer has.
    """
    if files.kind != "prefix":
        return files
    model = read_geometry(options.model) if options.model else ModelGeometry()
    files = replace(files, model_states=model.states, is_mixed=_is_mixed(model))
    noted = known.states if known else options.states
    if noted is not None:
        files = _split(files, {state.layer: state.kind for state in noted}, "")
    elif model.states:
        files = _split_as_model(files, model.file_states)
    else:
        files = _split_by_content(files, is_mixed=model.attention_type == "mix")
    if known:
        return _group(files, [info.heads for info in known.layers])
    if options.heads:
        return _group(files, options.heads)
    if model.layer_geometry:
        own = [heads for heads, state in zip(model.layer_geometry, model.states, strict=True) if state.kind == "full"]
        return _group(files, own)
    return _group_by_sizes(files)


def _group(files: PackedFiles, heads: Sequence[object]) -> PackedFiles:
    """Put layers of the same kv heads and head_dim together; where there are others than files, they are no help."""
    if len(heads) != len(files.layers):
        return files
    numbers = {each: number for number, each in enumerate(dict.fromkeys(heads))}
    pairs = zip(files.layers, heads, strict=True)
    return replace(files, layers=tuple(replace(layer, group=numbers[each]) for layer, each in pairs))


def _group_by_sizes(files: PackedFiles) -> PackedFiles:
    """Take layers of unlike sizes for layers of unlike heads, where none of them looks as if it were cut."""
    sizes = Counter(files.sizes)
    if len(sizes) == 1 or min(sizes.values()) < _MIN_GROUP or files.gaps:
        return files
    if any(_describe_ends(layer) != (True, True) for layer in files.layers):
        return files
    return _group(files, files.sizes)


def _is_mixed(model: ModelGeometry) -> bool | None:
    return None if model.attention_type is None else model.attention_type == "mix"


def _split(files: PackedFiles, kinds: dict[int, str], note: str) -> PackedFiles:
    """Put the layers of other kinds apart."""
    layers = tuple(layer for layer in files.layers if layer.layer not in kinds)
    states = tuple(_with_kind(layer, kinds[layer.layer]) for layer in files.layers if layer.layer in kinds)
    if not layers:
        raise SourceError(f"{files.path}: {spell_layers([each.layer for each in states])}: no K and V, but state")
    return replace(files, layers=layers, states=states, notes=(*files.notes, note) if note and states else files.notes)


def _with_kind(layer: PackedLayer, kind: str) -> PackedLayer:
    return replace(layer, kind=_as_kind(kind))


def _as_kind(kind: str) -> StateKind:
    kinds: tuple[StateKind, ...] = ("linear", "recurrent")
    return next((each for each in kinds if each == kind), "unknown")


def _split_as_model(files: PackedFiles, states: Sequence[LayerState]) -> PackedFiles:
    """Take the kinds of layers from the model; where it has another number of layers, `check_layers` refuses."""
    kinds = {number: state.kind for number, state in enumerate(states) if state.kind in STATE_KINDS}
    return _split(files, {**kinds}, "")


def _split_by_content(files: PackedFiles, *, is_mixed: bool) -> PackedFiles:
    """Tell the kinds of layers by sizes and ends of their files."""
    ends = {layer.layer: _describe_ends(layer) for layer in files.layers if layer.key_bytes and layer.value_bytes}
    rooms = [layer for layer in files.layers if ends.get(layer.layer) == (True, True)]
    others = [layer for layer in files.layers if ends.get(layer.layer) == (False, False)]
    sizes = {(layer.key_bytes, layer.value_bytes) for layer in others}
    if not rooms or not others or len(rooms) + len(others) < len(files.layers):
        return files
    if len(sizes) > 1 or (len(others) < _MIN_STATES and not is_mixed):
        if sizes == {(layer.key_bytes, layer.value_bytes) for layer in rooms}:
            raise SourceError(
                f"{files.path}: {spell_layers([layer.layer for layer in others])}: files do not end with empty rows as "
                "those of the other layers do: either their room is used up in part of the layers, or they are no K "
                "and V; --model DIR may tell"
            )
        return files
    note = (
        f"{spell_layers([layer.layer for layer in others])}: taken for state of linear attention, not for K and V: "
        f"{_describe_reason(rooms, others)}; --model DIR knows"
    )
    return _split(files, {layer.layer: "linear" for layer in others}, note)


def _describe_reason(rooms: Sequence[PackedLayer], others: Sequence[PackedLayer]) -> str:
    pair = others[0].key_bytes, others[0].value_bytes
    if all((layer.key_bytes, layer.value_bytes) == pair for layer in rooms):
        return f"unlike those of {count(len(rooms), 'layer')} their files do not end with empty rows"
    return f"their files have {pair[0]:,} and {pair[1]:,} bytes and do not end with empty rows"


def _describe_ends(layer: PackedLayer) -> tuple[bool, bool]:
    """Whether the files of K and of V end with empty rows."""
    return _ends_empty(layer.key), _ends_empty(layer.value)


def _ends_empty(path: str) -> bool:
    file = MappedFile(path)
    size = min(file.size, _ROOM_BYTES)
    tail = file.view(file.size - size, size)
    return bool(np.all(tail == tail[-1]))


def check_layers(files: PackedFiles, model: ModelGeometry, where: str | None) -> None:
    """Raise `SourceError` where the model in `where` has another number of layers than there are files of."""
    layers = len(model.file_states) or model.layers
    if files.is_whole and layers is not None and layers != len(files.all_layers):
        shared = len(model.states) - len(model.file_states)
        of_own = f" of its own K and V or state, and {shared} that read those of other layers" if shared else ""
        raise SourceError(
            f"{files.path}: has files of {count(len(files.all_layers), 'layer')}, but the model in {where} has "
            f"{layers}{of_own}"
        )


def of_files(files: PackedFiles) -> tuple[StateLayer, ...]:
    """Return what a description of the cache has of the layers without K and V."""
    return tuple(
        StateLayer(layer=each.layer, kind=each.kind, key_bytes=each.key_bytes, value_bytes=each.value_bytes)
        for each in files.states
    )


def read_states(files: PackedFiles) -> list[OpaqueState]:
    """Return the state in files without K and V, as bytes by the names that MNN has for it."""
    return [
        OpaqueState(
            layer=state.layer,
            name=name,
            dtype="bytes",
            shape=(state.size(part),),
            nbytes=state.size(part),
            reader=partial(_read_file, state.path(part)),
        )
        for state in files.states
        for part, name in _STATE_NAMES.items()
    ]


_STATE_NAMES: Final[dict[Part, str]] = {"key": "conv_state", "value": "recurrent_state"}


def sort_states(states: Sequence[OpaqueState]) -> dict[tuple[int, Part], OpaqueState]:
    """Return state by layer and the part in whose file MNN keeps it.

    Raises
    ------
    OptionError
        For state of another engine.
    """
    parts = {name: part for part, name in _STATE_NAMES.items()}
    found: dict[tuple[int, Part], OpaqueState] = {}
    for state in states:
        if state.name not in parts or state.dtype != "bytes":
            raise OptionError(
                f"layer {state.layer}: state {state.name!r} ({state.dtype}) is another engine's: a prefix cache of MNN "
                "has state that MNN wrote"
            )
        found[state.layer, parts[state.name]] = state
    for layer in sorted({state.layer for state in states}):
        if any((layer, part) not in found for part in _STATE_NAMES):
            raise OptionError(f"layer {layer}: has one of the two states that MNN keeps of such a layer")
    return found


def describe_state_files(states: Mapping[tuple[int, Part], OpaqueState]) -> tuple[StateLayer, ...]:
    """Return what a description of the cache has of the files of `sort_states`."""
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


def describe_completeness(info: CacheInfo, model_states: Sequence[LayerState] = ()) -> Completeness | None:
    """Return the state of every layer of a packed cache; None where all have K and V."""
    shared = [state for state in model_states if state.kind == "shared"]
    if not info.states and not shared:
        return None
    kinds = {state.layer: state.kind for state in info.states}
    numbers = info.numbers
    if shared:
        own = [state.layer for state in model_states if state.kind != "shared"]
        if len(own) != len(numbers):
            return None
        numbers = own
    states = [_state(number, kinds.get(place)) for number, place in zip(numbers, info.numbers, strict=True)]
    return Completeness(layers=tuple(sorted([*states, *shared], key=lambda state: state.layer)))


def _state(number: int, kind: str | None) -> LayerState:
    if kind is None:
        return LayerState(layer=number)
    return LayerState(layer=number, kind=_as_kind(kind), included=False, location=STATE_LOCATION)
