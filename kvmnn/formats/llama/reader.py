"""Read K and V of a llama.cpp state file, as ``[kv_head, cell, head_dim]`` or, for frames, as stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from ... import dtypes
from ..._util.text import pluralize
from ...arrays.array import LazyArray, UnsupportedArrayError
from ...arrays.layers import format_array_name
from ...arrays.source import Source
from ...errors import MissingOptionError, OptionError, SourceError
from ...files.mapped_file import MappedFile
from .. import passthrough
from ..base import FileBytes, FileFormat
from ..options import EngineOptions, ReadOptions
from ..passthrough import Region, is_smaller_by_fields, make_byte_array, make_field_array
from . import gguf
from .cache_selection import (
    CACHE_NAMES,
    CachePart,
    LayerHeads,
    LayerNumbers,
    check_row_widths,
    choose_caches,
    choose_cells,
    choose_stream,
    count_layers,
    find_completeness,
    find_heads,
    number_layers,
)
from .description import describe_state, iter_notes, read_model_architecture
from .row_reader import CellSelection, iter_cell_chunks, iter_head_chunks
from .state import MAGIC_BYTES, CacheStream, CacheTensor, LlamaState, parse_structure


def read(file: FileBytes, options: ReadOptions) -> Source:
    """K and V of the used cells of a stream, in the order of the cells; what the file says besides is described.

    Of a file with two caches both are read, where the model, or what llama.cpp assumes of its architecture, tells which
    layers they are; cells of layers with a sliding window are in the order of their positions.

    Parameters
    ----------
    file
        The whole file.
    options
        `EngineOptions` say which stream, and whether blocks stay blocks. Kv heads are those of `PackedOptions`: its
        geometry, or a ``.gguf`` file that is the model.

    Raises
    ------
    SourceError
        When the file is damaged or of a structure that is not known.
    OptionError
        When the file has no such stream or second cache, or the options say another geometry than the model has; and
        when nothing says which stream is meant, or of how many kv heads a row is.
    """
    state, layer_numbers = parse_state(file, options)
    caches = choose_caches(state, layer_numbers, options.engine, file.label)
    stream = choose_stream(file.label, state, caches, options.engine)
    counts = count_layers(state)
    parts = [
        _select_part(file.label, state, cache, stream, layer_numbers, options)
        for cache in caches
        if cache == caches[0] or state.caches[cache][min(stream, len(state.caches[cache]) - 1)].num_cells
    ]
    if len(parts) > 1:
        check_row_widths(file.label, [part.keys[0].row_values for part in parts], options)
    arrays = [
        (layer_number, _make_cache_array(file, tensor, layer_number, part, options))
        for part in parts
        for tensor in _sort_tensors(part.stream)
        for layer_number in [part.layer_numbers[tensor.layer]]
    ]
    arrays.sort(key=lambda entry: entry[0])
    read_caches = [part.cache for part in parts if counts[part.cache]]
    return Source(
        [array for _, array in arrays],
        notes=list(iter_notes(state, parts, layer_numbers, options.engine)),
        engine_cache=describe_state(state, parts, options),
        completeness=find_completeness(state, layer_numbers, read_caches),
    )


def parse_state(file: FileBytes, options: ReadOptions) -> tuple[LlamaState, LayerNumbers | None]:
    """Return the structure of a file, and the numbers of its layers where anything tells them; errors as `read`."""
    model = read_model_architecture(options)
    state = parse_structure(file, model)
    if None not in (state.architecture, model) and state.architecture != model:
        raise OptionError(f"{file.label}: is of architecture {state.architecture!r}, the model of {model!r}")
    check_layer_count(file.label, state, options)
    return state, number_layers(file.label, state, options)


def check_layer_count(label: str, state: LlamaState, options: ReadOptions) -> None:
    """`OptionError` where the model that the options name has another number of layers than the file."""
    model = options.packed.model if options.packed else None
    layer_counts = count_layers(state)
    if model is None or state.recurrent_bytes or not all(layer_counts):
        return
    expected_counts = gguf.list_cache_layer_counts(model)
    if expected_counts and sum(layer_counts) not in expected_counts:
        counts_text = " or ".join(map(str, sorted(expected_counts)))
        raise OptionError(
            f"{label}: has K and V of {pluralize(sum(layer_counts), 'layer')}, a cache of the model in {model} has "
            f"{counts_text}: it is of "
            "another model"
        )


def _select_part(
    label: str,
    state: LlamaState,
    cache: int,
    stream_index: int,
    layer_numbers: LayerNumbers | None,
    options: ReadOptions,
) -> CachePart:
    streams = state.caches[cache]
    stream = streams[min(stream_index, len(streams) - 1)]
    cells = choose_cells(label, stream, options.engine.sequence, is_window=cache == 1)
    is_inverting = options.engine.invert not in (None, (), ("none",))
    is_required = is_inverting or not (
        options.engine.allow_unknown_heads or _stores_only_blocks(stream, options.engine)
    )
    heads = find_stream_heads(label, state, cache, stream, layer_numbers, options, is_required=is_required)
    return CachePart(
        cache=cache,
        stream=stream,
        cells=cells,
        layer_numbers=list_layer_numbers(stream, cache, layer_numbers),
        heads=heads,
    )


def list_layer_numbers(stream: CacheStream, cache: int, layer_numbers: LayerNumbers | None) -> tuple[int, ...]:
    """Return the layer of the model that each layer of a stream is; its place where nothing tells."""
    num_layers = sum(tensor.part == "key" for tensor in stream.tensors)
    cache_numbers = () if layer_numbers is None else layer_numbers.by_cache[cache]
    return cache_numbers if len(cache_numbers) == num_layers else tuple(range(num_layers))


def find_stream_heads(
    label: str,
    state: LlamaState,
    cache: int,
    stream: CacheStream,
    layer_numbers: LayerNumbers | None,
    options: ReadOptions,
    *,
    is_required: bool,
) -> LayerHeads:
    """Return the kv heads of each layer of a stream; errors as `find_heads`."""
    model = None if layer_numbers is None or layer_numbers.model is None else layer_numbers.model
    layer_ids = list_layer_numbers(stream, cache, layer_numbers)
    recorded_heads, counts = options.engine.recorded_kv_heads, count_layers(state)
    if recorded_heads is not None and len(recorded_heads) == sum(counts):  # of all caches, one behind the other
        recorded_heads = recorded_heads[sum(counts[:cache]) : sum(counts[: cache + 1])]
    return find_heads(
        label if len(state.caches) == 1 else f"{label}: {CACHE_NAMES[cache]} cache",
        stream,
        options,
        is_required=is_required,
        model_layers=None if model is None else [model[number] for number in layer_ids],
        recorded_heads=recorded_heads,
    )


def _stores_only_blocks(stream: CacheStream, options: EngineOptions) -> bool:
    """Whether all arrays are blocks of cells, which are of no head."""
    return options.raw_blocks and all(tensor.type.is_block for tensor in stream.tensors)


def _sort_tensors(stream: CacheStream) -> Sequence[CacheTensor]:
    return sorted(stream.tensors, key=lambda tensor: (tensor.layer, tensor.part))


def _make_cache_array(
    file: FileBytes, tensor: CacheTensor, layer_number: int, part: CachePart, options: ReadOptions
) -> LazyArray:
    ggml_type, num_heads = tensor.type, part.heads.by_layer[tensor.layer]
    name = format_array_name(layer_number, tensor.part)
    if ggml_type.is_block and options.engine.raw_blocks:
        return make_block_array(file, tensor, part.cells, name)
    if options.dtype not in (None, ggml_type.dtype):
        raise UnsupportedArrayError(
            f"{file.label}: {name} holds {ggml_type.name}, read as {ggml_type.dtype}, not {options.dtype}"
        )
    return LazyArray(
        name=name,
        dtype=ggml_type.dtype,
        shape=(num_heads, part.cells.num_cells, tensor.row_values // num_heads),
        array_dtype=dtypes.parse_dtype(ggml_type.dtype).numpy_dtype.str,
        reader=partial(iter_head_chunks, file, tensor, num_heads, part.cells),
    )


def make_block_array(file: FileBytes, tensor: CacheTensor, selection: CellSelection, name: str) -> LazyArray:
    """The blocks of a tensor as bytes, ``[cell, block, byte]``."""
    ggml_type = tensor.type
    return LazyArray(
        name=name,
        dtype="fp16",
        shape=(selection.num_cells, tensor.row_values // ggml_type.values_per_block, ggml_type.nbytes),
        array_dtype="|u1",
        reader=partial(iter_cell_chunks, file, tensor, selection),
    )


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
    source = passthrough.capture(
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


LLAMA_STATE = FileFormat(name=FORMAT_NAME, signatures=MAGIC_BYTES, read_file=read, capture=capture, read_original=read)
