"""What state a model keeps for each layer of a cache of transformers, and what of it the arrays contain."""

from __future__ import annotations

from collections.abc import Sequence

from ...arrays.completeness import Completeness, LayerStateInfo
from ...text import pluralize
from .objects import TransformersCache
from .token_rows import CacheRows

_MAX_NAMED_STATES = 4


def describe_states(cache: TransformersCache, rows: CacheRows) -> Completeness:
    """Describe the state of every layer of a cache.

    Parameters
    ----------
    cache
        As it was found.
    rows
        Which tokens its layers hold.
    """
    states: dict[int, LayerStateInfo] = {}
    for layer in cache.layers:
        states[layer.number] = LayerStateInfo(
            layer=layer.number,
            kind="window" if layer.is_window else "full",
            window=layer.window if layer.is_window else None,
        )
    for other_layer in cache.other_layers:
        location = f"kept in {_join_names(other_layer.state_names)}, not as K and V" if other_layer.state_names else ""
        states[other_layer.number] = LayerStateInfo(
            layer=other_layer.number, kind=other_layer.kind, included=False, location=location
        )
    return Completeness(
        layers=tuple(states[layer_number] for layer_number in sorted(states)),
        evicted=rows.eviction_text,
        other=tuple(_list_further_states(cache, len(states))),
    )


def _list_further_states(cache: TransformersCache, num_layers: int) -> list[str]:
    """A sentence for each kind of state that layers with K and V have besides."""
    layer_count_by_names: dict[tuple[str, ...], int] = {}
    for layer in cache.layers:
        if layer.state_names:
            layer_count_by_names[layer.state_names] = layer_count_by_names.get(layer.state_names, 0) + 1
    return [
        f"{num_group_layers:,} of {pluralize(num_layers, 'layer')} {'has' if num_group_layers == 1 else 'have'} "
        f"{_join_names(names)} "
        "in addition to K and V, not included"
        for names, num_group_layers in layer_count_by_names.items()
    ]


def _join_names(names: Sequence[str]) -> str:
    if len(names) > _MAX_NAMED_STATES:
        return f"{', '.join(names[:_MAX_NAMED_STATES])} and {len(names) - _MAX_NAMED_STATES} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
