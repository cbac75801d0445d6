"""The layers of a model of llama.cpp, by its header: heads, sizes of a head, window, rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...arrays.completeness import LayerState
from ...dense import Rotary
from ...errors import SourceError
from . import gguf
from .windows import WINDOW_RULES, find_windows, first_shared, window_size


@dataclass(frozen=True, kw_only=True)
class ModelLayer:
    """A layer of a model.

    Parameters
    ----------
    state
        What the model keeps for it.
    kv_heads
        Heads of K and V; 0 for layers without attention.
    head_dim, value_dim
        Values of a head of K and of V.
    """

    state: LayerState
    kv_heads: int
    head_dim: int
    value_dim: int


def read_layers(path: str) -> tuple[ModelLayer, ...] | None:
    """Return the layers of a model; None where its header does not tell which have a window, heads or sizes.

    Layers that only predict further tokens are left out.

    Raises
    ------
    SourceError
        When the file is no GGUF file, or is damaged.
    """
    name, fields = gguf.read_fields(path)
    blocks = gguf.positive(fields.get(f"{name}.block_count"))
    if blocks is None or blocks > gguf.MAX_LAYERS:
        return None
    layers = blocks - (gguf.positive(fields.get(f"{name}.nextn_predict_layers")) or 0)
    windows = find_windows(name, layers, fields, path)
    heads = fields.get(f"{name}.attention.head_count")
    kv_heads = fields.get(f"{name}.attention.head_count_kv", heads)
    by_layer = kv_heads[:layers] if isinstance(kv_heads, list) else [kv_heads] * layers
    if windows is None or layers < 1 or len(by_layer) != layers or not all(type(each) is int for each in by_layer):
        return None
    sizes = [_sizes(name, fields, is_window) for is_window in (False, True)]
    if not all(map(all, sizes)):
        return None
    shared = first_shared(name, layers, fields)
    return tuple(
        ModelLayer(
            state=_state(number, is_window, shared, window_size(name, fields)),
            kv_heads=count,
            head_dim=sizes[is_window][0],
            value_dim=sizes[is_window][1],
        )
        for number, (is_window, count) in enumerate(zip(windows, by_layer, strict=True))
    )


def read_rotations(path: str) -> tuple[dict[int, Rotary | None], list[str]]:
    """Return how K of each layer is rotated, None for not at all; and one line for each thing that is left out.

    Empty where all layers are rotated as `gguf.read_rotary` says, or nothing tells.

    Raises
    ------
    SourceError
        As `gguf.read_rotary`.
    """
    name, fields = gguf.read_fields(path)
    layers, (rotary, notes) = read_layers(path), gguf.read_rotary(path)
    if layers is None or rotary is None or not any(layer.state.window for layer in layers):
        return {}, notes
    rule = WINDOW_RULES.get(name)
    theta = fields.get(f"{name}.rope.freq_base_swa", (rule.theta if rule is not None else None) or rotary.theta)
    dims = gguf.positive(fields.get(f"{name}.rope.dimension_count_swa"))
    of_window = gguf.make_rotary(
        path,
        theta=theta,
        dims=dims or min(rotary.dims, next(each.head_dim for each in layers if each.state.window)),
        pairing=rotary.pairing,
        scaling=rotary.scaling if rule is None or rule.is_scaled else None,
    )
    of_full = rotary if rule is None or rule.is_full_rotated else None
    return {each.state.layer: of_window if each.state.window else of_full for each in layers}, notes


def _sizes(name: str, fields: Mapping[str, Any], is_window: bool) -> tuple[int, int]:
    """Return the values of a head of K and of V; 0 where nothing tells."""
    width = gguf.positive(fields.get(f"{name}.embedding_length"))
    heads = fields.get(f"{name}.attention.head_count")
    whole = gguf.positive(heads[0] if isinstance(heads, list) and heads else heads)  # as llama.cpp: the first layer's
    usual = width // whole if width and whole else 0
    found = [gguf.positive(fields.get(f"{name}.attention.{part}_length")) or usual for part in ("key", "value")]
    if is_window:
        own = [gguf.positive(fields.get(f"{name}.attention.{part}_length_swa")) for part in ("key", "value")]
        found = [one or other for one, other in zip(own, found, strict=True)]
    key, value = found
    return key, value or key


def _state(number: int, is_window: bool, shared: int, window: int | None) -> LayerState:
    state = LayerState(layer=number, kind="window", window=window) if is_window else LayerState(layer=number)
    if number < shared:
        return state
    # llama.cpp: the last layer of the same kind that has its own, of which the last one has full attention
    return replace(state, kind="shared", shared_with=max(0, shared - (2 if is_window else 1)), included=False)


def own_layers(layers: tuple[ModelLayer, ...], *, is_window: bool) -> list[ModelLayer]:
    """Return the layers that have K and V of their own, with or without a window."""
    kind = "window" if is_window else "full"
    return [layer for layer in layers if layer.state.kind == kind and layer.kv_heads]


def check_layers(path: str, layers: tuple[ModelLayer, ...] | None) -> tuple[ModelLayer, ...]:
    """Return the layers; `SourceError` where the header does not tell them."""
    if layers is None:
        raise SourceError(f"{path}: does not say which layers have a sliding window")
    return layers
