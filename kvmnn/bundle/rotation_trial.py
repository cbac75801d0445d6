"""How K of a source was rotated, where nobody says it."""

from __future__ import annotations

from dataclasses import replace

from .. import dense, dtypes
from ..arrays.layers import locate_array
from ..arrays.source import Source
from ..errors import SourceError
from .dense_pieces import DenseOptions, plan_arrays

_NUM_TRIAL_LAYERS = 2
"""Layers that are tried: all of a model are rotated alike, and the first show it best."""

_PLACEHOLDER_ROTARY = dense.RopeConfig(dims=2)


def search_layer_rope(source: Source, options: DenseOptions | None = None) -> dict[int, dense.RopeConfig | None]:
    """Return how K of each layer was rotated, found by trial for layers with a window and for the others.

    Models with sliding windows rotate K of the two kinds by different frequencies. Empty where all layers are of one
    kind: `search_rope` is for those.

    Raises
    ------
    OptionError, KvmnnError
        As `search_rope`.
    """
    states = source.completeness.layers if source.completeness is not None else ()
    layers_by_kind: dict[bool, list[int]] = {}
    for state in states:
        if state.included and state.kind in ("full", "window"):
            layers_by_kind.setdefault(state.kind == "window", []).append(state.layer)
    if len(layers_by_kind) < 2:
        return {}
    rotary_by_layer: dict[int, dense.RopeConfig | None] = {}
    for layers in layers_by_kind.values():
        names = [name for name in source if _locate_layer(source, name) in layers]
        rotary = search_rope(replace(source, arrays=[source[name] for name in names]), options) if names else None
        rotary_by_layer.update(dict.fromkeys(layers, rotary))
    return rotary_by_layer


def _locate_layer(source: Source, name: str) -> int | None:
    try:
        return locate_array(source[name], source.token_major)[1]
    except SourceError:
        return None


def search_rope(source: Source, options: DenseOptions | None = None) -> dense.RopeConfig | None:
    """What `kvmnn.dense.find_rotary` finds of K of the first layers, at the positions that the source says.

    Raises
    ------
    OptionError
        As `encode`: when no array is K or V whose axes are known; when `options` are not for these arrays.
    KvmnnError
        When an input is damaged.
    """
    options = options or DenseOptions()
    plans = plan_arrays(source, options)
    if any(plan.part == "key" and plan.shape[-1] < _PLACEHOLDER_ROTARY.dims for plan in plans.values()):
        return None
    plans = plan_arrays(source, replace(options, rotary=_PLACEHOLDER_ROTARY))  # K has positions then
    keys = sorted((plan.layer or 0, name) for name, plan in plans.items() if plan.part == "key")
    for _, name in keys[:_NUM_TRIAL_LAYERS]:
        plan = plans[name]
        for chunk in source[name].iter_chunks(plan.nbytes):
            elements = chunk.view(dtypes.parse_dtype(plan.dtype).numpy_dtype).reshape(plan.shape)
            rotary = dense.search_rope(
                elements if plan.axes == "htd" else elements.transpose(1, 0, 2), plan.positions, dtype=plan.dtype
            )
            if rotary is not None:
                return rotary
            break
    return None
