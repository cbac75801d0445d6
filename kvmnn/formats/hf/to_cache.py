"""K and V back as tensors of torch, for a ``DynamicCache`` of transformers. Neither is imported here."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ...arrays.completeness import LayerState, require_complete
from ...arrays.engine_cache import runs_of
from ...arrays.halves import HALVES, has_halves, select_half
from ...arrays.held_tokens import gaps, held_tokens
from ...arrays.kv_arrays import SaidAxes, read_kv, usual_axes
from ...arrays.layers import heads_hint
from ...arrays.own_order import for_other_engines
from ...arrays.source import Source
from ...arrays.window_layers import find_window_layers
from ...dtypes import Words
from ...errors import MissingDependencyError, OptionError, SourceError
from ...packed.cache_info import Ranges
from .. import opening
from ..noted_positions import noted_positions
from ..options import ReadOptions


def to_cache(
    source: Source | str | os.PathLike[str] | Any,
    *,
    device: Any = None,
    pairs: bool = False,
    **reading: Any,
) -> Any:
    """K and V of every layer as tensors ``[batch, kv_head, token, head_dim]``, bit for bit: bf16 as torch.bfloat16.

    K of a llama.cpp cache that surely lies in another order is brought into that of transformers, unless
    `Source.undone` says otherwise. A warning says so, and where nothing tells the order; another one where a cache
    lacks tokens of its text (an evicted one), or has them in another order, and nothing that is returned says so.

    Parameters
    ----------
    source
        What `kvmnn.open` gives, or takes.
    device
        Where the tensors go, as torch takes it; None leaves them on the CPU.
    pairs
        Return the pairs even where transformers is loaded.
    **reading
        As in `kvmnn.open`, where `source` is what that takes: ``kv_heads``, ``model``, ``batch``, ``undo`` ...

    Returns
    -------
    A new ``transformers.DynamicCache`` where transformers is loaded, with layers of sliding windows where there are
    such (transformers 4.56 and later), or an ``EncoderDecoderCache`` of both halves. Otherwise, and with `pairs`, a
    tuple of (K, V) for each layer (of both halves (K, V, K, V)), which ``DynamicCache(...)`` of transformers 5 takes,
    and ``DynamicCache.from_legacy_cache`` of 4.x.

    Raises
    ------
    MissingDependencyError
        Where torch is not loaded: ``import torch`` first.
    IncompleteCacheError
        For a part of the model's state.
    SourceError
        For arrays that are not K and V of layers 0, 1, 2 ..., where nothing says which axis is the tokens', and for
        windows that have slid where transformers has no layers for them.
    OptionError
        For `reading` of a source that is open.

    Examples
    --------
    >>> cache = kvmnn.to_cache("prefix.frames/")
    >>> model(ids, past_key_values=cache)
    >>> cache = kvmnn.to_cache("chat.session", kv_heads=8)
    """
    torch = _loaded("torch")
    if torch is None:
        raise MissingDependencyError("to_cache makes tensors of torch, which is not loaded: import torch first")
    if not isinstance(source, Source):
        source = opening.open(source, ReadOptions(skip_unsupported=True), **reading)
    elif reading:
        raise OptionError(f"{' '.join(source.inputs)}: is open: {', '.join(reading)} say how to read what is not")
    transformers = None if pairs else _loaded("transformers")
    if has_halves(source):
        where = " ".join(source.inputs)
        decoder, encoder = (
            _make_cache(select_half(source, half, where), torch, transformers, device) for half in HALVES
        )
        if transformers is None:
            return tuple(first + second for first, second in zip(decoder, encoder, strict=True))
        return transformers.EncoderDecoderCache(decoder, encoder)
    require_complete(source.completeness, " ".join(source.inputs), "a cache of transformers")
    return _make_cache(source, torch, transformers, device)


def _make_cache(source: Source, torch: Any, transformers: Any, device: Any) -> Any:
    """A ``DynamicCache``, or pairs where `transformers` is None."""
    opened, notes = for_other_engines(source)
    for note in notes:
        warnings.warn(note, stacklevel=3)
    where, said = " ".join(opened.inputs), opened.engine_cache
    slid = find_window_layers(opened.completeness, held_tokens(opened))
    if said is not None and said.engine != "transformers" and not said.is_whole and not slid:
        warnings.warn(f"{where}: holds no beginning of a text, and a DynamicCache counts from 0: {said}", stacklevel=3)
    if opened.lossy:
        raise OptionError(f"{where}: K and V were made from int8: no model takes such a cache up again")
    letters = opened.axes or usual_axes(opened.arrays, token_major=opened.token_major)
    if opened.axes is None and (hint := heads_hint(opened)):
        warnings.warn(hint, stacklevel=3)
    kv = read_kv(where, opened.arrays, SaidAxes(letters, "as read", token_major=opened.token_major))
    states = {} if opened.completeness is None else {state.layer: state for state in opened.completeness.layers}
    _check_numbers(where, list(kv.layers), states, may_have_gaps=transformers is not None)
    found = {number: tuple(_tensor(torch, words, device) for words in pair) for number, pair in kv.layers.items()}
    held = _runs(opened, [keys.shape[2] for keys, _ in found.values()])
    runs = {number: held[place] for place, number in enumerate(found) if place in held}
    is_own = said is None or said.engine == "transformers"
    windows = {} if opened.cache else _windows(runs, states, any_tail=is_own)
    _check_windows(where, windows, states)
    sliding: Any = transformers and getattr(transformers.cache_utils, "DynamicSlidingWindowLayer", None)
    if said is None and (cut := gaps({n: each for n, each in runs.items() if sliding is None or n not in windows})):
        warnings.warn(f"{where}: holds no beginning of a text, and a DynamicCache counts from 0: {cut}", stacklevel=3)
    if transformers is None:
        return tuple(found.values())
    moved = [n for n, (tokens, seen) in windows.items() if seen > tokens]
    if moved and sliding is None:
        tokens, seen = windows[moved[0]]
        raise SourceError(
            f"{where}: layer {moved[0]} holds the last {tokens:,} tokens of {seen:,}, and the loaded transformers has "
            "no layer for that: expected 4.56 or later"
        )
    cache = transformers.DynamicCache()
    for number, (keys, values) in found.items():
        cache.update(keys, values, number)
    for number, (tokens, seen) in (windows if sliding is not None else {}).items():
        window = states[number].window if number in states else None
        layer = sliding(window or tokens + 1)  # with the token that looks back
        layer.update(*found[number])
        layer.cumulative_length = seen
        cache.layers[number] = layer
    return cache


def _check_numbers(where: str, numbers: list[int], states: Mapping[int, LayerState], *, may_have_gaps: bool) -> None:
    """Raise `SourceError` for layers that are missing, but for those that have no K and V of their own."""
    missing = sorted(set(range(max(numbers) + 1)) - set(numbers))
    shared = [number for number in missing if number in states and states[number].kind == "shared"]
    if missing and not (may_have_gaps and missing == shared):
        raise SourceError(f"{where}: holds layers {sorted(numbers)[:8]}: expected 0, 1, 2 ... without a gap")


def _check_windows(where: str, windows: Mapping[int, tuple[int, int]], states: Mapping[int, LayerState]) -> None:
    """Raise `SourceError` for a window that lacks tokens which the model would look back to."""
    for number, (tokens, seen) in windows.items():
        window = states[number].window if number in states else None
        if window is not None and tokens < min(window - 1, seen):
            raise SourceError(
                f"{where}: layer {number} has a window of {window:,} tokens and holds {tokens:,} of {seen:,}: expected "
                f"at least {min(window - 1, seen):,}"
            )


def _runs(source: Source, tokens: list[int]) -> dict[int, set[Ranges]]:
    """Where the tokens of each layer stand in the text, of every head; none where nothing says it."""
    held: list[set[Ranges]] = []
    if source.engine_cache is not None:
        held = [{runs} for runs in source.engine_cache.layer_runs or ()]
    elif source.cache is not None:
        held = [{layer.positions} for layer in source.cache.layers]
    elif (noted := noted_positions(source, tokens)) is not None:
        held = [set(map(runs_of, np.atleast_2d(positions))) for positions in noted.positions]
    return dict(enumerate(held or [{((0, each),)} for each in tokens]))


def _windows(
    held: Mapping[int, set[Ranges]], states: Mapping[int, LayerState], *, any_tail: bool
) -> dict[int, tuple[int, int]]:
    """Layers that have a window, and with `any_tail` that hold the last of more tokens: how many they hold, and saw."""
    alone = {n: next(iter(runs)) for n, runs in held.items() if len(runs) == 1}
    return {
        n: (runs[0][1], sum(runs[0]))
        for n, runs in alone.items()
        if len(runs) == 1 and ((any_tail and runs[0][0] > 0) or (n in states and states[n].kind == "window"))
    }


def _loaded(name: str) -> ModuleType | None:
    return sys.modules.get(name)


def _tensor(torch: Any, words: Words, device: Any) -> Any:
    """A tensor with memory of its own."""
    copied = np.array(words, order="C")  # always a copy: what is mapped is read-only
    if copied.dtype.kind == "u":
        tensor = torch.from_numpy(copied.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(copied)
    return tensor if device is None else tensor.to(device)
