"""Which layer of the model each layer of a state file is, and what the model keeps for the others.

A file counts layers within each of its caches. Models with sliding windows have two: K and V of layers with full
attention, then those of layers with a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...arrays.completeness import Completeness, LayerStateInfo
from ...errors import OptionError
from ...text import pluralize
from ..options import ReadOptions
from .model_layers import ModelLayer, list_unshared_layers, read_model_layers
from .state import LlamaState
from .windows import WINDOW_RULES, find_windows

CACHE_NAMES = ("first", "second")


@dataclass(frozen=True, kw_only=True)
class LayerNumbers:
    """The layers of a file.

    Parameters
    ----------
    by_cache
        For each cache the layer of the model that each of its layers is.
    states
        What the model keeps for each of its layers.
    model
        The layers of the model that the options name; None without one.
    rule
        Why layers are numbered so, where only the name of the architecture tells; else empty.
    """

    by_cache: tuple[tuple[int, ...], ...]
    states: tuple[LayerStateInfo, ...]
    model: tuple[ModelLayer, ...] | None = None
    rule: str = ""


def count_layers(state: LlamaState) -> tuple[int, ...]:
    """Return how many layers each cache has; 0 for a cache without cells."""
    return tuple(
        max((sum(tensor.part == "key" for tensor in stream.tensors) for stream in streams), default=0)
        for streams in state.caches
    )


def number_layers(label: str, state: LlamaState, options: ReadOptions) -> LayerNumbers | None:
    """Return the numbers of the layers of a file with two caches, or whose model is known; None where nothing tells.

    Raises
    ------
    OptionError
        Where the model has other layers than the file.
    SourceError
        For a model that cannot be read.
    """
    counts, model_path = count_layers(state), options.packed.model if options.packed else None
    recorded_layers, completeness = options.engine.recorded_layers, options.engine.recorded_completeness
    if model_path is not None:
        return _number_by_model(label, counts, model_path)
    if recorded_layers is not None and completeness is not None and len(recorded_layers) == sum(counts):
        ends = [sum(counts[: number + 1]) for number in range(len(counts))]
        by_cache = tuple(tuple(recorded_layers[end - size : end]) for end, size in zip(ends, counts, strict=True))
        if all(number < len(completeness.layers) for number in recorded_layers):
            return LayerNumbers(by_cache=by_cache, states=completeness.layers)
    if len(counts) == 1 or state.architecture is None:
        return None
    return _number_by_architecture(state.architecture, counts)


def _number_by_model(label: str, counts: Sequence[int], model_path: str) -> LayerNumbers | None:
    layers = read_model_layers(model_path)
    if layers is None:
        return None
    states = tuple(layer.state for layer in layers)
    if len(counts) == 1:
        layer_numbers = [layer.state.layer for layer in layers if layer.state.kind != "shared"]
        return (
            LayerNumbers(by_cache=(tuple(layer_numbers),), states=states, model=layers)
            if len(layer_numbers) == counts[0]
            else None
        )
    numbers = [
        [model_layer.state.layer for model_layer in list_unshared_layers(layers, is_window=is_window)]
        for is_window in (False, True)
    ]
    for name, expected_layers, num_found in zip(CACHE_NAMES, numbers, counts, strict=True):
        if num_found not in (0, len(expected_layers)):
            raise OptionError(
                f"{label}: the {name} cache has {pluralize(num_found, 'layer')}; the model in {model_path} has "
                f"{len(numbers[0])} "
                f"with full attention and {len(numbers[1])} with a window: it is another model"
            )
    return LayerNumbers(by_cache=tuple(map(tuple, numbers)), states=states, model=layers)


def _number_by_architecture(architecture: str, counts: Sequence[int]) -> LayerNumbers | None:
    """Number as llama.cpp does for a model whose header has no pattern; None where counts do not fit that."""
    windows = find_windows(architecture, sum(counts), None)
    if windows is None or [windows.count(False), windows.count(True)] != list(counts):
        return None
    numbers = [
        tuple(layer for layer, has_window in enumerate(windows) if has_window is is_window)
        for is_window in (False, True)
    ]
    states = tuple(
        LayerStateInfo(layer=layer, kind="window" if has_window else "full") for layer, has_window in enumerate(windows)
    )
    period = WINDOW_RULES[architecture].period
    rule = f"layers are numbered as in {architecture} models: one of {period} has full attention, the others a window"
    return LayerNumbers(by_cache=tuple(numbers), states=states, rule=rule)


def find_completeness(state: LlamaState, layer_numbers: LayerNumbers | None, caches: Sequence[int]) -> Completeness:
    """Return which state of the model the arrays of some of the caches contain.

    Parameters
    ----------
    caches
        Which of the file's caches are read.
    """
    counts = count_layers(state)
    other_state: tuple[str, ...] = ()
    if state.recurrent_bytes:
        size_text = pluralize(state.recurrent_bytes, "byte")
        other_state = (f"recurrent state of {size_text} is in the {state.kind} after K and V",)
    if layer_numbers is not None:
        included_layers = {
            layer_number for cache in caches if counts[cache] for layer_number in layer_numbers.by_cache[cache]
        }
        states = tuple(
            layer_state if layer_state.kind == "shared" else _mark_included(state, layer_state, counts, included_layers)
            for layer_state in layer_numbers.states
        )
        return Completeness(layers=states, other=other_state)
    order = [*caches, *(cache for cache in range(len(counts)) if cache not in caches)]
    cache_layers = [(cache, index) for cache in order for index in range(counts[cache])]
    layer_states = []
    for layer_number, (cache, _) in enumerate(cache_layers):
        layer_state = LayerStateInfo(layer=layer_number, kind="window" if cache else "full")
        layer_states.append(
            layer_state if cache in caches else _mark_left_out(state, layer_state, counts, is_numbered=False)
        )
    return Completeness(layers=tuple(layer_states), other=other_state)


def _mark_included(
    state: LlamaState, layer: LayerStateInfo, counts: Sequence[int], included_layers: set[int]
) -> LayerStateInfo:
    if layer.layer in included_layers:
        return replace(layer, included=True, location="")
    return _mark_left_out(state, layer, counts)


def _mark_left_out(
    state: LlamaState, layer: LayerStateInfo, counts: Sequence[int], *, is_numbered: bool = True
) -> LayerStateInfo:
    cache = int(layer.kind == "window" and len(counts) > 1)
    location = f"in the {CACHE_NAMES[cache]} cache of the {state.kind}"
    if not counts[cache]:
        location += ", which has no cells"
    elif not is_numbered:
        location += " (--model FILE.gguf tells which layers these are)"
    return replace(layer, included=False, location=location)
