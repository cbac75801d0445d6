"""The layers of a cache listed by what they keep: kind of attention, positions, what the arrays lack."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..packed.cache_info import PositionRuns
from ..text import format_range
from .completeness import Completeness, describe_state, format_missing
from .engine_cache import positions_to_runs
from .held_tokens import PositionMap

_MAX_SHOWN_RUNS = 4  # positions of an evicted cache may be thousands of runs


def position_runs_by_layer(position_map: PositionMap) -> dict[int, PositionRuns]:
    """Return runs of the positions of each layer, ``(begin, size)``; of heads that differ those of the first."""
    return {layer: positions_to_runs(np.atleast_2d(positions)[0]) for layer, positions in position_map.items()}


def describe_layer_states(
    completeness: Completeness | None, positions: Mapping[int, PositionRuns] | None = None
) -> list[str]:
    """Return a line for each kind of layer, then one for each kind of state that the arrays do not contain.

    Models that have full attention in every layer get none.

    Parameters
    ----------
    positions
        Runs of positions by layer, ``(begin, size)``, where they are known.
    """
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


def format_layers(layers: list[int]) -> str:
    """Return numbers of layers in words: ``"layers 0 to 4, 6"``."""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(format_range(run) for run in _group_consecutive(layers))}"


def _format_runs(runs: PositionRuns) -> str:
    text = ", ".join(format_range(sorted({begin, begin + size - 1})) for begin, size in runs[:_MAX_SHOWN_RUNS])
    return f"{text} and {len(runs) - _MAX_SHOWN_RUNS} more runs" if len(runs) > _MAX_SHOWN_RUNS else text


def _group_consecutive(numbers: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
