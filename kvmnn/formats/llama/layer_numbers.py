"""Which layer of the model each layer of a state file is, and what the model keeps for the others.

A file counts layers within each of its caches. Models with sliding windows have two: K and V of layers with full
attention, then those of layers with a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...arrays.completeness import Completeness, LayerState
from ...errors import OptionError
from ...text import count
from ..options import ReadOptions
from .model_layers import ModelLayer, own_layers, read_layers
from .state import State
from .windows import WINDOW_RULES, find_windows

CACHES = ("first", "second")


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
    states: tuple[LayerState, ...]
    model: tuple[ModelLayer, ...] | None = None
    rule: str = ""


def count_layers(state: State) -> tuple[int, ...]:
    """Return how many layers each cache has; 0 for a cache without cells."""
    return tuple(
        max((sum(tensor.part == "key" for tensor in each.tensors) for each in streams), default=0)
        for streams in state.caches
    )


def number_layers(where: str, state: State, options: ReadOptions) -> LayerNumbers | None:
    """Return the numbers of the layers of a file with two caches, or whose model is known; None where nothing tells.

    Raises
    ------
    OptionError
        Where the model has other layers than the file.
    SourceError
        For a model that cannot be read.
    """
    counts, path = count_layers(state), options.packed.model if options.packed else None
    noted, completeness = options.engine.noted_layers, options.engine.noted_completeness
    if path is not None:
        return _number_by_model(where, counts, path)
    if noted is not None and completeness is not None and len(noted) == sum(counts):
        ends = [sum(counts[: number + 1]) for number in range(len(counts))]
        by_cache = tuple(tuple(noted[end - size : end]) for end, size in zip(ends, counts, strict=True))
        if all(number < len(completeness.layers) for number in noted):
            return LayerNumbers(by_cache=by_cache, states=completeness.layers)
    if len(counts) == 1 or state.architecture is None:
        return None
    return _number_by_architecture(state.architecture, counts)


def _number_by_model(where: str, counts: Sequence[int], path: str) -> LayerNumbers | None:
    layers = read_layers(path)
    if layers is None:
        return None
    states = tuple(layer.state for layer in layers)
    if len(counts) == 1:
        own = [layer.state.layer for layer in layers if layer.state.kind != "shared"]
        return LayerNumbers(by_cache=(tuple(own),), states=states, model=layers) if len(own) == counts[0] else None
    numbers = [[each.state.layer for each in own_layers(layers, is_window=second)] for second in (False, True)]
    for name, expected, found in zip(CACHES, numbers, counts, strict=True):
        if found not in (0, len(expected)):
            raise OptionError(
                f"{where}: the {name} cache has {count(found, 'layer')}; the model in {path} has {len(numbers[0])} "
                f"with full attention and {len(numbers[1])} with a window: it is another model"
            )
    return LayerNumbers(by_cache=tuple(map(tuple, numbers)), states=states, model=layers)


def _number_by_architecture(architecture: str, counts: Sequence[int]) -> LayerNumbers | None:
    """Number as llama.cpp does for a model whose header has no pattern; None where counts do not fit that."""
    windows = find_windows(architecture, sum(counts), None)
    if windows is None or [windows.count(False), windows.count(True)] != list(counts):
        return None
    numbers = [tuple(n for n, each in enumerate(windows) if each is is_window) for is_window in (False, True)]
    states = tuple(LayerState(layer=n, kind="window" if each else "full") for n, each in enumerate(windows))
    period = WINDOW_RULES[architecture].period
    rule = f"layers are numbered as in {architecture} models: one of {period} has full attention, the others a window"
    return LayerNumbers(by_cache=tuple(numbers), states=states, rule=rule)


def find_completeness(state: State, numbers: LayerNumbers | None, caches: Sequence[int]) -> Completeness:
    """Return which state of the model the arrays of some of the caches contain.

    Parameters
    ----------
    caches
        Which of the file's caches are read.
    """
    counts = count_layers(state)
    other: tuple[str, ...] = ()
    if state.recurrent_bytes:
        size = count(state.recurrent_bytes, "byte")
        other = (f"recurrent state of {size} is in the {state.kind} after K and V",)
    if numbers is not None:
        included = {number for cache in caches if counts[cache] for number in numbers.by_cache[cache]}
        states = tuple(
            each if each.kind == "shared" else _with_included(state, each, counts, included) for each in numbers.states
        )
        return Completeness(layers=states, other=other)
    order = [*caches, *(cache for cache in range(len(counts)) if cache not in caches)]
    kinds = [(cache, index) for cache in order for index in range(counts[cache])]
    found = []
    for number, (cache, _) in enumerate(kinds):
        each = LayerState(layer=number, kind="window" if cache else "full")
        found.append(each if cache in caches else _left_out(state, each, counts, is_numbered=False))
    return Completeness(layers=tuple(found), other=other)


def _with_included(state: State, layer: LayerState, counts: Sequence[int], included: set[int]) -> LayerState:
    if layer.layer in included:
        return replace(layer, included=True, location="")
    return _left_out(state, layer, counts)


def _left_out(state: State, layer: LayerState, counts: Sequence[int], *, is_numbered: bool = True) -> LayerState:
    cache = int(layer.kind == "window" and len(counts) > 1)
    location = f"in the {CACHES[cache]} cache of the {state.kind}"
    if not counts[cache]:
        location += ", which has no cells"
    elif not is_numbered:
        location += " (--model FILE.gguf tells which layers these are)"
    return replace(layer, included=False, location=location)
