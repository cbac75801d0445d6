"""Convert K and V to torch tensors for a ``DynamicCache`` of transformers, without importing either package."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ...arrays.completeness import LayerStateInfo, require_complete
from ...arrays.engine_cache import positions_to_runs
from ...arrays.engine_transforms import to_common_order
from ...arrays.kv_arrays import AxisHints, infer_conventional_axes, read_kv
from ...arrays.layers import MODEL_HALVES, has_halves, select_half, suggest_token_major
from ...arrays.positions import describe_gaps, find_window_layers, read_token_positions
from ...arrays.source import Source
from ...dtypes import Elements
from ...errors import MissingDependencyError, OptionError, SourceError
from ...packed.cache_info import PositionRuns
from .. import registry
from ..options import ReadOptions
from ..sidecars import read_positions_sidecar


def to_cache(
    source: Source | str | os.PathLike[str] | Any,
    *,
    device: Any = None,
    return_pairs: bool = False,
    **read_options: Any,
) -> Any:
    """Return K and V of every layer as tensors ``[batch, kv_head, token, head_dim]``, bit for bit: bf16 as
    torch.bfloat16.

    K of a llama.cpp cache that certainly has another element order is converted to that of transformers, unless
    `Source.inverted_transforms` is set. A warning reports this, and also an unknown order. Another warning reports a
    cache that lacks tokens of its text (an evicted one) or has them in another order, if the returned object does not
    show it.

    Parameters
    ----------
    source
        A result of `kvmnn.open`, or an argument of it.
    device
        Torch device of the tensors; None leaves them on the CPU.
    return_pairs
        Return the pairs even if transformers is loaded.
    **read_options
        As in `kvmnn.open`, if `source` is an argument of it: ``kv_heads``, ``model``, ``batch``, ``invert`` ...

    Returns
    -------
    A new ``transformers.DynamicCache`` where transformers is loaded, with layers of sliding windows where there are
    such (transformers 4.56 and later), or an ``EncoderDecoderCache`` of both halves. Otherwise, and with
    `return_pairs`, a tuple of (K, V) for each layer (of both halves (K, V, K, V)), which ``DynamicCache(...)`` of
    transformers 5 takes,
    and ``DynamicCache.from_legacy_cache`` of 4.x.

    Raises
    ------
    MissingDependencyError
        If torch is not imported: ``import torch`` first.
    IncompleteCacheError
        For a part of the model's state.
    SourceError
        For arrays that are not K and V of layers 0, 1, 2 ..., for an unknown token axis, and for windows that have slid
        if transformers has no layers for them.
    OptionError
        For `read_options` with a source that is already open.

    Examples
    --------
    >>> cache = kvmnn.to_cache("prefix.frames/")
    >>> model(ids, past_key_values=cache)
    >>> cache = kvmnn.to_cache("chat.session", kv_heads=8)
    """
    torch = _get_loaded_module("torch")
    if torch is None:
        raise MissingDependencyError("to_cache makes tensors of torch, which is not loaded: import torch first")
    if not isinstance(source, Source):
        source = registry.open(source, ReadOptions(skip_unsupported=True), **read_options)
    elif read_options:
        raise OptionError(f"{' '.join(source.inputs)}: is open: {', '.join(read_options)} say how to read what is not")
    transformers = None if return_pairs else _get_loaded_module("transformers")
    if has_halves(source):
        label = " ".join(source.inputs)
        decoder, encoder = (
            _make_cache(select_half(source, model_half, label), torch, transformers, device)
            for model_half in MODEL_HALVES
        )
        if transformers is None:
            return tuple(
                decoder_pair + encoder_pair for decoder_pair, encoder_pair in zip(decoder, encoder, strict=True)
            )
        return transformers.EncoderDecoderCache(decoder, encoder)
    require_complete(source.completeness, " ".join(source.inputs), "a cache of transformers")
    return _make_cache(source, torch, transformers, device)


def _make_cache(source: Source, torch: Any, transformers: Any, device: Any) -> Any:
    """Return a ``DynamicCache``, or pairs if `transformers` is None."""
    ordered_source, notes = to_common_order(source)
    for note in notes:
        warnings.warn(note, stacklevel=3)
    label, engine_cache = " ".join(ordered_source.inputs), ordered_source.engine_cache
    window_layers = find_window_layers(ordered_source.completeness, read_token_positions(ordered_source))
    is_foreign = engine_cache is not None and engine_cache.engine != "transformers"
    if engine_cache is not None and is_foreign and not engine_cache.is_contiguous_prefix and not window_layers:
        warnings.warn(
            f"{label}: holds no beginning of a text, and a DynamicCache counts from 0: {engine_cache}", stacklevel=3
        )
    axes = ordered_source.axes or infer_conventional_axes(ordered_source.arrays, token_major=ordered_source.token_major)
    if ordered_source.axes is None and (hint := suggest_token_major(ordered_source)):
        warnings.warn(hint, stacklevel=3)
    kv = read_kv(label, ordered_source.arrays, AxisHints(axes, "as read", token_major=ordered_source.token_major))
    completeness = ordered_source.completeness
    states = {state.layer: state for state in completeness.layers} if completeness is not None else {}
    _check_layer_numbers(label, list(kv.layers), states, may_have_gaps=transformers is not None)
    tensors_by_layer = {
        layer_number: tuple(_to_torch_tensor(torch, elements, device) for elements in pair)
        for layer_number, pair in kv.layers.items()
    }
    runs_by_index = _list_position_runs(ordered_source, [keys.shape[2] for keys, _ in tensors_by_layer.values()])
    runs_by_layer = {
        layer_number: runs_by_index[index]
        for index, layer_number in enumerate(tensors_by_layer)
        if index in runs_by_index
    }
    windows = {} if ordered_source.cache else _find_windows(runs_by_layer, states, include_tails=not is_foreign)
    _check_windows(label, windows, states)
    sliding_layer_class: Any = transformers and getattr(transformers.cache_utils, "DynamicSlidingWindowLayer", None)
    placed_windows = windows if sliding_layer_class is not None else {}
    runs_without_windows = {layer: runs for layer, runs in runs_by_layer.items() if layer not in placed_windows}
    if engine_cache is None and (gaps_text := describe_gaps(runs_without_windows)):
        warnings.warn(
            f"{label}: holds no beginning of a text, and a DynamicCache counts from 0: {gaps_text}", stacklevel=3
        )
    if transformers is None:
        return tuple(tensors_by_layer.values())
    slid_layers = [layer_number for layer_number, (num_tokens, num_seen) in windows.items() if num_seen > num_tokens]
    if slid_layers and sliding_layer_class is None:
        num_tokens, num_seen = windows[slid_layers[0]]
        raise SourceError(
            f"{label}: layer {slid_layers[0]} holds the last {num_tokens:,} tokens of {num_seen:,}, and the loaded "
            "transformers has no layer for that: expected 4.56 or later"
        )
    cache = transformers.DynamicCache()
    for layer_number, (keys, values) in tensors_by_layer.items():
        cache.update(keys, values, layer_number)
    for layer_number, (num_tokens, num_seen) in placed_windows.items():
        window = states[layer_number].window if layer_number in states else None
        layer = sliding_layer_class(window or num_tokens + 1)  # with the token that looks back
        layer.update(*tensors_by_layer[layer_number])
        layer.cumulative_length = num_seen
        cache.layers[layer_number] = layer
    return cache


def _check_layer_numbers(
    label: str, layer_numbers: list[int], states: Mapping[int, LayerStateInfo], *, may_have_gaps: bool
) -> None:
    """Raise `SourceError` for missing layers, except those without K and V of their own."""
    missing_layers = set(range(max(layer_numbers) + 1)) - set(layer_numbers)
    shared_layers = {layer for layer, state in states.items() if state.kind == "shared"}
    if missing_layers and not (may_have_gaps and missing_layers <= shared_layers):
        raise SourceError(f"{label}: holds layers {sorted(layer_numbers)[:8]}: expected 0, 1, 2 ... without a gap")


def _check_windows(label: str, windows: Mapping[int, tuple[int, int]], states: Mapping[int, LayerStateInfo]) -> None:
    """Raise `SourceError` for a window that lacks tokens which the model would attend to."""
    for layer_number, (num_tokens, num_seen) in windows.items():
        window = states[layer_number].window if layer_number in states else None
        if window is not None and num_tokens < min(window - 1, num_seen):
            raise SourceError(
                f"{label}: layer {layer_number} has a window of {window:,} tokens and holds {num_tokens:,} of "
                f"{num_seen:,}: expected at least {min(window - 1, num_seen):,}"
            )


def _list_position_runs(source: Source, token_counts: list[int]) -> dict[int, set[PositionRuns]]:
    """Return the text positions of the tokens of each layer, as runs for every head; empty if unknown."""
    head_runs_by_layer: list[set[PositionRuns]] = []
    if source.engine_cache is not None:
        head_runs_by_layer = [{runs} for runs in source.engine_cache.layer_position_runs or ()]
    elif source.cache is not None:
        head_runs_by_layer = [{layer.positions} for layer in source.cache.layers]
    elif (sidecar := read_positions_sidecar(source, token_counts)) is not None:
        head_runs_by_layer = [set(map(positions_to_runs, np.atleast_2d(positions))) for positions in sidecar.positions]
    return dict(enumerate(head_runs_by_layer or [{((0, num_tokens),)} for num_tokens in token_counts]))


def _find_windows(
    runs_by_layer: Mapping[int, set[PositionRuns]], states: Mapping[int, LayerStateInfo], *, include_tails: bool
) -> dict[int, tuple[int, int]]:
    """Return stored and seen tokens of layers with a window; `include_tails` adds layers with only the last tokens."""
    uniform_runs = {layer_number: next(iter(runs)) for layer_number, runs in runs_by_layer.items() if len(runs) == 1}
    return {
        layer_number: (runs[0][1], sum(runs[0]))
        for layer_number, runs in uniform_runs.items()
        if len(runs) == 1
        and ((include_tails and runs[0][0] > 0) or (layer_number in states and states[layer_number].kind == "window"))
    }


def _get_loaded_module(name: str) -> ModuleType | None:
    return sys.modules.get(name)


def _to_torch_tensor(torch: Any, elements: Elements, device: Any) -> Any:
    """Return a tensor that owns its memory."""
    array_copy = np.array(elements, order="C")  # always a copy: mapped memory is read-only
    if array_copy.dtype.kind == "u":
        tensor = torch.from_numpy(array_copy.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array_copy)
    return tensor if device is None else tensor.to(device)
