"""How K of a source was rotated, where nobody says it."""

from __future__ import annotations

from dataclasses import replace

from .. import dense, dtypes
from ..arrays.layers import place_of
from ..arrays.source import Source
from ..errors import SourceError
from .dense_pieces import DenseOptions, plan_arrays

_LAYERS = 2
"""Layers that are tried: all of a model are rotated alike, and the first show it best."""

_ANY = dense.Rotary(dims=2)


def find_layer_rotations(source: Source, options: DenseOptions | None = None) -> dict[int, dense.Rotary | None]:
    """Return how K of each layer was rotated, found by trial for layers with a window and for the others.

    Models with sliding windows rotate K of the two kinds by different frequencies. Empty where all layers are of one
    kind: `find_rotary` is for those.

    Raises
    ------
    OptionError, KvmnnError
        As `find_rotary`.
    """
    states = source.completeness.layers if source.completeness is not None else ()
    kinds: dict[bool, list[int]] = {}
    for state in states:
        if state.included and state.kind in ("full", "window"):
            kinds.setdefault(state.kind == "window", []).append(state.layer)
    if len(kinds) < 2:
        return {}
    found: dict[int, dense.Rotary | None] = {}
    for layers in kinds.values():
        names = [name for name in source if _layer_in(source, name) in layers]
        rotary = find_rotary(replace(source, arrays=[source[name] for name in names]), options) if names else None
        found.update(dict.fromkeys(layers, rotary))
    return found


def _layer_in(source: Source, name: str) -> int | None:
    try:
        return place_of(source[name], source.token_major)[1]
    except SourceError:
        return None


def find_rotary(source: Source, options: DenseOptions | None = None) -> dense.Rotary | None:
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
    if any(plan.part == "key" and plan.shape[-1] < _ANY.dims for plan in plans.values()):
        return None
    plans = plan_arrays(source, replace(options, rotary=_ANY))  # K has positions then
    keys = sorted((plan.layer or 0, name) for name, plan in plans.items() if plan.part == "key")
    for _, name in keys[:_LAYERS]:
        plan = plans[name]
        for piece in source[name].pieces(plan.nbytes):
            words = piece.view(dtypes.by_name(plan.dtype).numpy).reshape(plan.shape)
            found = dense.find_rotary(
                words if plan.axes == "htd" else words.transpose(1, 0, 2), plan.positions, dtype=plan.dtype
            )
            if found is not None:
                return found
            break
    return None
