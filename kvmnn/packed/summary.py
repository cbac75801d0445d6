"""A packed cache in a few words, and as JSON."""

from __future__ import annotations

from typing import Any

from ..text import format_range, pluralize
from .cache_info import CacheInfo, LayerInfo, PositionRuns, cache_info_to_dict
from .fitting import describe_layout

_MAX_SHOWN_RUNS = 12


def build_cache_document(info: CacheInfo | None) -> dict[str, Any] | None:
    """The description of a cache with its sizes in bytes, for JSON."""
    return (
        None
        if info is None
        else {**cache_info_to_dict(info), "live_bytes": info.live_bytes, "file_bytes": info.file_bytes}
    )


def describe_layouts(info: CacheInfo) -> str:
    """Return the layout of all layers in words; where heads differ, with those of each kind of layer."""
    if info.is_uniform:
        return describe_layout(info.layout)
    shared = describe_layout(info.layout).split(", ", 1)[1]
    kinds = dict.fromkeys((layout.kv_heads, layout.head_dim) for layout in map(info.get_layer_layout, info.layers))
    return f"{' or '.join(f'{heads} x {dims}' for heads, dims in kinds)} kv heads x dims by layer, {shared}"


def format_cache_summary(info: CacheInfo) -> str:
    """Layers, layout, tokens and capacity on one line."""
    tokens = sorted({layer.tokens for layer in info.layers})
    capacities = sorted({layer.capacity for layer in info.layers})
    layers = pluralize(len(info.layers), "layer")
    if info.states:
        layers = f"K and V in {len(info.layers)} of {pluralize(len(info.numbers), 'layer')}"
    return f"{layers}, {describe_layouts(info)}, {format_range(tokens)} tokens, capacity {format_range(capacities)}"


def format_utilisation(info: CacheInfo) -> str:
    """Live and padded bytes on one line."""
    live, total = info.live_bytes, info.file_bytes - info.state_bytes
    return f"{live:,} live bytes of {total:,} ({100 * live / total:.1f} %), {total - live:,} padding and room"


def has_evictions(layer: LayerInfo) -> bool:
    """Whether a layer holds other tokens than the first ones."""
    return layer.text_position_runs != ((0, layer.tokens),)


def format_runs(runs: PositionRuns) -> str:
    """The first runs as ``begin:size``."""
    ellipsis = ", ..." if len(runs) > _MAX_SHOWN_RUNS else ""
    return ", ".join(f"{begin}:{size}" for begin, size in runs[:_MAX_SHOWN_RUNS]) + ellipsis


def describe_evicted_layers(info: CacheInfo) -> list[str]:
    """One line for each layer that was cut: which tokens of the text it holds."""
    return [
        f"layer {layer.layer} holds the tokens {format_runs(layer.text_position_runs)}"
        + (f", K rotated to positions {format_runs(layer.positions)}" if layer.text_positions is not None else "")
        for layer in info.layers
        if has_evictions(layer)
    ]
