"""Which tokens of its text each layer of a cache holds, and where two caches say otherwise."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ..dtypes import Positions
from ..packed.cache_info import Ranges
from ..text import count
from .engine_cache import layers_of
from .source import Source

Held = Mapping[int, Positions]
"""By layer, in the order of the arrays: int64 ``[token]``, or ``[kv_head, token]`` where heads hold different ones."""


def held_tokens(source: Source) -> Held:
    """What a packed cache or that of another engine says; nothing of layers of which nothing is said."""
    if source.cache is not None:
        runs = {layer.layer: layer.text_runs for layer in source.cache.layers}
        return {n: np.concatenate([np.arange(begin, begin + size) for begin, size in r]) for n, r in runs.items()}
    cache = source.engine_cache
    if cache is None:
        return {}
    layers = layers_of(source)
    if cache.layer_positions is not None:
        return dict(zip(layers, cache.layer_positions, strict=True)) if len(layers) == cache.layers else {}
    return {} if cache.positions is None else dict.fromkeys(layers, cache.positions)


def other_tokens(first: Held, second: Held) -> dict[int, str]:
    """Layers of which both caches say which tokens of the text they hold, and say otherwise."""
    found = {}
    for layer in sorted(first.keys() & second.keys()):
        one, two = first[layer], second[layer]
        tokens = min(one.shape[-1], two.shape[-1])
        if one.shape[:-1] != two.shape[:-1]:
            continue  # only one says it by head
        other = np.argwhere(one[..., :tokens] != two[..., :tokens])
        if len(other):
            at = tuple(other[0])
            head = f" of head {at[0]}" if len(at) > 1 else ""
            found[layer] = (
                f"token {at[-1]}{head} stands at {one[at]} and {two[at]} of the text, and {len(other) - 1} more differ"
            )
    return found


def said(other: Mapping[int, str], layers: Collection[int], ending: str = "") -> list[str]:
    """A line for each of those layers; one line where it is the same of all `layers`."""
    if len(set(other.values())) == 1 and other.keys() >= set(layers):
        return [min(other.values()) + ending]
    return [f"layer {layer}: {line}{ending}" for layer, line in other.items()]


def gaps(held: Mapping[int, Collection[Ranges]]) -> str:
    """What a layer holds that does not hold the first tokens of its text, and how many more there are."""
    cut = {n: runs for n, runs in held.items() if any(len(each) > 1 or each[0][0] > 0 for each in runs if each)}
    if not cut:
        return ""
    number, runs = next(iter(cut.items()))
    one = next(iter(runs))
    tokens, last = sum(size for _, size in one), max(sum(run) - 1 for each in runs for run in each)
    more = f", and so {count(len(cut) - 1, 'more layer')}" if len(cut) > 1 else ""
    return f"layer {number} holds {count(tokens, 'token')} of positions up to {last}{more}"
