"""One text of a batch without its padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import Indices, Positions
from .engine_cache import EngineCacheInfo, parse_layers
from .named_array import ArrayInfo, LazyArray
from .names import parse_conventional_name
from .strided import from_strided_view, read_elements

TOKEN_AXIS = -2  # of [batch, kv_head, token, head_dim], with or without the batch


def list_padding(cache: EngineCacheInfo | None) -> list[str]:
    """Say how many rows of each text of a batch are padding that its arrays contain, as one note; none without such."""
    if cache is None or not cache.has_padding:
        return []
    rows = [(number, cache.tokens - text.positions.size) for number, text in enumerate(cache.texts)]
    padded = [f"{number} of text {text}" for text, number in rows if number]
    listing = ", ".join(padded[:8]) + (f" and so on for {len(padded)} texts" if len(padded) > 8 else "")
    return [f"the arrays contain rows of padding: {listing} (--batch N takes one text without them)"]


def select_token_rows(elements: npt.NDArray[Any], rows: Indices) -> npt.NDArray[Any]:
    """Return rows of the token axis; a view where they follow each other."""
    if rows.size == elements.shape[TOKEN_AXIS]:
        return elements
    if rows.size and rows[-1] - rows[0] + 1 == rows.size:
        return elements[..., int(rows[0]) : int(rows[-1]) + 1, :]
    return np.take(elements, rows, TOKEN_AXIS)


def select_batch_text(
    arrays: Sequence[LazyArray], cache: EngineCacheInfo | None, text_index: int
) -> tuple[list[LazyArray], EngineCacheInfo | None]:
    """Take the tokens of one text out of arrays that were cut out of a batch.

    Parameters
    ----------
    arrays
        ``[kv_head, token, head_dim]`` of this text, padding included.
    cache
        What is known of the batch; None for nothing.
    text_index
        Which text of the batch.

    Returns
    -------
    The arrays without padding, and what is known of them: positions count the tokens of the text then.
    """
    if cache is None:
        return list(arrays), None
    if text_index >= len(cache.texts):
        return list(arrays), replace(cache, batch=1, texts=())
    batch_text = cache.texts[text_index]
    text_info = replace(cache, batch=1, texts=(), token_ids=batch_text.token_ids)
    if not cache.has_padding:
        return list(arrays), text_info
    layers = parse_layers(array.name for array in arrays)
    layer_positions = (
        cache.layer_positions if cache.layer_positions is not None and len(layers) == cache.layers else None
    )
    positions_by_layer = dict(zip(layers, layer_positions, strict=True)) if layer_positions is not None else {}
    rows: dict[int, Positions] = {}
    selected_arrays = []
    for array in arrays:
        parsed_name = parse_conventional_name(array.name)
        layer = -1 if parsed_name is None else parsed_name.layer
        array_positions = positions_by_layer.get(layer, cache.positions)
        array_positions = np.arange(array.shape[TOKEN_AXIS]) if array_positions is None else array_positions
        index = np.flatnonzero(np.isin(array_positions, batch_text.positions))
        rows[layer] = np.searchsorted(batch_text.positions, array_positions[index])
        shape = (*array.shape[:TOKEN_AXIS], index.size, array.shape[-1])
        info = ArrayInfo(name=array.name, dtype=array.dtype, shape=shape, array_dtype=array.array_dtype)
        selected_arrays.append(from_strided_view(info, partial(_read_token_rows, array, index)))
    row_positions = [rows[layer] for layer in sorted(rows)]
    is_uniform = len({tuple(positions.tolist()) for positions in row_positions}) == 1
    is_unpadded = all(positions.size == batch_text.positions.size for positions in row_positions)
    return selected_arrays, replace(
        text_info,
        tokens=max(positions.size for positions in row_positions),
        positions=row_positions[0] if is_uniform and not is_unpadded else None,
        layer_positions=None if is_uniform else tuple(row_positions),
    )


def _read_token_rows(array: LazyArray, index: Indices) -> npt.NDArray[Any]:
    return select_token_rows(read_elements(array), index)
