"""Layers with a sliding window that no longer contain the first tokens of their text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..dtypes import Positions
from ..text import format_range, pluralize
from .completeness import Completeness, LayerStateInfo
from .held_tokens import PositionMap


def find_window_layers(completeness: Completeness | None, position_map: PositionMap) -> dict[int, Positions]:
    """Return the positions of layers with a window that contain the last tokens of a text alone.

    Parameters
    ----------
    position_map
        Positions of the tokens of each layer.

    Returns
    -------
    Empty where there are none, and where other layers do not contain every token: such a cache was cut.
    """
    states = {} if completeness is None else {state.layer: state for state in completeness.layers}
    if not position_map or any(positions.ndim != 1 for positions in position_map.values()):
        return {}
    tokens = 1 + max(int(positions.max(initial=-1)) for positions in position_map.values())
    windows = {}
    for layer, positions in position_map.items():
        if np.array_equal(positions, np.arange(tokens)):
            continue
        if not _contains_window(states.get(layer), positions, tokens):
            return {}
        windows[layer] = positions
    return windows if len(windows) < len(position_map) or all(map(_has_window, states.values())) else {}


def describe_windows(completeness: Completeness | None, windows: Mapping[int, Positions]) -> str:
    """Return a sentence about layers with a window: ``"10 of 12 layers have a window of 16 tokens ..."``."""
    states = [] if completeness is None else [state for state in completeness.layers if state.kind != "shared"]
    sizes = sorted({state.window for state in states if state.layer in windows and state.window is not None})
    size = f" of {format_range(sizes)} tokens" if sizes else ""
    stored_text = format_range(sorted({positions.size for positions in windows.values()}))
    num_seen = 1 + max(int(positions.max()) for positions in windows.values())
    return (
        f"{len(windows):,} of {pluralize(len(states), 'layer')} have a window{size} and contain the last {stored_text} "
        f"of "
        f"{pluralize(num_seen, 'token')}"
    )


def _has_window(state: LayerStateInfo) -> bool:
    return state.kind in ("window", "shared")


def _contains_window(state: LayerStateInfo | None, positions: Positions, tokens: int) -> bool:
    """Return whether a layer contains as many of the last tokens of a text as its window needs."""
    if state is None or state.kind != "window" or not positions.size:
        return False
    first_position = tokens - positions.size
    covers_window = positions.size >= min(tokens, (state.window or 1) - 1)
    return covers_window and np.array_equal(positions, np.arange(first_position, tokens))
