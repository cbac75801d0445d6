"""The layers of a model of llama.cpp, by its header: heads, sizes of a head, window, rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...arrays.completeness import LayerStateInfo
from ...dense import RopeConfig
from ...errors import SourceError
from . import gguf
from .windows import WINDOW_RULES, find_first_shared_layer, find_windows, read_window_size


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

    state: LayerStateInfo
    kv_heads: int
    head_dim: int
    value_dim: int


def read_model_layers(path: str) -> tuple[ModelLayer, ...] | None:
    """Return the layers of a model; None where its header does not tell which have a window, heads or sizes.

    Layers that only predict further tokens are left out.

    Raises
    ------
    SourceError
        When the file is no GGUF file, or is damaged.
    """
    name, fields = gguf.read_gguf_fields(path)
    num_blocks = gguf.parse_positive_int(fields.get(f"{name}.block_count"))
    if num_blocks is None or num_blocks > gguf.MAX_LAYERS:
        return None
    num_layers = num_blocks - (gguf.parse_positive_int(fields.get(f"{name}.nextn_predict_layers")) or 0)
    windows = find_windows(name, num_layers, fields, path)
    heads = fields.get(f"{name}.attention.head_count")
    kv_heads = fields.get(f"{name}.attention.head_count_kv", heads)
    heads_by_layer = kv_heads[:num_layers] if isinstance(kv_heads, list) else [kv_heads] * num_layers
    if (
        windows is None
        or num_layers < 1
        or len(heads_by_layer) != num_layers
        or not all(type(value) is int for value in heads_by_layer)
    ):
        return None
    head_sizes = [_read_head_sizes(name, fields, is_window) for is_window in (False, True)]
    if not all(map(all, head_sizes)):
        return None
    first_shared = find_first_shared_layer(name, num_layers, fields)
    return tuple(
        ModelLayer(
            state=_make_layer_state(layer, is_window, first_shared, read_window_size(name, fields)),
            kv_heads=num_kv_heads,
            head_dim=head_sizes[is_window][0],
            value_dim=head_sizes[is_window][1],
        )
        for layer, (is_window, num_kv_heads) in enumerate(zip(windows, heads_by_layer, strict=True))
    )


def read_rotations(path: str) -> tuple[dict[int, RopeConfig | None], list[str]]:
    """Return how K of each layer is rotated, None for not at all; and one line for each thing that is left out.

    Empty where all layers are rotated as `gguf.read_rotary` says, or nothing tells.

    Raises
    ------
    SourceError
        As `gguf.read_rotary`.
    """
    name, fields = gguf.read_gguf_fields(path)
    model_layers, (rotary, notes) = read_model_layers(path), gguf.read_gguf_rotary(path)
    if model_layers is None or rotary is None or not any(layer.state.window for layer in model_layers):
        return {}, notes
    rule = WINDOW_RULES.get(name)
    theta = fields.get(f"{name}.rope.freq_base_swa", (rule.theta if rule is not None else None) or rotary.theta)
    dims = gguf.parse_positive_int(fields.get(f"{name}.rope.dimension_count_swa"))
    window_rotary = gguf.build_rotary(
        path,
        theta=theta,
        dims=dims
        or min(rotary.dims, next(model_layer.head_dim for model_layer in model_layers if model_layer.state.window)),
        pairing=rotary.pairing,
        scaling=rotary.scaling if rule is None or rule.is_scaled else None,
    )
    full_rotary = rotary if rule is None or rule.is_full_rotated else None
    return {
        model_layer.state.layer: window_rotary if model_layer.state.window else full_rotary
        for model_layer in model_layers
    }, notes


def _read_head_sizes(name: str, fields: Mapping[str, Any], is_window: bool) -> tuple[int, int]:
    """Return the values of a head of K and of V; 0 where nothing tells."""
    embedding_length = gguf.parse_positive_int(fields.get(f"{name}.embedding_length"))
    heads = fields.get(f"{name}.attention.head_count")
    num_heads = gguf.parse_positive_int(
        heads[0] if isinstance(heads, list) and heads else heads
    )  # as llama.cpp: the first layer's
    default_size = embedding_length // num_heads if embedding_length and num_heads else 0
    sizes = [
        gguf.parse_positive_int(fields.get(f"{name}.attention.{part}_length")) or default_size
        for part in ("key", "value")
    ]
    if is_window:
        window_sizes = [
            gguf.parse_positive_int(fields.get(f"{name}.attention.{part}_length_swa")) for part in ("key", "value")
        ]
        sizes = [own_size or full_size for own_size, full_size in zip(window_sizes, sizes, strict=True)]
    key, value = sizes
    return key, value or key


def _make_layer_state(layer: int, is_window: bool, first_shared: int, window: int | None) -> LayerStateInfo:
    state = LayerStateInfo(layer=layer, kind="window", window=window) if is_window else LayerStateInfo(layer=layer)
    if layer < first_shared:
        return state
    # llama.cpp: the last layer of the same kind that has its own, of which the last one has full attention
    return replace(state, kind="shared", shared_with=max(0, first_shared - (2 if is_window else 1)), included=False)


def list_unshared_layers(layers: tuple[ModelLayer, ...], *, is_window: bool) -> list[ModelLayer]:
    """Return the layers that have K and V of their own, with or without a window."""
    kind = "window" if is_window else "full"
    return [layer for layer in layers if layer.state.kind == kind and layer.kv_heads]


def require_model_layers(path: str, layers: tuple[ModelLayer, ...] | None) -> tuple[ModelLayer, ...]:
    """Return the layers; `SourceError` where the header does not tell them."""
    if layers is None:
        raise SourceError(f"{path}: does not say which layers have a sliding window")
    return layers
