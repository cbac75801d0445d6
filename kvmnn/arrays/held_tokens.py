"""Which tokens of its text each layer of a cache holds, and where two caches say otherwise."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ..dtypes import Positions
from ..packed.cache_info import PositionRuns
from ..text import pluralize
from .engine_cache import parse_layers
from .source import Source

PositionMap = Mapping[int, Positions]
"""By layer, in the order of the arrays: int64 ``[token]``, or ``[kv_head, token]`` where heads hold different ones."""


def read_token_positions(source: Source) -> PositionMap:
    """What a packed cache or that of another engine says; nothing of layers of which nothing is said."""
    if source.cache is not None:
        runs = {layer.layer: layer.text_position_runs for layer in source.cache.layers}
        return {n: np.concatenate([np.arange(begin, begin + size) for begin, size in r]) for n, r in runs.items()}
    cache = source.engine_cache
    if cache is None:
        return {}
    layers = parse_layers(source)
    if cache.layer_positions is not None:
        return dict(zip(layers, cache.layer_positions, strict=True)) if len(layers) == cache.layers else {}
    return {} if cache.positions is None else dict.fromkeys(layers, cache.positions)


def find_position_conflicts(first: PositionMap, second: PositionMap) -> dict[int, str]:
    """Layers of which both caches say which tokens of the text they hold, and say otherwise."""
    conflicts = {}
    for layer in sorted(first.keys() & second.keys()):
        first_positions, second_positions = first[layer], second[layer]
        tokens = min(first_positions.shape[-1], second_positions.shape[-1])
        if first_positions.shape[:-1] != second_positions.shape[:-1]:
            continue  # only one says it by head
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
    """A line for each of those layers; one line where it is the same of all `layers`."""
    if len(set(conflicts.values())) == 1 and conflicts.keys() >= set(layers):
        return [min(conflicts.values()) + ending]
    return [f"layer {layer}: {line}{ending}" for layer, line in conflicts.items()]


def describe_gaps(runs_by_layer: Mapping[int, Collection[PositionRuns]]) -> str:
    """What a layer holds that does not hold the first tokens of its text, and how many more there are."""
    layers_with_gaps = {
        n: runs
        for n, runs in runs_by_layer.items()
        if any(len(head_runs) > 1 or head_runs[0][0] > 0 for head_runs in runs if head_runs)
    }
    if not layers_with_gaps:
        return ""
    layer, runs = next(iter(layers_with_gaps.items()))
    example = next(iter(runs))
    tokens, last_position = (
        sum(size for _, size in example),
        max(sum(run) - 1 for head_runs in runs for run in head_runs),
    )
    more_text = f", and so {pluralize(len(layers_with_gaps) - 1, 'more layer')}" if len(layers_with_gaps) > 1 else ""
    return f"layer {layer} holds {pluralize(tokens, 'token')} of positions up to {last_position}{more_text}"
