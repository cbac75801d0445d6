"""What state a model keeps for each layer of a cache of transformers, and what of it the arrays contain."""

from __future__ import annotations

from collections.abc import Sequence

from ...arrays.completeness import Completeness, LayerState
from ...text import count
from .objects import Cache
from .token_rows import CacheRows

_MOST_NAMED = 4


def describe_states(cache: Cache, rows: CacheRows) -> Completeness:
    """Describe the state of every layer of a cache.

    Parameters
    ----------
    cache
        As it was found.
    rows
        Which tokens its layers hold.
    """
    states: dict[int, LayerState] = {}
    for layer in cache.layers:
        states[layer.number] = LayerState(
            layer=layer.number,
            kind="window" if layer.is_window else "full",
            window=layer.window if layer.is_window else None,
        )
    for other in cache.others:
        location = f"kept in {_list(other.states)}, not as K and V" if other.states else ""
        states[other.number] = LayerState(layer=other.number, kind=other.kind, included=False, location=location)
    return Completeness(
        layers=tuple(states[number] for number in sorted(states)),
        evicted=rows.evicted,
        other=tuple(_further_states(cache, len(states))),
    )


def _further_states(cache: Cache, layers: int) -> list[str]:
    """A sentence for each kind of state that layers with K and V have besides."""
    groups: dict[tuple[str, ...], int] = {}
    for layer in cache.layers:
        if layer.states:
            groups[layer.states] = groups.get(layer.states, 0) + 1
    return [
        f"{number:,} of {count(layers, 'layer')} {'has' if number == 1 else 'have'} {_list(names)} "
        "in addition to K and V, not included"
        for names, number in groups.items()
    ]


def _list(names: Sequence[str]) -> str:
    if len(names) > _MOST_NAMED:
        return f"{', '.join(names[:_MOST_NAMED])} and {len(names) - _MOST_NAMED} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
