"""A packed cache in a few words, and as JSON."""

from __future__ import annotations

from typing import Any

from ..text import count, span
from .cache_info import CacheInfo, LayerInfo, Ranges, to_dict
from .fitting import describe

_MAX_RUNS = 12


def cache_document(info: CacheInfo | None) -> dict[str, Any] | None:
    """The description of a cache with its sizes in bytes, for JSON."""
    return None if info is None else {**to_dict(info), "live_bytes": info.live_bytes, "file_bytes": info.file_bytes}


def describe_layouts(info: CacheInfo) -> str:
    """Return the layout of all layers in words; where heads differ, with those of each kind of layer."""
    if info.is_uniform:
        return describe(info.layout)
    shared = describe(info.layout).split(", ", 1)[1]
    kinds = dict.fromkeys((layout.kv_heads, layout.head_dim) for layout in map(info.layout_of, info.layers))
    return f"{' or '.join(f'{heads} x {dims}' for heads, dims in kinds)} kv heads x dims by layer, {shared}"


def cache_summary(info: CacheInfo) -> str:
    """Layers, layout, tokens and capacity on one line."""
    tokens = sorted({layer.tokens for layer in info.layers})
    capacities = sorted({layer.capacity for layer in info.layers})
    layers = count(len(info.layers), "layer")
    if info.states:
        layers = f"K and V in {len(info.layers)} of {count(len(info.numbers), 'layer')}"
    return f"{layers}, {describe_layouts(info)}, {span(tokens)} tokens, capacity {span(capacities)}"


def live_share(info: CacheInfo) -> str:
    """Live and padded bytes on one line."""
    live, total = info.live_bytes, info.file_bytes - info.state_bytes
    return f"{live:,} live bytes of {total:,} ({100 * live / total:.1f} %), {total - live:,} padding and room"


def is_cut(layer: LayerInfo) -> bool:
    """Whether a layer holds other tokens than the first ones."""
    return layer.text_runs != ((0, layer.tokens),)


def runs_text(runs: Ranges) -> str:
    """The first runs as ``begin:size``."""
    more = ", ..." if len(runs) > _MAX_RUNS else ""
    return ", ".join(f"{begin}:{size}" for begin, size in runs[:_MAX_RUNS]) + more


def kept_tokens(info: CacheInfo) -> list[str]:
    """One line for each layer that was cut: which tokens of the text it holds."""
    return [
        f"layer {layer.layer} holds the tokens {runs_text(layer.text_runs)}"
        + (f", K rotated to positions {runs_text(layer.positions)}" if layer.text_positions is not None else "")
        for layer in info.layers
        if is_cut(layer)
    ]
