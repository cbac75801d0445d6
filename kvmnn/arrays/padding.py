"""One text of a batch without its padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import Indices, Positions
from .engine_cache import EngineCache, layers_of
from .named_array import ArrayInfo, NamedArray
from .names import conventional
from .strided import strided, words_of

TOKEN_AXIS = -2  # of [batch, kv_head, token, head_dim], with or without the batch


def list_padding(cache: EngineCache | None) -> list[str]:
    """Say how many rows of each text of a batch are padding that its arrays contain, as one note; none without such."""
    if cache is None or not cache.has_padding:
        return []
    rows = [(number, cache.tokens - text.positions.size) for number, text in enumerate(cache.texts)]
    padded = [f"{number} of text {text}" for text, number in rows if number]
    listing = ", ".join(padded[:8]) + (f" and so on for {len(padded)} texts" if len(padded) > 8 else "")
    return [f"the arrays contain rows of padding: {listing} (--batch N takes one text without them)"]


def take_rows(words: npt.NDArray[Any], rows: Indices) -> npt.NDArray[Any]:
    """Return rows of the token axis; a view where they follow each other."""
    if rows.size == words.shape[TOKEN_AXIS]:
        return words
    if rows.size and rows[-1] - rows[0] + 1 == rows.size:
        return words[..., int(rows[0]) : int(rows[-1]) + 1, :]
    return np.take(words, rows, TOKEN_AXIS)


def select_text(
    arrays: Sequence[NamedArray], cache: EngineCache | None, text: int
) -> tuple[list[NamedArray], EngineCache | None]:
    """Take the tokens of one text out of arrays that were cut out of a batch.

    Parameters
    ----------
    arrays
        ``[kv_head, token, head_dim]`` of this text, padding included.
    cache
        What is known of the batch; None for nothing.
    text
        Which text of the batch.

    Returns
    -------
    The arrays without padding, and what is known of them: positions count the tokens of the text then.
    """
    if cache is None:
        return list(arrays), None
    if text >= len(cache.texts):
        return list(arrays), replace(cache, batch=1, texts=())
    chosen = cache.texts[text]
    described = replace(cache, batch=1, texts=(), token_ids=chosen.token_ids)
    if not cache.has_padding:
        return list(arrays), described
    layers = layers_of(array.name for array in arrays)
    known = cache.layer_positions if cache.layer_positions is not None and len(layers) == cache.layers else None
    by_layer = dict(zip(layers, known, strict=True)) if known is not None else {}
    rows: dict[int, Positions] = {}
    taken = []
    for array in arrays:
        name = conventional(array.name)
        layer = -1 if name is None else name.layer
        places = by_layer.get(layer, cache.positions)
        places = np.arange(array.shape[TOKEN_AXIS]) if places is None else places
        index = np.flatnonzero(np.isin(places, chosen.positions))
        rows[layer] = np.searchsorted(chosen.positions, places[index])
        shape = (*array.shape[:TOKEN_AXIS], index.size, array.shape[-1])
        info = ArrayInfo(name=array.name, dtype=array.dtype, shape=shape, array_dtype=array.array_dtype)
        taken.append(strided(info, partial(_rows_of, array, index)))
    placed = [rows[layer] for layer in sorted(rows)]
    same = len({tuple(each.tolist()) for each in placed}) == 1
    starts = all(each.size == chosen.positions.size for each in placed)
    return taken, replace(
        described,
        tokens=max(each.size for each in placed),
        positions=placed[0] if same and not starts else None,
        layer_positions=None if same else tuple(placed),
    )


def _rows_of(array: NamedArray, index: Indices) -> npt.NDArray[Any]:
    return take_rows(words_of(array), index)
