"""Which layers of a model of llama.cpp have a sliding window, by its header and by what llama.cpp assumes without one.

llama.cpp keeps K and V of layers with a window in a cache of their own. Headers give the layers as
``attention.sliding_window_pattern``: a truth value for each layer, or a period; without it `load_arch_hparams` of each
architecture has a default. (Read from llama.cpp as of llama-cpp-python 0.3.36.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...errors import SourceError

WINDOW_PATTERN_KEY: Final = "attention.sliding_window_pattern"
WINDOW_SIZE_KEY: Final = "attention.sliding_window"


@dataclass(frozen=True, kw_only=True)
class WindowRule:
    """What llama.cpp assumes of an architecture.

    Parameters
    ----------
    period
        One of so many layers has full attention; None where the header must have the pattern.
    is_full_first
        Whether that is the first of them; else the last.
    size
        Tokens of the window where the header does not have it; None where there is no window then.
    layers
        Number of layers of the only variant that has windows; None for all.
    theta
        Base of the rotation in layers with a window where the header does not have it; None for that of the others.
    is_scaled
        Whether layers with a window scale their rotation as the others do.
    is_full_rotated
        Whether K of layers with full attention is rotated.
    """

    period: int | None
    is_full_first: bool = False
    size: int | None = None
    layers: int | None = None
    theta: float | None = None
    is_scaled: bool = True
    is_full_rotated: bool = True


_WINDOW_ROPE_THETA: Final = 10000.0

WINDOW_RULES: Final[Mapping[str, WindowRule]] = {
    "afmoe": WindowRule(period=4, is_full_rotated=False),
    "cohere2": WindowRule(period=4, is_full_rotated=False),
    "cohere2moe": WindowRule(period=4, is_full_first=True, is_full_rotated=False),
    "dots3note": WindowRule(period=None, is_scaled=False),
    "exaone-moe": WindowRule(period=4, size=128, is_full_rotated=False),
    "exaone4": WindowRule(period=4, size=4096, layers=64, is_full_rotated=False),
    "gemma2": WindowRule(period=2, size=4096),
    "gemma3": WindowRule(period=6, theta=_WINDOW_ROPE_THETA, is_scaled=False),
    "gemma3n": WindowRule(period=5, theta=_WINDOW_ROPE_THETA, is_scaled=False),
    "gemma4": WindowRule(period=None, theta=_WINDOW_ROPE_THETA, is_scaled=False),
    "gpt-oss": WindowRule(period=2),
    "granite_swa": WindowRule(period=None),
    "laguna": WindowRule(period=4, is_full_first=True, is_scaled=False),
    "llama4": WindowRule(period=4, size=8192, is_full_rotated=False),
    "maple": WindowRule(period=None),
    "mellum": WindowRule(period=4),
    "mimo2": WindowRule(period=None, theta=_WINDOW_ROPE_THETA, is_scaled=False),
    "muse-glimmer": WindowRule(period=4, is_full_rotated=False),
    "olmo2": WindowRule(period=4, is_scaled=False),
    "plamo3": WindowRule(period=8, theta=_WINDOW_ROPE_THETA, is_scaled=False),
    "smallthinker": WindowRule(period=4, is_full_first=True, size=4096, is_full_rotated=False),
    "spark2_5": WindowRule(period=None),
    "step35": WindowRule(period=None, theta=_WINDOW_ROPE_THETA, is_scaled=False),
}
_SIZE_REQUIRED_ARCHITECTURES: Final = frozenset(
    ("afmoe", "gemma3", "laguna", "mellum", "olmo2", "plamo3", "smallthinker")
)
"""Architectures without windows where the header has no size, though others of them have a default size."""
_WINDOWLESS_ARCHITECTURES: Final = frozenset(("phi3", "phimoe"))
"""Architectures whose window llama.cpp ignores."""
_FIRST_SHARED_BY_ARCHITECTURE: Final = {"gemma3n": 20}
"""Layers from this one on use K and V of earlier ones, where the header does not have their number."""


def find_windows(
    architecture: str, num_layers: int, fields: Mapping[str, Any] | None, label: str = ""
) -> list[bool] | None:
    """Return whether each of the layers of a model has a window.

    Parameters
    ----------
    num_layers
        Number of layers.
    fields
        Of the header; None where no model is known, so that llama.cpp's defaults hold.
    label
        The beginning of errors.

    Returns
    -------
    None where nothing tells.

    Raises
    ------
    SourceError
        For a pattern of fewer layers.
    """
    rule = WINDOW_RULES.get(architecture)
    if fields is None:
        return None if rule is None or rule.period is None else _expand_period(rule, rule.period, num_layers)
    pattern, size = fields.get(f"{architecture}.{WINDOW_PATTERN_KEY}"), read_window_size(architecture, fields)
    if architecture in _WINDOWLESS_ARCHITECTURES or size == 0 or (size is None and pattern is None):
        return [False] * num_layers
    if isinstance(pattern, list):
        if len(pattern) < num_layers or not all(type(value) in (bool, int) for value in pattern):
            raise SourceError(
                f"{label}: {architecture}.{WINDOW_PATTERN_KEY} has {len(pattern):,} values, expected {num_layers:,}"
            )
        return [bool(value) for value in pattern[:num_layers]]
    if rule is not None and rule.layers not in (None, num_layers):
        return [False] * num_layers
    period = pattern if type(pattern) is int else rule.period if rule is not None else None
    return None if period is None else _expand_period(rule or WindowRule(period=period), period, num_layers)


def read_window_size(architecture: str, fields: Mapping[str, Any]) -> int | None:
    """Return how many tokens a window has by the header; 0 for no window, None where nothing tells."""
    size = fields.get(f"{architecture}.{WINDOW_SIZE_KEY}")
    if type(size) is int and size >= 0:
        return size
    rule = WINDOW_RULES.get(architecture)
    return None if rule is None else 0 if architecture in _SIZE_REQUIRED_ARCHITECTURES else rule.size


def find_first_shared_layer(architecture: str, num_layers: int, fields: Mapping[str, Any]) -> int:
    """Return the first layer that uses K and V of earlier layers; `num_layers` where all have their own."""
    num_shared = fields.get(f"{architecture}.attention.shared_kv_layers")
    if type(num_shared) is int and 0 < num_shared < num_layers:
        return num_layers - num_shared
    return min(num_layers, _FIRST_SHARED_BY_ARCHITECTURE.get(architecture, num_layers))


def _expand_period(rule: WindowRule, period: int, num_layers: int) -> list[bool]:
    if period < 1:  # llama.cpp: every layer has a window
        return [True] * num_layers
    full_offset = 0 if rule.is_full_first else period - 1
    return [layer % period != full_offset for layer in range(num_layers)]
