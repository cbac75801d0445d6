"""The cache of a model as arrays and files that encode, measure and pack read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..arrays.casting import Cast
from ..arrays.layer_cache import LayerCache
from ..arrays.layers import LayerArray, array_name
from ..arrays.named_array import NamedArray, in_memory
from ..bundle.beside import POSITIONS, TOKEN_IDS
from ..dtypes import PARTS, Part
from ..errors import KvmnnError
from ..files.output import DirectoryOutput
from ..formats import npy


def layer_arrays(caches: Sequence[LayerCache], dtype: str | None = None) -> tuple[list[LayerArray], Cast]:
    """K and V of every layer by turns, as words of `dtype` (as they are by default), and what the cast changed.

    Raises
    ------
    KvmnnError
        For a layer without tokens, and for values that are finite and would not be so in fp16.
    """
    cast = Cast(caches[0].dtype, dtype or caches[0].dtype)
    found: list[LayerArray] = []
    for cache in caches:
        if cache.tokens == 0:
            raise KvmnnError(f"layer {cache.layer}: the policy keeps no token of it, so there is nothing to write")
        for part, words in zip(PARTS, (cache.keys, cache.values), strict=True):
            found.append(LayerArray(cache.layer, part, _array(cache.layer, part, words, cast)))
    return found, cast


def write_npy(arrays: Sequence[LayerArray], output: DirectoryOutput) -> list[str]:
    """``layer_<n>.key.npy`` and ``.value.npy``, ``[kv_head, token, head_dim]``; their names. The caller commits."""
    names = []
    for entry in arrays:
        name = f"{entry.array.name}.npy"
        file = output.file(name)
        npy.write_header(file, entry.array)
        for piece in entry.array.pieces():
            file.write(piece.data)
        names.append(name)
    return names


def write_about(
    output: DirectoryOutput, caches: Sequence[LayerCache], ids: Sequence[int], about: Mapping[str, Any]
) -> None:
    """What the arrays do not say: ``positions.json`` with the true positions, ``token_ids.json`` with the text.

    Parameters
    ----------
    ids
        Every token that the model has seen, evicted ones included.
    about
        Further fields of the first document: model, text, policy.
    """
    layers = [{"layer": cache.layer, "tokens": cache.tokens, "positions": cache.positions.tolist()} for cache in caches]
    document = {**about, "tokens_seen": caches[0].tokens_seen, "layers": layers}
    output.file(TOKEN_IDS).write((json.dumps([int(token) for token in ids]) + "\n").encode())
    output.file(POSITIONS).write((json.dumps(document) + "\n").encode())


def _array(layer: int, part: Part, words: npt.NDArray[Any], cast: Cast) -> NamedArray:
    data = cast.run(np.ascontiguousarray(words).view(np.uint8).reshape(-1))
    target = dtypes.by_name(cast.target)
    if cast.source != cast.target and target.numpy.kind == "f":
        lost = int(np.isinf(data.view(target.numpy)).sum() - np.isinf(words).sum())
        if lost:
            raise KvmnnError(f"layer {layer}: {lost} of its {part}s are beyond fp16 (65504): dump them as fp32")
    return in_memory(array_name(layer, part), data.view(target.numpy).reshape(words.shape))
