"""Windows of attention: how many of the latest tokens a layer attends to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dtypes import Indices, Positions
from ..errors import ModelError

_GEMMA3_PATTERN: Final = 6
"""Every sixth layer of Gemma 3 attends to all tokens, where its configuration does not say which."""


def list_windows(settings: Mapping[str, Any], num_layers: int, label: str) -> list[int | None]:
    """List the tokens that each layer attends to, by a ``config.json`` of transformers; None for all."""
    window = settings.get("sliding_window")
    if window is None or settings.get("use_sliding_window") is False:
        return [None] * num_layers
    if type(window) is not int or window < 1:
        raise ModelError(f"{label}: sliding_window is {window!r:.40}: expected a number above 0")
    kinds = settings.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ModelError(f"{label}: layer_types is not of {num_layers} layers")
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if settings.get("model_type") in ("gemma3", "gemma3_text"):
        pattern = settings.get("sliding_window_pattern", _GEMMA3_PATTERN)
        if type(pattern) is not int or pattern < 1:
            raise ModelError(f"{label}: sliding_window_pattern is {pattern!r:.40}: expected a number above 0")
        return [window if (layer + 1) % pattern else None for layer in range(num_layers)]
    first = settings.get("max_window_layers", 0) if "use_sliding_window" in settings else 0
    if type(first) is not int:
        raise ModelError(f"{label}: max_window_layers is {first!r:.40}: expected a number")
    return [window if layer >= first else None for layer in range(num_layers)]


def count_tokens_in_windows(windows: Mapping[int, int], num_layers: int, tokens_seen: int) -> list[int]:
    """Count the tokens of a text that each layer still attends to."""
    return [min(tokens_seen, windows.get(layer, tokens_seen)) for layer in range(num_layers)]


def count_outside(positions: Positions, tokens_seen: int, window: int | None) -> Indices:
    """Count the stored tokens before the window of the latest ones: int64 ``[1]``, or ``[kv_head]``.

    Parameters
    ----------
    positions
        Text positions of a layer's tokens, ascending: ``[token]``, or ``[kv_head, token]``.
    """
    begin_position = 0 if window is None else tokens_seen - window
    counts: Indices = np.count_nonzero(np.atleast_2d(positions) < begin_position, axis=1)
    return counts


def select_window(layer: LayerCache, window: int | None) -> tuple[Any, Any]:
    """Return K and V of the tokens within the window of the latest ones: ``[kv_head, token, dim]``.

    They are ``[row, dim]`` of all heads where these hold different numbers of such tokens.
    """
    counts = count_outside(layer.positions, layer.tokens_seen, window)
    if (counts == counts[0]).all():
        return layer.keys[:, counts[0] :], layer.values[:, counts[0] :]
    is_inside = np.arange(layer.tokens) >= counts[:, None]
    return layer.keys[is_inside], layer.values[is_inside]
