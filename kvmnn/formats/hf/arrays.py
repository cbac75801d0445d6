"""Tensors of a transformers cache as named arrays: the stored elements, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._util.dataclass import dataclass
from ..._util.text import pluralize
from ...arrays.array import ArrayInfo, LazyArray, UnsupportedArrayError, UntypedArrayError, from_strided_view
from ...arrays.axes import select_token_rows
from ...arrays.engine_cache import EngineCacheInfo, select_engine_layers
from ...arrays.layers import format_array_name
from ...arrays.opaque_state import OpaqueState
from ...arrays.source import Source
from ...dtypes import FLOAT8_NAMES, PARTS, Indices, Positions
from ...errors import KvmnnError, SourceError
from ..options import ReadOptions
from ..tensor_selection import (
    FLOAT8_FRAME_DTYPE,
    build_positions_sidecar,
    check_declared_dtype,
    resolve_dtype_name,
    select_tensors,
    validate_array,
)
from ..torch.tensors import ELEMENT_TYPES
from .cache_finder import AnyTensor, KVLayer, TransformersCache
from .token_rows import (
    BatchTexts,
    CacheRows,
    describe_states,
    find_batch_texts,
    find_token_rows,
    mark_evicted,
)

CACHE_AXES = "bhtd"
"""Axes of K and V in all caches of transformers: batch, kv_head, token, head_dim."""

_NUMPY_TYPE_BY_NAME = {
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
_DTYPE_BY_TYPE_NAME = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    **{name: name for name in FLOAT8_NAMES},
}


def make_tensor_array(
    label: str, name: str, tensor: AnyTensor, options: ReadOptions, row_indices: Indices | None = None
) -> LazyArray:
    """Wrap a tensor as an array in C order; with `row_indices` only those rows of the last axis but one."""
    label = f"{label}: {name}"
    type_name = tensor.type_name
    if type_name not in _NUMPY_TYPE_BY_NAME:
        raise UnsupportedArrayError(
            f"{label}: type {type_name} is not one that frames hold (float16, bfloat16, float32, float8_e4m3fn, "
            f"float8_e5m2)"
        )
    array_dtype = np.dtype(_NUMPY_TYPE_BY_NAME[type_name])
    check_declared_dtype(_DTYPE_BY_TYPE_NAME.get(type_name), options, label)
    if type_name not in _DTYPE_BY_TYPE_NAME and not (options.dtype or options.fallback_dtypes):
        raise UntypedArrayError(f"{label}: type {type_name} needs a dtype to be taken as (--dtype)")
    shape = tuple(tensor.shape)
    if row_indices is not None:
        shape = (*shape[:-2], row_indices.size, shape[-1])
    element_type = type_name if type_name in FLOAT8_NAMES else ""
    dtype = FLOAT8_FRAME_DTYPE if element_type else resolve_dtype_name(array_dtype, options, label)
    info = ArrayInfo(name=name, dtype=dtype, shape=shape, array_dtype=array_dtype.str, element=element_type)
    return validate_array(
        from_strided_view(info, partial(_read_token_elements, label, tensor, row_indices)), label, options
    )


def _read_token_elements(label: str, tensor: AnyTensor, row_indices: Indices | None) -> npt.NDArray[Any]:
    try:
        elements = tensor.read_elements_unbounded()
    except (KvmnnError, RuntimeError, TypeError, ValueError) as error:  # an unreadable device, a damaged storage
        raise SourceError(f"{label}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    return elements if row_indices is None else select_token_rows(elements, row_indices)


@dataclass(frozen=True, eq=False)
class _ResolvedCache:
    """A cache, the rows of it that are tokens, and the texts of its batch."""

    cache: TransformersCache
    rows: CacheRows
    batch_texts: BatchTexts


def make_cache_source(label: str, cache: TransformersCache, options: ReadOptions) -> Source:
    """Return K and V of every layer of a cache; pairs are unchanged if the caller specifies their axes.

    Rows without a token are left out: unused ones of buffers, and padding that all texts of a batch have.
    """
    has_pairs = cache.form in ("pairs", "legacy", "dict") and cache.cross_attention is None
    if options.axis_spec.axes is not None and has_pairs:
        entries = [
            (name, partial(make_tensor_array, label, name, tensor, options))
            for layer in cache.layers
            for name, tensor in _name_kv_tensors(layer)
        ]
        arrays, skipped = select_tensors(label, entries, options)
        return Source(arrays, skipped_arrays=skipped)
    half = "" if cache.cross_attention is None else "decoder"
    resolved = _resolve_cache(label, cache, has_halves=bool(half))
    entries = _list_entries(label, resolved, options, half)
    notes = _list_notes(resolved)
    if cache.cross_attention is not None:
        resolved_cross = _resolve_cache(label, cache.cross_attention, has_halves=False)
        entries += _list_entries(label, resolved_cross, options, "encoder")
        notes += _list_notes(resolved_cross)
    arrays, skipped = select_tensors(label, entries, options)
    source = Source(arrays, skipped_arrays=skipped, notes=notes, axes=CACHE_AXES)
    array_names = [name for name, _ in entries]
    if half:
        source.engine_cache = _describe_cache(resolved) if len(arrays) == len(array_names) else None
    else:
        source.engine_cache = select_engine_layers(_describe_cache(resolved), array_names, source)
    source.metadata = _build_positions_metadata(resolved.rows)
    source.completeness = describe_states(cache, resolved.rows)
    if not half:
        source.states = tuple(_iter_opaque_states(label, resolved))
    return source


def _iter_opaque_states(label: str, resolved: _ResolvedCache) -> Iterator[OpaqueState]:
    """Yield state of layers without K and V, for one text whose rows are all tokens: others may have another state."""
    cache, rows = resolved.cache, resolved.rows
    for layer, token_rows in zip(cache.layers, rows.layer_rows, strict=True):
        is_cut = token_rows.row_indices.size < layer.keys.shape[2] and not (layer.is_buffer or layer.is_window)
        if layer.keys.shape[0] != 1 or is_cut:
            return
    for other_layer in cache.other_layers:
        for name, tensor in other_layer.tensors:
            if element_type := ELEMENT_TYPES.get(tensor.type_name):
                yield OpaqueState(
                    layer=other_layer.number,
                    name=name,
                    dtype=tensor.type_name,
                    shape=tuple(tensor.shape),
                    nbytes=math.prod(tensor.shape) * element_type.itemsize,
                    reader=partial(_read_state_bytes, label, tensor),
                )


def _read_state_bytes(label: str, tensor: AnyTensor) -> bytes:
    elements = np.ascontiguousarray(_read_token_elements(label, tensor, None))
    return elements.astype(elements.dtype.newbyteorder("<"), copy=False).tobytes()


def _resolve_cache(label: str, cache: TransformersCache, *, has_halves: bool) -> _ResolvedCache:
    for layer in cache.layers:
        _check_shape(label, layer)
    rows = find_token_rows(cache)
    for layer, token_rows in zip(cache.layers, rows.layer_rows, strict=True):
        if token_rows.row_indices.size == 0:
            num_rows = layer.keys.shape[2]
            raise SourceError(
                f"{label}: layer {layer.number}: none of the {num_rows} rows of its buffers holds a token"
            )
    if rows.eviction_reason:
        return _ResolvedCache(cache, rows, BatchTexts())
    batch = int(cache.layers[0].keys.shape[0])
    is_exact = cache.num_seen is not None or any(layer.num_seen is not None for layer in cache.layers)
    batch_texts = find_batch_texts(label, cache, rows.num_tokens, batch, has_halves=has_halves, is_exact=is_exact)
    if batch_texts.eviction_reason:
        return _ResolvedCache(cache, mark_evicted(rows, batch_texts.eviction_reason), batch_texts)
    distinct_positions = {tuple(text.positions.tolist()) for text in batch_texts.entries}
    if len(distinct_positions) != 1 or len(batch_texts.entries[0].positions) == rows.num_tokens:
        return _ResolvedCache(cache, rows, batch_texts)
    return _drop_shared_padding(label, cache, rows, batch_texts)


def _drop_shared_padding(
    label: str, cache: TransformersCache, rows: CacheRows, batch_texts: BatchTexts
) -> _ResolvedCache:
    """Leave out the rows that are padding in all texts."""
    token_columns = batch_texts.entries[0].positions
    layer_rows = tuple(token_rows.select_columns(token_columns) for token_rows in rows.layer_rows)
    for layer, token_rows in zip(cache.layers, layer_rows, strict=True):
        if token_rows.row_indices.size == 0:
            raise SourceError(f"{label}: layer {layer.number} holds padding alone, as attention_mask tells")
    num_masked = rows.num_tokens - token_columns.size
    counts_text = f"{pluralize(token_columns.size, 'token')} of {pluralize(rows.num_tokens, 'row')}"
    note = f"{pluralize(num_masked, 'row')} of padding left out (attention_mask): {counts_text}"
    token_indices = np.arange(token_columns.size)
    entries = tuple(replace(text, positions=token_indices) for text in batch_texts.entries)
    return _ResolvedCache(
        cache,
        replace(rows, layer_rows=layer_rows, num_tokens=token_columns.size),
        BatchTexts(entries, [*batch_texts.notes, note]),
    )


def _name_kv_tensors(layer: KVLayer, half: str = "") -> list[tuple[str, AnyTensor]]:
    """Name K and V of a layer, of one half of an encoder-decoder cache ``layer_<n>.<half>.key``."""
    names = [f"layer_{layer.number}.{half}.{part}" if half else format_array_name(layer.number, part) for part in PARTS]
    return list(zip(names, (layer.keys, layer.values), strict=True))


def _list_entries(label: str, resolved: _ResolvedCache, options: ReadOptions, half_name: str) -> list[tuple[str, Any]]:
    entries = []
    for layer, rows in zip(resolved.cache.layers, resolved.rows.layer_rows, strict=True):
        row_indices = None if rows.row_indices.size == layer.keys.shape[2] else rows.row_indices
        entries += [
            (name, partial(make_tensor_array, label, name, tensor, options, row_indices))
            for name, tensor in _name_kv_tensors(layer, half_name)
        ]
    return entries


def _build_positions_metadata(rows: CacheRows) -> dict[str, str]:
    """Build the metadata that frames need of layers whose window has slid (docs/manifest.md)."""
    layer_positions = _collect_layer_positions(rows)
    if layer_positions is None:
        return {}
    return build_positions_sidecar(
        rows.num_tokens, [{"positions": positions.tolist()} for positions in layer_positions]
    )


def _collect_layer_positions(rows: CacheRows) -> list[Positions] | None:
    """Return the positions of the tokens of every layer.

    Returns None when all layers contain the first tokens, or when the positions of one are unknown.
    """
    layer_positions = [positions.positions for positions in rows.layer_rows if positions.positions is not None]
    if len(layer_positions) < len(rows.layer_rows) or all(
        positions[-1] + 1 == positions.size for positions in layer_positions
    ):
        return None
    return layer_positions


def _describe_cache(resolved: _ResolvedCache) -> EngineCacheInfo:
    """Describe the cache: class, layers and states."""
    cache, rows, text_entries = resolved.cache, resolved.rows, resolved.batch_texts.entries
    batch, _, _, head_dim = cache.layers[0].keys.shape
    head_dims = {item.shape[3] for layer in cache.layers for item in (layer.keys, layer.values)}
    kv_heads = tuple(int(layer.keys.shape[1]) for layer in cache.layers)
    positions = _collect_layer_positions(rows)
    is_uniform = positions is not None and len({tuple(item.tolist()) for item in positions}) == 1
    return EngineCacheInfo(
        engine=cache.engine,
        kind=cache.form,
        layers=len(cache.layers),
        kv_heads=kv_heads[0] if len({*kv_heads}) == 1 else None,
        layer_kv_heads=kv_heads if len({*kv_heads}) > 1 else (),
        head_dim=int(head_dim) if head_dims == {head_dim} else None,
        tokens=max(item.row_indices.size for item in rows.layer_rows),
        types=tuple(getattr(layer, name).type_name for name in ("keys", "values") for layer in cache.layers),
        batch=int(batch),
        positions=positions[0] if positions is not None and is_uniform else None,
        layer_positions=tuple(positions) if positions is not None and not is_uniform else None,
        positions_unknown=any(item.positions is None for item in rows.layer_rows),
        token_ids=text_entries[0].token_ids if text_entries and batch == 1 else None,
        texts=text_entries if batch > 1 else (),
        details={"class": cache.class_name},
    )


def _check_shape(label: str, layer: KVLayer) -> None:
    keys, values = tuple(layer.keys.shape), tuple(layer.values.shape)
    if len(keys) != len(CACHE_AXES) or keys[:3] != values[:3] or len(values) != len(CACHE_AXES):
        raise SourceError(
            f"{label}: layer {layer.number}: K is {list(keys)} and V {list(values)}: expected [batch, kv_head, token, "
            "head_dim] for both, with the same batch, heads and tokens"
        )
    if layer.keys.type_name != layer.values.type_name:
        raise SourceError(
            f"{label}: layer {layer.number}: K is {layer.keys.type_name} and V {layer.values.type_name}: expected one "
            "type"
        )


def _list_notes(resolved: _ResolvedCache) -> list[str]:
    cache, rows = resolved.cache, resolved.rows
    notes = []
    unused_layers = [other_layer.number for other_layer in cache.other_layers if not other_layer.state_names]
    if unused_layers:
        layers_text = ", ".join(map(str, unused_layers[:8])) + (" ..." if len(unused_layers) > 8 else "")
        notes.append(
            f"{pluralize(len(unused_layers), 'layer')} of {cache.class_name} without K and V left out: {layers_text}"
        )
    layer_pairs = list(zip(cache.layers, rows.layer_rows, strict=True))
    partly_filled = [
        (layer, token_rows)
        for layer, token_rows in layer_pairs
        if layer.is_buffer and token_rows.row_indices.size < layer.keys.shape[2]
    ]
    if partly_filled and not resolved.batch_texts.entries:
        layer, token_rows = partly_filled[0]
        notes.append(
            f"{cache.class_name}: of the {layer.keys.shape[2]:,} rows of a buffer {token_rows.row_indices.size:,} hold "
            "tokens; the others are no data"
        )
    slid_windows = [
        (layer, token_rows)
        for layer, token_rows in layer_pairs
        if layer.is_window and token_rows.positions is not None and token_rows.positions[0]
    ]
    if slid_windows:
        layer, token_rows = slid_windows[0]
        notes.append(
            f"layer {layer.number} holds the last {token_rows.row_indices.size:,} of {rows.num_tokens:,} tokens "
            f"(sliding window)" + (f", and so do {len(slid_windows) - 1} more" if len(slid_windows) > 1 else "")
        )
    return [*notes, *resolved.batch_texts.notes]
