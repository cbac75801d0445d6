"""A llama.cpp state file for frames: K and V of all layers, streams and caches as they lie there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ... import dtypes
from ...arrays.layers import format_array_name
from ...arrays.named_array import LazyArray, UnsupportedArrayError
from ...arrays.source import Source
from ...errors import MissingOptionError, SourceError
from ...files.mapped import MappedFile
from .. import keeping
from ..keeping import Region, is_smaller_by_fields, make_byte_array, make_field_array
from ..options import ReadOptions
from .cache_choice import CachePart
from .description import describe_state
from .layer_numbers import LayerNumbers, count_layers, find_completeness
from .reading import find_stream_heads, list_layer_numbers, parse_state
from .rows import CellSelection
from .state import CacheTensor, LlamaState

FORMAT_NAME = "llama-state"


def capture(file: MappedFile, options: ReadOptions) -> Source:
    """All K and V of a file, each ``[cell, value]``, V that is transposed ``[value, cell]``, blocks as their fields.

    With `EngineOptions.split_heads`, where kv heads are known and one stream of each cache holds cells, ``[cell,
    kv_head, head_dim]``.

    Names are ``layer_<n>.key`` and ``.value``, with ``stream_<n>.`` in front where several streams hold cells and
    ``window.`` for the second cache; fields of blocks add ``.scales``, ``.bits`` and ``.codes``. By heads, layers have
    the numbers of the model instead of ``window.``.

    Raises
    ------
    MissingOptionError
        By heads, where nothing tells which layers the second cache has.
    SourceError
        As `read`; kv heads need not be known.
    """
    state, layer_numbers = parse_state(file, options)
    parts = list(_iter_parts(file.label, state, layer_numbers, options))
    if not parts:
        raise SourceError(f"{file.label}: no cell is used, there is nothing to encode")
    is_one_text = len(parts) == len({part.cache for _, part in parts})
    by_heads = options.engine.split_heads and is_one_text and all(part.heads.is_known for _, part in parts)
    if by_heads and len(parts) > 1 and layer_numbers is None:
        raise MissingOptionError(
            f"{file.label}: dense streams of two caches need the layers of the model: say --model FILE.gguf (in Python "
            "model=)"
        )
    regions = [
        _make_region(
            file,
            tensor,
            part.stream.num_cells,
            format_array_name(part.layer_numbers[tensor.layer], tensor.part)
            if by_heads
            else f"{prefix}{format_array_name(tensor.layer, tensor.part)}",
            options,
            part.heads.by_layer[tensor.layer] if by_heads else None,
        )
        for prefix, part in parts
        for tensor in part.stream.tensors
    ]
    are_heads_known = all(part.heads.is_known for _, part in parts)
    kv_heads = tuple(count for _, part in parts for count in part.heads.by_layer)
    has_model_numbers = layer_numbers is not None and len(state.caches) > 1 and is_one_text
    source = keeping.capture(
        file,
        FORMAT_NAME,
        regions,
        kv_heads if are_heads_known and (is_one_text or len({*kv_heads}) == 1) else None,
        layer_numbers=tuple(layer_number for _, part in parts for layer_number in part.layer_numbers)
        if has_model_numbers
        else None,
    )
    nonempty_caches = [cache for cache, num_layers in enumerate(count_layers(state)) if num_layers]
    source.completeness = replace(
        find_completeness(state, layer_numbers, nonempty_caches), other=()
    )  # what K and V lack is in the file
    if by_heads:
        source.token_major = True
        source.engine_cache = describe_state(state, [part for _, part in parts], options)
    return source


def _iter_parts(
    label: str, state: LlamaState, layer_numbers: LayerNumbers | None, options: ReadOptions
) -> Iterator[tuple[str, CachePart]]:
    """Streams that hold cells, and what their names begin with."""
    for cache, streams in enumerate(state.caches):
        nonempty_streams = [stream_index for stream_index, stream in enumerate(streams) if stream.num_cells]
        for stream_index in nonempty_streams:
            prefix = f"stream_{stream_index}." if len(nonempty_streams) > 1 else ""
            stream = streams[stream_index]
            heads = find_stream_heads(label, state, cache, stream, layer_numbers, options, is_required=False)
            yield (
                ("window." if cache else "") + prefix,
                CachePart(
                    cache=cache,
                    stream=stream,
                    cells=CellSelection(stream.num_cells),
                    layer_numbers=list_layer_numbers(stream, cache, layer_numbers),
                    heads=heads,
                ),
            )


def _make_region(
    file: MappedFile,
    tensor: CacheTensor,
    num_cells: int,
    name: str,
    options: ReadOptions,
    num_heads: int | None,
) -> Region:
    ggml_type, num_blocks = tensor.type, tensor.row_values // tensor.type.values_per_block
    if options.dtype not in (None, ggml_type.dtype):
        raise UnsupportedArrayError(f"{file.label}: {name} holds {ggml_type.name}, not {options.dtype}")
    if not ggml_type.is_block:
        shape: tuple[int, ...] = (
            (tensor.row_values, num_cells) if tensor.is_transposed else (num_cells, tensor.row_values)
        )
        if num_heads and not tensor.is_transposed:
            shape = (num_cells, num_heads, tensor.row_values // num_heads)
        numpy_type = dtypes.parse_dtype(ggml_type.dtype).numpy_dtype.str
        reader = make_byte_array(file, name, shape, tensor.offset, tensor.nbytes).reader
        array = LazyArray(name=name, dtype=ggml_type.dtype, shape=shape, array_dtype=numpy_type, reader=reader)
        return Region(tensor.offset, tensor.nbytes, ((array, tensor.nbytes),))
    sizes = [size for _, size in ggml_type.fields]
    if not is_smaller_by_fields(file.view(tensor.offset, tensor.nbytes), sizes):
        array = make_byte_array(file, name, (num_cells, num_blocks, ggml_type.nbytes), tensor.offset, tensor.nbytes)
        return Region(tensor.offset, tensor.nbytes, ((array, tensor.nbytes),))
    arrays, field_offset = [], 0
    for field, size in ggml_type.fields:
        is_scale = field == "scales"
        field_shape = (num_cells, num_blocks, size // 2 if is_scale else size)
        block_range, field_range = (tensor.offset, tensor.nbytes), (field_offset, size, ggml_type.nbytes)
        arrays.append(
            (
                make_field_array(
                    file, f"{name}.{field}", field_shape, block_range, field_range, "<f2" if is_scale else "|u1"
                ),
                size,
            )
        )
        field_offset += size
    return Region(tensor.offset, tensor.nbytes, tuple(arrays))
