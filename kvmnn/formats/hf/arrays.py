"""Tensors of a cache of transformers as named arrays: their own words, in bounded memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays.engine_cache import EngineCache, of_part
from ...arrays.layers import array_name
from ...arrays.named_array import ArrayInfo, NamedArray, UnsupportedArrayError, UntypedArrayError
from ...arrays.opaque_state import OpaqueState
from ...arrays.padding import take_rows
from ...arrays.source import BESIDE_KEY, Source
from ...arrays.strided import strided
from ...bundle.beside import POSITIONS, to_json
from ...dtypes import FLOAT8_NAMES, PARTS, Indices, Part, Positions
from ...errors import KvmnnError, SourceError
from ...text import count
from ..options import ReadOptions
from ..reading import FLOAT8_WORDS, check_own_type, checked, dtype_name, select
from ..torch.tensors import ELEMENT_TYPES
from .batch_texts import Texts, find_texts
from .cache_states import describe_states
from .objects import AnyTensor, Cache, Layer
from .token_rows import CacheRows, TokenRows, find_rows, without_evicted

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
    **dict.fromkeys(FLOAT8_NAMES, "|u1"),
}
_SELF_SAID = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", **{name: name for name in FLOAT8_NAMES}}


def tensor_array(
    where: str, name: str, tensor: AnyTensor, options: ReadOptions, rows: Indices | None = None
) -> NamedArray:
    """A tensor as an array in C order; with `rows` only those of the last axis but one.

    Raises
    ------
    UnsupportedArrayError
        For a type that frames do not hold, and an empty tensor.
    """
    where = f"{where}: {name}"
    kind = tensor.type_name
    if kind not in _NUMPY:
        raise UnsupportedArrayError(
            f"{where}: type {kind} is not one that frames hold (float16, bfloat16, float32, float8_e4m3fn, float8_e5m2)"
        )
    array_dtype = np.dtype(_NUMPY[kind])
    check_own_type(_SELF_SAID.get(kind), options, where)
    if kind not in _SELF_SAID and not (options.dtype or options.fallbacks):
        raise UntypedArrayError(f"{where}: type {kind} needs a dtype to be taken as (--dtype)")
    shape = tuple(tensor.shape)
    if rows is not None:
        shape = (*shape[:-2], rows.size, shape[-1])
    element = kind if kind in FLOAT8_NAMES else ""
    dtype = FLOAT8_WORDS if element else dtype_name(array_dtype, options, where)
    info = ArrayInfo(name=name, dtype=dtype, shape=shape, array_dtype=array_dtype.str, element=element)
    return checked(strided(info, partial(_words, where, tensor, rows)), where, options)


def _words(where: str, tensor: AnyTensor, rows: Indices | None) -> npt.NDArray[Any]:
    try:
        words = tensor.view()
    except (KvmnnError, RuntimeError, TypeError, ValueError) as error:  # a device that gives nothing, a damaged storage
        raise SourceError(f"{where}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    return words if rows is None else take_rows(words, rows)


@dataclass(frozen=True, eq=False)
class _Read:
    """A cache with the rows that are tokens, and the texts of its batch."""

    cache: Cache
    rows: CacheRows
    texts: Texts


def cache_source(where: str, cache: Cache, options: ReadOptions) -> Source:
    """K and V of every layer of a cache; pairs as they are where the caller says how they lie.

    Rows that hold no token are left out: the unused ones of buffers, and padding that all texts of a batch have.

    Raises
    ------
    SourceError
        For K and V that do not have the shape ``[batch, kv_head, token, head_dim]``, or not the same tokens.
    """
    if options.laid.axes is not None and cache.form in ("pairs", "legacy", "dict") and cache.cross is None:
        entries = [
            (name, partial(tensor_array, where, name, tensor, options))
            for layer in cache.layers
            for name, tensor in _named(layer)
        ]
        arrays, skipped = select(where, entries, options)
        return Source(arrays, skipped=skipped)
    half = "" if cache.cross is None else "decoder"
    read = _read(where, cache, has_halves=bool(half))
    entries = _entries(where, read, options, half)
    notes = _notes(read)
    if cache.cross is not None:
        cross = _read(where, cache.cross, has_halves=False)
        entries += _entries(where, cross, options, "encoder")
        notes += _notes(cross)
    arrays, skipped = select(where, entries, options)
    found = Source(arrays, skipped=skipped, notes=notes, axes=AXES)
    names = [name for name, _ in entries]
    if half:
        found.engine_cache = _describe(read) if len(arrays) == len(names) else None
    else:
        found.engine_cache = of_part(_describe(read), names, found)
    found.metadata = _note_positions(read.rows)
    found.completeness = describe_states(cache, read.rows)
    if not half:
        found.states = tuple(_list_states(where, read))
    return found


def _list_states(where: str, read: _Read) -> Iterator[OpaqueState]:
    """State of layers without K and V, of one text whose rows are all tokens: it may not be that of some of them."""
    cache, rows = read.cache, read.rows
    for layer, each in zip(cache.layers, rows.layers, strict=True):
        is_cut = each.index.size < layer.keys.shape[2] and not (layer.is_buffer or layer.is_window)
        if layer.keys.shape[0] != 1 or is_cut:
            return
    for other in cache.others:
        for name, tensor in other.tensors:
            sizes = {kind.name: kind.itemsize for kind in ELEMENT_TYPES.values()}
            if tensor.type_name in sizes:
                yield OpaqueState(
                    layer=other.number,
                    name=name,
                    dtype=tensor.type_name,
                    shape=tuple(tensor.shape),
                    nbytes=math.prod(tensor.shape) * sizes[tensor.type_name],
                    reader=partial(_read_state, where, tensor),
                )


def _read_state(where: str, tensor: AnyTensor) -> bytes:
    words = np.ascontiguousarray(_words(where, tensor, None))
    return words.astype(words.dtype.newbyteorder("<"), copy=False).tobytes()


def _read(where: str, cache: Cache, *, has_halves: bool) -> _Read:
    for layer in cache.layers:
        _check_shape(where, layer)
    rows = find_rows(cache)
    for layer, each in zip(cache.layers, rows.layers, strict=True):
        if each.index.size == 0:
            raise SourceError(
                f"{where}: layer {layer.number}: none of the {layer.keys.shape[2]} rows of its buffers holds a token"
            )
    if rows.evicted:
        return _Read(cache, rows, Texts())
    batch = int(cache.layers[0].keys.shape[0])
    is_exact = cache.seen is not None or any(layer.seen is not None for layer in cache.layers)
    texts = find_texts(where, cache, rows.tokens, batch, has_halves=has_halves, is_exact=is_exact)
    if texts.evicted:
        return _Read(cache, without_evicted(rows, texts.evicted), texts)
    columns = {tuple(text.positions.tolist()) for text in texts.entries}
    if len(columns) != 1 or len(texts.entries[0].positions) == rows.tokens:
        return _Read(cache, rows, texts)
    return _without_padding(where, cache, rows, texts)


def _without_padding(where: str, cache: Cache, rows: CacheRows, texts: Texts) -> _Read:
    """Leave out the rows that are padding in all texts."""
    columns = texts.entries[0].positions
    layers = tuple(each.select(columns) for each in rows.layers)
    for layer, each in zip(cache.layers, layers, strict=True):
        if each.index.size == 0:
            raise SourceError(f"{where}: layer {layer.number} holds padding alone, as attention_mask tells")
    masked = rows.tokens - columns.size
    of = f"{count(columns.size, 'token')} of {count(rows.tokens, 'row')}"
    note = f"{count(masked, 'row')} of padding left out (attention_mask): {of}"
    places = np.arange(columns.size)
    entries = tuple(replace(text, positions=places) for text in texts.entries)
    return _Read(cache, replace(rows, layers=layers, tokens=columns.size), Texts(entries, [*texts.notes, note]))


def _named(layer: Layer, half: str = "") -> list[tuple[str, AnyTensor]]:
    named = []
    for part, tensor in zip(PARTS, (layer.keys, layer.values), strict=True):
        named.append((half_name(layer.number, half, part) if half else array_name(layer.number, part), tensor))
    return named


def half_name(layer: int, half: str, part: Part) -> str:
    """Return the name of K or V of a layer in one half of an encoder-decoder cache."""
    return f"layer_{layer}.{half}.{part}"


def _entries(where: str, read: _Read, options: ReadOptions, half: str) -> list[tuple[str, Any]]:
    return [
        (name, partial(tensor_array, where, name, tensor, options, _chosen(layer, rows)))
        for layer, rows in zip(read.cache.layers, read.rows.layers, strict=True)
        for name, tensor in _named(layer, half)
    ]


def _chosen(layer: Layer, rows: TokenRows) -> Indices | None:
    return None if rows.index.size == layer.keys.shape[2] else rows.index


def _note_positions(rows: CacheRows) -> dict[str, str]:
    """What frames need to know of layers whose window has slid (docs/manifest.md)."""
    found = _positions(rows)
    if found is None:
        return {}
    document = {"tokens_seen": rows.tokens, "layers": [{"positions": each.tolist()} for each in found]}
    return {BESIDE_KEY: to_json({POSITIONS: json.dumps(document).encode()})}


def _positions(rows: CacheRows) -> list[Positions] | None:
    """Positions of the tokens of every layer; None where all layers hold the first tokens, and where one is unknown."""
    found = [each.positions for each in rows.layers if each.positions is not None]
    if len(found) < len(rows.layers) or all(each[-1] + 1 == each.size for each in found):
        return None
    return found


def _describe(read: _Read) -> EngineCache:
    """What the cache says of itself."""
    cache, rows, texts = read.cache, read.rows, read.texts.entries
    batch, _, _, dims = cache.layers[0].keys.shape
    lengths = {each.shape[3] for layer in cache.layers for each in (layer.keys, layer.values)}
    heads = tuple(int(layer.keys.shape[1]) for layer in cache.layers)
    positions = _positions(rows)
    is_one = positions is not None and len({tuple(each.tolist()) for each in positions}) == 1
    return EngineCache(
        engine=cache.engine,
        kind=cache.form,
        layers=len(cache.layers),
        kv_heads=heads[0] if len({*heads}) == 1 else None,
        layer_kv_heads=heads if len({*heads}) > 1 else (),
        head_dim=int(dims) if lengths == {dims} else None,
        tokens=max(each.index.size for each in rows.layers),
        types=tuple(part.type_name for name in ("keys", "values") for part in _parts(cache, name)),
        batch=int(batch),
        positions=positions[0] if positions is not None and is_one else None,
        layer_positions=tuple(positions) if positions is not None and not is_one else None,
        positions_unknown=any(each.positions is None for each in rows.layers),
        token_ids=texts[0].token_ids if texts and batch == 1 else None,
        texts=texts if batch > 1 else (),
        details={"class": cache.kind},
    )


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


def _notes(read: _Read) -> list[str]:
    cache, rows = read.cache, read.rows
    notes = []
    unused = [other.number for other in cache.others if not other.states]
    if unused:
        which = ", ".join(map(str, unused[:8])) + (" ..." if len(unused) > 8 else "")
        notes.append(f"{count(len(unused), 'layer')} of {cache.kind} without K and V left out: {which}")
    pairs = list(zip(cache.layers, rows.layers, strict=True))
    cut = [(layer, each) for layer, each in pairs if layer.is_buffer and each.index.size < layer.keys.shape[2]]
    if cut and not read.texts.entries:
        layer, each = cut[0]
        notes.append(
            f"{cache.kind}: of the {layer.keys.shape[2]:,} rows of a buffer {each.index.size:,} hold tokens; the "
            "others are no data"
        )
    slid = [
        (layer, each) for layer, each in pairs if layer.is_window and each.positions is not None and each.positions[0]
    ]
    if slid:
        layer, each = slid[0]
        notes.append(
            f"layer {layer.number} holds the last {each.index.size:,} of {rows.tokens:,} tokens (sliding window)"
            + (f", and so do {len(slid) - 1} more" if len(slid) > 1 else "")
        )
    return [*notes, *read.texts.notes]
