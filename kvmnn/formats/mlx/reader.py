"""Read a prompt cache of mlx-lm: the valid tokens of every layer, or, for frames, its tensors with padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ... import dtypes
from ..._util.patterns import declare_pattern
from ..._util.text import pluralize
from ...arrays.array import Chunk, LazyArray, UnsupportedArrayError, rechunk
from ...arrays.completeness import Completeness
from ...arrays.engine_cache import BatchText, EngineCacheInfo
from ...arrays.layers import format_array_name
from ...arrays.source import Source
from ...dtypes import PARTS, Part
from ...errors import SourceError
from ...files.mapped_file import MappedFile
from .. import passthrough
from ..base import FileBytes, FileFormat
from ..options import ReadOptions
from ..passthrough import Region
from ..safetensors import TensorEntry
from ..tensor_selection import check_declared_dtype, format_dequantized_note
from .states import (
    PromptCacheLayer,
    PromptCacheStates,
    dequantize,
    describe_states,
    get_numpy_type,
    has_cache_entries,
    has_keys_and_values,
    read_layers,
)

ENGINE = "MLX"
_TYPE_NAME_BY_KIND = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_DTYPE_BY_KIND = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}


def read(file: FileBytes, options: ReadOptions) -> Source:
    """Read ``layer_<n>.key`` and ``.value``, ``[kv_head, token, head_dim]``, prefixed by a batch axis for several
    texts.

    The padding after the valid tokens is left out.

    Raises
    ------
    SourceError
        For a file that is damaged, or whose cache classes are all unsupported.
    """
    states = PromptCacheStates(file)
    layers = read_layers(states)
    arrays = [_make_part_array(states, layer, part, options) for layer in layers for part in PARTS]
    engine_cache = _describe_cache(states, layers, options)
    notes = [*_list_dequantized_notes(layers, arrays, engine_cache), *_list_padding_notes(states, layers)]
    return Source(arrays, notes=notes, engine_cache=engine_cache, completeness=describe_states(states, layers))


def _list_padding_notes(states: PromptCacheStates, layers: Sequence[PromptCacheLayer]) -> list[str]:
    """Return a note about rows that are padding in all texts of a batch and were left out."""
    num_padding_rows = max(layer.spans[0][0] for layer in layers)
    if not layers[0].text_lengths or not num_padding_rows:
        return []
    return [
        f"{pluralize(num_padding_rows, 'row')} of padding left out, which all texts of the batch have (left_padding)"
    ]


def _list_dequantized_notes(
    layers: Sequence[PromptCacheLayer], arrays: Sequence[LazyArray], engine_cache: EngineCacheInfo
) -> list[str]:
    """Return a note on the types that dequantised values were decoded from."""
    if not engine_cache.dequantised:
        return []
    quantized_layers = [layer for layer in layers if layer.bits]
    quantized_names = {format_array_name(layer.number, part) for layer in quantized_layers for part in PARTS}
    dequantized_arrays = [array for array in arrays if array.name in quantized_names]
    block_bytes = sum(
        (tensor.end - tensor.begin) // tensor.shape[2] * layer.num_tokens
        for layer in quantized_layers
        for tensor in (*layer.keys, *layer.values)
    )
    dtype = " and ".join(sorted({array.dtype for array in dequantized_arrays}))
    return [
        format_dequantized_note(
            engine_cache.dequantised, dtype, block_bytes, sum(array.nbytes for array in dequantized_arrays)
        )
    ]


def _get_part_tensors(layer: PromptCacheLayer, part: Part) -> tuple[TensorEntry, ...]:
    return layer.keys if part == "key" else layer.values


def _make_part_array(states: PromptCacheStates, layer: PromptCacheLayer, part: Part, options: ReadOptions) -> LazyArray:
    tensors, name = _get_part_tensors(layer, part), format_array_name(layer.number, part)
    first_tensor = tensors[0]
    batch, heads = first_tensor.shape[:2]
    dtype, reader = (
        _DTYPE_BY_KIND.get(first_tensor.kind, "fp16"),
        partial(_iter_valid_chunks, states, layer, first_tensor),
    )
    array_dtype, last_axis = dtypes.parse_dtype(dtype).numpy_dtype.str, first_tensor.shape[3]
    if layer.bits and options.engine.raw_blocks:  # codes as bytes, ``[kv_head, token, byte]``
        array_dtype, last_axis = "|u1", 4 * last_axis
    else:
        if layer.bits:
            dtype, last_axis = _DTYPE_BY_KIND[tensors[1].kind], last_axis * 32 // layer.bits
            array_dtype = dtypes.parse_dtype(dtype).numpy_dtype.str
            reader = partial(_iter_dequantized_chunks, states, layer, tensors)
        if options.dtype not in (None, dtype):
            raise UnsupportedArrayError(f"{states.file.label}: {name} holds {dtype} words, not {options.dtype}")
    shape = (heads, layer.num_tokens, last_axis)
    return LazyArray(
        name=name,
        dtype=dtype,
        shape=shape if batch == 1 else (batch, *shape),
        array_dtype=array_dtype,
        reader=reader,
    )


def _iter_valid_chunks(
    states: PromptCacheStates, layer: PromptCacheLayer, tensor: TensorEntry, chunk_bytes: int
) -> Iterator[Chunk]:
    """Iterate over the words of the valid tokens, head after head."""
    num_heads, capacity = tensor.shape[0] * tensor.shape[1], tensor.shape[2]
    begin, head_bytes = states.header.data_start + tensor.begin, (tensor.end - tensor.begin) // num_heads
    valid_bytes = head_bytes // capacity * layer.num_tokens
    if layer.spans != ((0, layer.num_tokens),):
        row_bytes = head_bytes // capacity
        span_views = (
            states.file.view(begin + head * head_bytes + first_row * row_bytes, (end_row - first_row) * row_bytes)
            for head in range(num_heads)
            for first_row, end_row in layer.spans
        )
        yield from rechunk(span_views, chunk_bytes, num_heads * valid_bytes)
        states.file.release_pages(begin, tensor.end - tensor.begin)
        return
    if valid_bytes == head_bytes:
        yield from states.file.iter_chunks(begin, tensor.end - tensor.begin, chunk_bytes)
        return
    for start in range(0, num_heads * valid_bytes, chunk_bytes):
        head, head_offset = divmod(start, valid_bytes)
        if head_offset + min(chunk_bytes, num_heads * valid_bytes - start) <= valid_bytes:
            yield states.file.view(
                begin + head * head_bytes + head_offset, min(chunk_bytes, num_heads * valid_bytes - start)
            )
            continue
        chunk = np.empty(min(chunk_bytes, num_heads * valid_bytes - start), np.uint8)
        num_filled = 0
        while num_filled < chunk.size:
            head, head_offset = divmod(start + num_filled, valid_bytes)
            nbytes = min(valid_bytes - head_offset, chunk.size - num_filled)
            chunk[num_filled : num_filled + nbytes] = states.file.view(begin + head * head_bytes + head_offset, nbytes)
            num_filled += nbytes
        yield chunk
        del chunk
    states.file.release_pages(begin, tensor.end - tensor.begin)


def _iter_dequantized_chunks(
    states: PromptCacheStates, layer: PromptCacheLayer, tensors: tuple[TensorEntry, ...], chunk_bytes: int
) -> Iterator[Chunk]:
    """Iterate over the dequantised values of the valid tokens."""
    codes, scales, _ = tensors
    dtype = np.dtype(get_numpy_type(scales))
    code_row_bytes, scale_row_bytes = 4 * codes.shape[3], scales.shape[3] * dtype.itemsize
    value_row_bytes = codes.shape[3] * 32 // layer.bits * dtype.itemsize
    if chunk_bytes % value_row_bytes:
        num_rows = codes.shape[0] * codes.shape[1] * layer.num_tokens
        aligned_bytes = max(chunk_bytes // value_row_bytes, 1) * value_row_bytes
        aligned_chunks = _iter_dequantized_chunks(states, layer, tensors, aligned_bytes)
        yield from rechunk(aligned_chunks, chunk_bytes, num_rows * value_row_bytes)
        return
    chunk_readers = [
        _iter_valid_chunks(states, layer, tensor, chunk_bytes // value_row_bytes * row_bytes)
        for tensor, row_bytes in zip(tensors, (code_row_bytes, scale_row_bytes, scale_row_bytes), strict=True)
    ]
    for packed_codes, scale_bytes, bias_bytes in zip(*chunk_readers, strict=True):
        row_scales, row_biases = (data.view(dtype).reshape(-1, scales.shape[3]) for data in (scale_bytes, bias_bytes))
        values = dequantize(packed_codes.reshape(-1, code_row_bytes), row_scales, row_biases, layer.bits)
        yield values.reshape(-1).view(np.uint8)
        del values  # or it would live on while the next run is made


def _describe_cache(states: PromptCacheStates, layers: list[PromptCacheLayer], options: ReadOptions) -> EngineCacheInfo:
    has_equal_positions = all(np.array_equal(layer.positions, layers[0].positions) for layer in layers)
    type_names = [_format_type(layer, part) for part in PARTS for layer in layers]
    heads = tuple(_get_key_shape(layer)[1] for layer in layers)
    head_dims = {_get_key_shape(layer)[2] for layer in layers}
    group_types = sorted({_format_type(layer, part) for layer in layers if layer.bits for part in PARTS})
    return EngineCacheInfo(
        engine=ENGINE,
        kind="prompt cache",
        layers=len(layers),
        kv_heads=heads[0] if len({*heads}) == 1 else None,
        layer_kv_heads=heads if len({*heads}) > 1 else (),
        head_dim=head_dims.pop() if len(head_dims) == 1 else None,
        tokens=max(layer.num_tokens for layer in layers),
        types=tuple(type_names),
        batch=_get_key_shape(layers[0])[0],
        positions=layers[0].positions if has_equal_positions else None,
        layer_positions=None if has_equal_positions else tuple(layer.positions for layer in layers),
        texts=_list_batch_texts(layers[0]),
        dequantised=() if options.engine.raw_blocks else tuple(group_types),
        type_bits={
            # a scale and a bias for each group
            _format_type(layer, part): layer.bits
            + 16
            * dtypes.parse_dtype(_DTYPE_BY_KIND[_get_part_tensors(layer, part)[1].kind]).itemsize
            / layer.group_size
            for layer in layers
            if layer.bits
            for part in PARTS
        },
        unused_bytes=sum(nbytes for _, nbytes in _iter_unused_bytes(layers)),
        details=_build_details(states, layers),
    )


def _iter_unused_bytes(layers: Sequence[PromptCacheLayer]) -> Iterator[tuple[TensorEntry, int]]:
    """Yield the tensors of K and V, and how many of their bytes belong to rows without a valid token."""
    for layer in layers:
        for tensor in (*layer.keys, *layer.values):
            num_rows = tensor.shape[2]
            yield tensor, (tensor.end - tensor.begin) // num_rows * (num_rows - layer.num_tokens)


def _list_batch_texts(layer: PromptCacheLayer) -> tuple[BatchText, ...]:
    """Return the texts of a left-padded batch; empty if no text is padded."""
    if not layer.text_lengths or set(layer.text_lengths) == {layer.end_position}:
        return ()
    return tuple(BatchText(np.arange(layer.end_position - length, layer.end_position)) for length in layer.text_lengths)


def _get_key_shape(layer: PromptCacheLayer) -> tuple[int, int, int]:
    """Return batch, kv heads and head_dim of K."""
    batch, heads, _, last_axis = layer.keys[0].shape
    return batch, heads, last_axis * 32 // layer.bits if layer.bits else last_axis


def _format_type(layer: PromptCacheLayer, part: Part) -> str:
    if layer.bits:
        return f"{layer.bits} bits in groups of {layer.group_size}"
    return _TYPE_NAME_BY_KIND[_get_part_tensors(layer, part)[0].kind]


def _build_details(states: PromptCacheStates, layers: list[PromptCacheLayer]) -> dict[str, Any]:
    first_layer = layers[0]
    quantization_fields = {"bits": first_layer.bits, "group_size": first_layer.group_size} if first_layer.bits else {}
    return {
        "classes": list(dict.fromkeys(states.class_names)),
        "capacity": first_layer.keys[0].shape[2],
        **quantization_fields,
    }


FORMAT_NAME = "mlx-prompt-cache"

_MIN_ARRAY_AXES = 2
"""Minimum number of axes of a tensor that becomes an array; states with fewer are a few numbers."""
_ELEMENT_TYPES_BY_KIND = {
    "F16": ("fp16", "<f2"),
    "BF16": ("bf16", "<u2"),
    "F32": ("fp32", "<f4"),
    "U32": ("fp32", "<u4"),
}
_STATE_NAME_REGEX = declare_pattern(r"(\d{1,5})\.([01])(?:\.([012]))?")
_FIELD_NAMES = ("codes", "scales", "biases")


def capture(file: MappedFile, options: ReadOptions) -> Source:
    """Capture all tensors of fp16, bf16, fp32 and packed codes, for any class of cache.

    Names are ``layer_<n>.key`` and ``.value``, for quantised groups with ``.codes``, ``.scales`` and ``.biases``; a
    state other than K and V is named ``state_`` and its own name.

    Raises
    ------
    SourceError
        For a header that is damaged, and a file without such tensors.
    """
    states = PromptCacheStates(file)
    regions = []
    for tensor in states.header.tensors:
        if tensor.kind in _ELEMENT_TYPES_BY_KIND and len(tensor.shape) >= _MIN_ARRAY_AXES and 0 not in tensor.shape:
            declared_dtype = (
                None if tensor.kind == "U32" else _ELEMENT_TYPES_BY_KIND[tensor.kind][0]
            )  # codes are words of any type
            check_declared_dtype(declared_dtype, options, f"{file.label}: {tensor.name}")
            regions.append(_make_region(file, states, tensor))
    if not regions:
        raise SourceError(f"{file.label}: holds no K and no V, there is nothing to encode")
    try:
        layers = read_layers(states)
    except SourceError:
        layers = []
    unused_bytes = {_make_array_name(states, tensor.name): n for tensor, n in _iter_unused_bytes(layers) if n}
    source = passthrough.capture(file, FORMAT_NAME, regions, None, unused_bytes_by_array=unused_bytes)
    completeness = describe_states(states, layers)
    absent = [layer for layer in range(len(states.class_names)) if not _has_tensors(states, layer)]
    source.completeness = Completeness(
        layers=tuple(
            replace(state, included=False, location="without its K or V in the file")
            if state.layer in absent
            else replace(state, included=True)
            for state in completeness.layers
        )
    )
    return source


def _has_tensors(states: PromptCacheStates, layer_number: int) -> bool:
    """Return whether the file has K and V of a layer, if its class has any."""
    find_id = states.header.tensors.find_id
    return not has_keys_and_values(states, layer_number) or all(
        any(find_id(f"{layer_number}.{index}{suffix}") is not None for suffix in ("", ".0")) for index in (0, 1)
    )


def _make_region(file: MappedFile, states: PromptCacheStates, tensor: TensorEntry) -> Region:
    start = states.header.data_start
    dtype, code_dtype = _ELEMENT_TYPES_BY_KIND[tensor.kind]
    nbytes = tensor.end - tensor.begin
    array = LazyArray(
        name=_make_array_name(states, tensor.name),
        dtype=dtype,
        shape=tensor.shape,
        array_dtype=code_dtype if tensor.kind == "U32" else dtypes.parse_dtype(dtype).numpy_dtype.str,
        reader=partial(file.iter_chunks, start + tensor.begin, nbytes),
    )
    return Region(start + tensor.begin, nbytes, ((array, nbytes),))


def _make_array_name(states: PromptCacheStates, name: str) -> str:
    name_match = _STATE_NAME_REGEX.fullmatch(name)
    if name_match is None or not has_keys_and_values(states, int(name_match[1])):
        return f"state_{name}"
    field_suffix = f".{_FIELD_NAMES[int(name_match[3])]}" if name_match[3] else ""
    return format_array_name(int(name_match[1]), PARTS[int(name_match[2])]) + field_suffix


MLX_PROMPT_CACHE = FileFormat(
    name=FORMAT_NAME,
    extensions=(".safetensors",),
    check=has_cache_entries,
    read_file=read,
    capture=capture,
    read_original=read,
)
