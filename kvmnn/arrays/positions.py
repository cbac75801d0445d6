"""Positions of each layer's tokens: conflicts between caches, windows without their first tokens, summary lines."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from .._util.text import format_layers, format_range, pluralize
from ..dtypes import Positions
from ..packed.cache_info import PositionRuns
from .completeness import Completeness, describe_state, format_missing
from .engine_cache import parse_layers, positions_to_runs
from .source import Source

#: By layer, in the order of the arrays: int64 ``[token]``, or ``[kv_head, token]`` where heads hold different ones.
PositionMap = Mapping[int, Positions]


def read_token_positions(source: Source, *, as_rotated: bool = False) -> PositionMap:
    """Return the positions that a packed cache or another engine's cache records, for the layers that have them.

    With `as_rotated`, those of a packed cache that K is rotated to.
    """
    if source.cache is not None:
        layers_info = source.cache.layers
        runs = {entry.layer: entry.positions if as_rotated else entry.text_position_runs for entry in layers_info}
        return {n: np.concatenate([np.arange(begin, begin + size) for begin, size in r]) for n, r in runs.items()}
    cache = source.engine_cache
    if cache is None:
        return {}
    layers = parse_layers(source)
    if cache.layer_positions is not None:
        return dict(zip(layers, cache.layer_positions, strict=True)) if len(layers) == cache.layers else {}
    return {} if cache.positions is None else dict.fromkeys(layers, cache.positions)


def find_position_conflicts(first: PositionMap, second: PositionMap) -> dict[int, str]:
    """Describe each layer for which both caches state token positions and these differ."""
    conflicts = {}
    for layer in sorted(first.keys() & second.keys()):
        first_positions, second_positions = first[layer], second[layer]
        tokens = min(first_positions.shape[-1], second_positions.shape[-1])
        if first_positions.shape[:-1] != second_positions.shape[:-1]:
            continue  # only one has positions by head
        differing_indices = np.argwhere(first_positions[..., :tokens] != second_positions[..., :tokens])
        if len(differing_indices):
            index = tuple(differing_indices[0])
            head_text = f" of head {index[0]}" if len(index) > 1 else ""
            conflicts[layer] = (
                f"token {index[-1]}{head_text} stands at {first_positions[index]} and {second_positions[index]} of the "
                f"text, and {len(differing_indices) - 1} more differ"
            )
    return conflicts


def describe_conflicts(conflicts: Mapping[int, str], layers: Collection[int], ending: str = "") -> list[str]:
    """Format a line for each of these layers; one line if all `layers` have the same conflict."""
    if len(set(conflicts.values())) == 1 and conflicts.keys() >= set(layers):
        return [min(conflicts.values()) + ending]
    return [f"layer {layer}: {line}{ending}" for layer, line in conflicts.items()]


def describe_gaps(runs_by_layer: Mapping[int, Collection[PositionRuns]]) -> str:
    """Describe a layer without the first tokens of its text, and how many more there are."""
    layers_with_gaps = {
        n: runs
        for n, runs in runs_by_layer.items()
        if any(len(head_runs) > 1 or head_runs[0][0] > 0 for head_runs in runs if head_runs)
    }
    if not layers_with_gaps:
        return ""
    layer, runs = next(iter(layers_with_gaps.items()))
    example = next(iter(runs))
    tokens = sum(size for _, size in example)
    last_position = max(sum(run) - 1 for head_runs in runs for run in head_runs)
    more_text = f", and so {pluralize(len(layers_with_gaps) - 1, 'more layer')}" if len(layers_with_gaps) > 1 else ""
    return f"layer {layer} holds {pluralize(tokens, 'token')} of positions up to {last_position}{more_text}"


def find_window_layers(completeness: Completeness | None, position_map: PositionMap) -> dict[int, Positions]:
    """Return the positions of sliding-window layers that contain only the last tokens of a text."""
    states = {} if completeness is None else {state.layer: state for state in completeness.layers}
    if not position_map or any(positions.ndim != 1 for positions in position_map.values()):
        return {}
    tokens = 1 + max(int(positions.max(initial=-1)) for positions in position_map.values())
    windows = {}
    for layer, positions in position_map.items():
        if np.array_equal(positions, np.arange(tokens)):
            continue
        state = states.get(layer)
        if state is None or state.kind != "window" or not positions.size:
            return {}
        # A layer needs as many of the last tokens as its window has.
        covers_window = positions.size >= min(tokens, (state.window or 1) - 1)
        if not covers_window or not np.array_equal(positions, np.arange(tokens - positions.size, tokens)):
            return {}
        windows[layer] = positions
    has_other_layers = any(state.kind not in ("window", "shared") for state in states.values())
    return {} if has_other_layers and len(windows) == len(position_map) else windows


def describe_windows(completeness: Completeness | None, windows: Mapping[int, Positions]) -> str:
    """Return a sentence about layers with a window: ``"10 of 12 layers have a window of 16 tokens ..."``."""
    states = [] if completeness is None else [state for state in completeness.layers if state.kind != "shared"]
    sizes = sorted({state.window for state in states if state.layer in windows and state.window is not None})
    size = f" of {format_range(sizes)} tokens" if sizes else ""
    stored_text = format_range(sorted({positions.size for positions in windows.values()}))
    num_seen = 1 + max(int(positions.max()) for positions in windows.values())
    return (
        f"{len(windows):,} of {pluralize(len(states), 'layer')} have a window{size} and contain the last {stored_text} "
        f"of {pluralize(num_seen, 'token')}"
    )


_MAX_SHOWN_RUNS = 4  # positions of an evicted cache may be thousands of runs


def position_runs_by_layer(position_map: PositionMap) -> dict[int, PositionRuns]:
    """Return the positions of each layer as ``(begin, size)`` runs; of the first head, if heads differ."""
    return {layer: positions_to_runs(np.atleast_2d(positions)[0]) for layer, positions in position_map.items()}


def describe_layer_states(
    completeness: Completeness | None, positions: Mapping[int, PositionRuns] | None = None
) -> list[str]:
    """Format a line for each kind of layer, then one for each kind of missing state; none for plain models."""
    if completeness is None:
        return []
    groups: dict[str, list[int]] = {}
    for state in completeness.layers:
        runs = (positions or {}).get(state.layer) if state.included else None
        location = f", positions {_format_runs(runs)}" if runs else "" if state.included else ", not included"
        groups.setdefault(describe_state(state) + location, []).append(state.layer)
    is_plain = completeness.is_plain and len(groups) <= 1
    lines = [] if is_plain else [f"{format_layers(layers)}: {text}" for text, layers in groups.items()]
    return [*lines, *format_missing(completeness)]


def _format_runs(runs: PositionRuns) -> str:
    text = ", ".join(format_range(sorted({begin, begin + size - 1})) for begin, size in runs[:_MAX_SHOWN_RUNS])
    return f"{text} and {len(runs) - _MAX_SHOWN_RUNS} more runs" if len(runs) > _MAX_SHOWN_RUNS else text
