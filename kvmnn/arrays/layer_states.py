"""The layers of a cache listed by what they keep: kind of attention, positions, what the arrays lack."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..packed.cache_info import Ranges
from ..text import span
from .completeness import Completeness, describe_state, report_missing
from .engine_cache import runs_of
from .held_tokens import Held

_MAX_RUNS = 4  # positions of an evicted cache may be thousands of runs


def runs_by_layer(held: Held) -> dict[int, Ranges]:
    """Return runs of the positions of each layer, ``(begin, size)``; of heads that differ those of the first."""
    return {layer: runs_of(np.atleast_2d(positions)[0]) for layer, positions in held.items()}


def list_states(completeness: Completeness | None, positions: Mapping[int, Ranges] | None = None) -> list[str]:
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
        where = f", positions {_spell_runs(runs)}" if runs else "" if state.included else ", not included"
        groups.setdefault(describe_state(state) + where, []).append(state.layer)
    plain = completeness.is_plain and len(groups) <= 1
    lines = [] if plain else [f"{spell_layers(numbers)}: {text}" for text, numbers in groups.items()]
    return [*lines, *report_missing(completeness)]


def spell_layers(numbers: list[int]) -> str:
    """Return numbers of layers in words: ``"layers 0 to 4, 6"``."""
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(span(run) for run in _consecutive(numbers))}"


def _spell_runs(runs: Ranges) -> str:
    text = ", ".join(span(sorted({begin, begin + size - 1})) for begin, size in runs[:_MAX_RUNS])
    return f"{text} and {len(runs) - _MAX_RUNS} more runs" if len(runs) > _MAX_RUNS else text


def _consecutive(numbers: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
