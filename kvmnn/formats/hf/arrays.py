"""Tensors of a cache of transformers as named arrays: their own words, in bounded memory."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays.engine_cache import EngineCache, of_part
from ...arrays.layers import array_name
from ...arrays.named_array import ArrayInfo, NamedArray, UnsupportedArrayError, UntypedArrayError
from ...arrays.source import BESIDE_KEY, Source
from ...arrays.strided import strided
from ...bundle.beside import POSITIONS, to_json
from ...dtypes import PARTS, Positions
from ...errors import KvmnnError, SourceError
from ...text import count
from ..options import ReadOptions
from ..reading import check_own_type, checked, dtype_name, select
from .layers import AnyTensor, Cache, Layer

AXES = "bhtd"
"""Of K and V in every cache of transformers: batch, kv_head, token, head_dim."""

_NUMPY = {
    "float16": "<f2",
    "bfloat16": "<u2",
    "float32": "<f4",
    "int16": "<i2",
    "uint16": "<u2",
    "int32": "<i4",
    "uint32": "<u4",
    "uint8": "|u1",
}
_SELF_SAID = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def tensor_array(where: str, name: str, tensor: AnyTensor, options: ReadOptions, rows: int | None = None) -> NamedArray:
    """A tensor as an array in C order; with `rows` only that many of the last axis but one.

    Raises
    ------
    UnsupportedArrayError
        For a type that frames do not hold, and an empty tensor.
    """
    where = f"{where}: {name}"
    kind = tensor.type_name
    if kind not in _NUMPY:
        raise UnsupportedArrayError(f"{where}: type {kind} is not one that frames hold (float16, bfloat16, float32)")
    array_dtype = np.dtype(_NUMPY[kind])
    check_own_type(_SELF_SAID.get(kind), options, where)
    if kind not in _SELF_SAID and not (options.dtype or options.fallbacks):
        raise UntypedArrayError(f"{where}: type {kind} needs a dtype to be taken as (--dtype)")
    shape = tuple(tensor.shape)
    if rows is not None:
        shape = (*shape[:-2], rows, shape[-1])
    info = ArrayInfo(name=name, dtype=dtype_name(array_dtype, options, where), shape=shape, array_dtype=array_dtype.str)
    return checked(strided(info, partial(_words, where, tensor, rows)), where)


def _words(where: str, tensor: AnyTensor, rows: int | None) -> npt.NDArray[Any]:
    try:
        words = tensor.view()
    except (KvmnnError, RuntimeError, TypeError, ValueError) as error:  # a device that gives nothing, a damaged storage
        raise SourceError(f"{where}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    return words if rows is None else words[..., :rows, :]


def cache_source(where: str, cache: Cache, options: ReadOptions) -> Source:
    """K and V of every layer of a cache; pairs as they are where the caller says how they lie.

    Raises
    ------
    SourceError
        For K and V that do not have the shape ``[batch, kv_head, token, head_dim]``, or not the same tokens.
    """
    entries = []
    others = options.laid.axes is not None and cache.form in ("pairs", "legacy", "dict")
    for layer in cache.layers:
        if not others:
            _check_shape(where, layer)
        for part, tensor in zip(PARTS, (layer.keys, layer.values), strict=True):
            name = array_name(layer.number, part)
            entries.append((name, partial(tensor_array, where, name, tensor, options, layer.valid)))
    arrays, skipped = select(where, entries, options)
    if others:
        return Source(arrays, skipped=skipped)
    found = Source(arrays, skipped=skipped, notes=_notes(cache), axes=AXES)
    found.engine_cache = of_part(_described(cache), [name for name, _ in entries], found)
    found.metadata = _positions_beside(cache)
    return found


def _positions_beside(cache: Cache) -> dict[str, str]:
    """What frames need to know of layers whose window has slid (docs/manifest.md)."""
    ends, found = _places(cache)
    if all(end == each.size for end, each in zip(ends, found, strict=True)):
        return {}
    document = {"tokens_seen": max(ends), "layers": [{"positions": each.tolist()} for each in found]}
    return {BESIDE_KEY: to_json({POSITIONS: json.dumps(document).encode()})}


def _described(cache: Cache) -> EngineCache:
    """What the cache says of itself."""
    first = cache.layers[0]
    batch, _, _, dims = first.keys.shape
    tokens = _rows(first)
    heads = tuple(int(layer.keys.shape[1]) for layer in cache.layers)
    ids = cache.beside.get("input_ids")
    known = ids is not None and tuple(ids.shape) == (1, tokens) and ids.type_name in ("int64", "int32")
    positions, by_layer = _positions(cache)
    return EngineCache(
        engine=cache.engine,
        kind=cache.form,
        layers=len(cache.layers),
        kv_heads=heads[0] if len({*heads}) == 1 else None,
        layer_kv_heads=heads if len({*heads}) > 1 else (),
        head_dim=int(dims) if {layer.values.shape[3] for layer in cache.layers} == {dims} else None,
        tokens=max(map(_rows, cache.layers)),
        types=tuple(part.type_name for part in (*_parts(cache, "keys"), *_parts(cache, "values"))),
        batch=int(batch),
        positions=positions,
        layer_positions=by_layer,
        token_ids=np.array(ids.view(), np.int64).reshape(-1) if ids is not None and known else None,
        details={"class": cache.kind},
    )


def _positions(cache: Cache) -> tuple[Positions | None, tuple[Positions, ...] | None]:
    """Of all layers, or of each where they differ; nothing where no window has slid: the arrays are all tokens then."""
    ends, found = _places(cache)
    if all(end == each.size for end, each in zip(ends, found, strict=True)):
        return None, None
    if len({(end, each.size) for end, each in zip(ends, found, strict=True)}) == 1:
        return found[0], None
    return None, tuple(found)


def _places(cache: Cache) -> tuple[list[int], list[Positions]]:
    """Of each layer how many tokens it has seen, and the positions of those it holds: the last."""
    ends = [max(_rows(layer), layer.seen or 0) for layer in cache.layers]
    return ends, [np.arange(end - _rows(layer), end) for layer, end in zip(cache.layers, ends, strict=True)]


def _parts(cache: Cache, name: str) -> list[AnyTensor]:
    return [getattr(layer, name) for layer in cache.layers]


def _check_shape(where: str, layer: Layer) -> None:
    keys, values = tuple(layer.keys.shape), tuple(layer.values.shape)
    if len(keys) != len(AXES) or keys[:3] != values[:3] or len(values) != len(AXES):
        raise SourceError(
            f"{where}: layer {layer.number}: K is {list(keys)} and V {list(values)}: expected [batch, kv_head, token, "
            "head_dim] for both, with the same batch, heads and tokens"
        )
    if layer.keys.type_name != layer.values.type_name:
        raise SourceError(
            f"{where}: layer {layer.number}: K is {layer.keys.type_name} and V {layer.values.type_name}: expected one "
            "type"
        )
    if layer.valid == 0:
        raise SourceError(f"{where}: layer {layer.number}: none of the {keys[2]} rows of its buffers holds a token")


def _notes(cache: Cache) -> list[str]:
    notes = []
    if cache.empty:
        which = ", ".join(map(str, cache.empty[:8])) + (" ..." if len(cache.empty) > 8 else "")
        notes.append(f"{count(len(cache.empty), 'layer')} of {cache.kind} without K and V left out: {which}")
    cut = [layer for layer in cache.layers if layer.valid is not None and layer.valid < layer.keys.shape[2]]
    if cut:
        first = cut[0]
        notes.append(
            f"{cache.kind}: of the {first.keys.shape[2]:,} rows of a buffer the first {first.valid:,} hold tokens; the "
            "others are no data"
        )
    slid = [layer for layer in cache.layers if layer.seen is not None and layer.seen > _rows(layer)]
    if slid:
        first = slid[0]
        notes.append(
            f"layer {first.number} holds the last {_rows(first):,} of {first.seen:,} tokens (sliding window)"
            + (f", and so do {len(slid) - 1} more" if len(slid) > 1 else "")
        )
    return notes


def _rows(layer: Layer) -> int:
    return layer.keys.shape[2] if layer.valid is None else layer.valid
