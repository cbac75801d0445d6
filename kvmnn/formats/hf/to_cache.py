"""K and V back as tensors of torch, for a ``DynamicCache`` of transformers. Neither is imported here."""

from __future__ import annotations

import os
import sys
import warnings
from types import ModuleType
from typing import Any

import numpy as np

from ...arrays.completeness import require_complete
from ...arrays.engine_cache import runs_of
from ...arrays.held_tokens import gaps
from ...arrays.kv_arrays import SaidAxes, read_kv, usual_axes
from ...arrays.layers import heads_hint
from ...arrays.own_order import for_other_engines
from ...arrays.source import Source
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
    A new ``transformers.DynamicCache`` where transformers is loaded, with layers of sliding windows where these have
    slid (transformers 4.56 and later); else, and with `pairs`, a tuple of (K, V) for each layer, which
    ``DynamicCache(...)`` of transformers 5 takes, and ``DynamicCache.from_legacy_cache`` of 4.x.

    Raises
    ------
    MissingDependencyError
        Where torch is not loaded: ``import torch`` first.
    IncompleteCacheError
        For a part of the model's state.
    SourceError
        For arrays that are not K and V of layers 0, 1, 2 ..., and where nothing says which axis is the tokens'.
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
    opened = source
    require_complete(opened.completeness, " ".join(opened.inputs), "a cache of transformers")
    opened, notes = for_other_engines(opened)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    where, said = " ".join(opened.inputs), opened.engine_cache
    if said is not None and said.engine != "transformers" and not said.is_whole:
        warnings.warn(f"{where}: holds no beginning of a text, and a DynamicCache counts from 0: {said}", stacklevel=2)
    if opened.lossy:
        raise OptionError(f"{where}: K and V were made from int8: no model takes such a cache up again")
    letters = opened.axes or usual_axes(opened.arrays, token_major=opened.token_major)
    if opened.axes is None and (hint := heads_hint(opened)):
        warnings.warn(hint, stacklevel=2)
    kv = read_kv(where, opened.arrays, SaidAxes(letters, "as read", token_major=opened.token_major))
    if list(kv.layers) != list(range(len(kv.layers))):
        raise SourceError(f"{where}: holds layers {sorted(kv.layers)[:8]}: expected 0, 1, 2 ... without a gap")
    found = tuple(tuple(_tensor(torch, words, device) for words in pair) for pair in kv.layers.values())
    transformers = None if pairs else _loaded("transformers")
    sliding: Any = transformers and getattr(transformers.cache_utils, "DynamicSlidingWindowLayer", None)
    runs = _runs(opened, [keys.shape[2] for keys, _ in found])
    windows = {} if sliding is None or opened.cache else _windows(runs)
    if said is None and (cut := gaps({n: each for n, each in runs.items() if n not in windows})):
        warnings.warn(f"{where}: holds no beginning of a text, and a DynamicCache counts from 0: {cut}", stacklevel=2)
    if transformers is None:
        return found
    cache = transformers.DynamicCache()
    for number, (keys, values) in enumerate(found):
        cache.update(keys, values, number)
    for number, (tokens, seen) in windows.items():
        layer = sliding(tokens + 1)  # with the token that looks back
        layer.update(*found[number])
        layer.cumulative_length = seen
        cache.layers[number] = layer
    return cache


def _runs(source: Source, tokens: list[int]) -> dict[int, set[Ranges]]:
    """Where the tokens of each layer stand in the text, of every head; none where nothing says it."""
    held: list[set[Ranges]] = []
    if source.engine_cache is not None:
        if source.engine_cache.engine == "transformers":
            held = [{runs} for runs in source.engine_cache.layer_runs or ()]
    elif source.cache is not None:
        held = [{layer.positions} for layer in source.cache.layers]
    elif (noted := noted_positions(source, tokens)) is not None:
        held = [set(map(runs_of, np.atleast_2d(positions))) for positions in noted.positions]
    return dict(enumerate(held))


def _windows(held: dict[int, set[Ranges]]) -> dict[int, tuple[int, int]]:
    """Layers that hold the last of more tokens: how many they hold, and have seen."""
    alone = {n: next(iter(runs)) for n, runs in held.items() if len(runs) == 1}
    return {n: (runs[0][1], sum(runs[0])) for n, runs in alone.items() if len(runs) == 1 and runs[0][0] > 0}


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
