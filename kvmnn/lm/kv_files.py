"""The cache of a model as arrays and files that encode, measure and pack read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..arrays.casting import CastStats
from ..arrays.layer_cache import LayerCache
from ..arrays.layers import LayerArray, format_array_name
from ..arrays.named_array import LazyArray, from_numpy
from ..bundle.beside import POSITIONS_NAME, TOKEN_IDS_NAME
from ..dtypes import PARTS, Part
from ..errors import KvmnnError
from ..files.output import DirectoryOutput
from ..formats import npy


def build_layer_arrays(caches: Sequence[LayerCache], dtype: str | None = None) -> tuple[list[LayerArray], CastStats]:
    """K and V of every layer by turns, as words of `dtype` (as they are by default), and what the cast changed.

    Raises
    ------
    KvmnnError
        For a layer without tokens, and for values that are finite and would not be so in fp16.
    """
    cast = CastStats(caches[0].dtype, dtype or caches[0].dtype)
    arrays: list[LayerArray] = []
    for cache in caches:
        if cache.tokens == 0:
            raise KvmnnError(f"layer {cache.layer}: the policy keeps no token of it, so there is nothing to write")
        for part, elements in zip(PARTS, (cache.keys, cache.values), strict=True):
            arrays.append(LayerArray(cache.layer, part, _build_array(cache.layer, part, elements, cast)))
    return arrays, cast


def write_layer_npy(arrays: Sequence[LayerArray], output: DirectoryOutput) -> list[str]:
    """``layer_<n>.key.npy`` and ``.value.npy``, ``[kv_head, token, head_dim]``; their names. The caller commits."""
    names = []
    for entry in arrays:
        name = f"{entry.array.name}.npy"
        file = output.open_file(name)
        npy.write_header(file, entry.array)
        for piece in entry.array.iter_chunks():
            file.write(piece.data)
        names.append(name)
    return names


def write_sidecars(
    output: DirectoryOutput, caches: Sequence[LayerCache], ids: Sequence[int], origin: Mapping[str, Any]
) -> None:
    """What the arrays do not say: ``positions.json`` with the true positions, ``token_ids.json`` with the text.

    Parameters
    ----------
    ids
        Every token that the model has seen, evicted ones included.
    origin
        Further fields of the first document: model, text, policy.
    """
    layers = [{"layer": cache.layer, "tokens": cache.tokens, "positions": cache.positions.tolist()} for cache in caches]
    document = {**origin, "tokens_seen": caches[0].tokens_seen, "layers": layers}
    output.open_file(TOKEN_IDS_NAME).write((json.dumps([int(token) for token in ids]) + "\n").encode())
    output.open_file(POSITIONS_NAME).write((json.dumps(document) + "\n").encode())


def _build_array(layer: int, part: Part, elements: npt.NDArray[Any], cast: CastStats) -> LazyArray:
    data = cast.cast(np.ascontiguousarray(elements).view(np.uint8).reshape(-1))
    target = dtypes.parse_dtype(cast.target)
    if cast.source != cast.target and target.numpy_dtype.kind == "f":
        num_overflowed = int(np.isinf(data.view(target.numpy_dtype)).sum() - np.isinf(elements).sum())
        if num_overflowed:
            raise KvmnnError(
                f"layer {layer}: {num_overflowed} of its {part}s are beyond fp16 (65504): dump them as fp32"
            )
    return from_numpy(format_array_name(layer, part), data.view(target.numpy_dtype).reshape(elements.shape))
