"""K and V out of a llama.cpp state file, as ``[kv_head, cell, head_dim]``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ... import dtypes
from ...arrays.layers import format_array_name
from ...arrays.named_array import LazyArray, UnsupportedArrayError
from ...arrays.source import Source
from ...errors import OptionError
from ...files.mapped import MappedFile, read_head
from ...text import pluralize
from ..file_bytes import FileBytes
from ..options import EngineOptions, ReadOptions
from . import gguf
from .cache_choice import CachePart, check_row_widths, choose_caches, choose_cells, choose_stream
from .description import describe_state, iter_notes, read_model_architecture
from .heads import LayerHeads, find_heads
from .layer_numbers import CACHE_NAMES, LayerNumbers, count_layers, find_completeness, number_layers
from .rows import CellSelection, iter_cell_chunks, iter_head_chunks
from .state import MAGIC_BYTES, CacheStream, CacheTensor, LlamaState, parse_structure


def is_state_file(path: str) -> bool:
    """Whether a file begins as state files do."""
    return read_head(path, 4) in MAGIC_BYTES


def is_state_stream(file: MappedFile) -> bool:
    """The same of what was read from a stream."""
    return file.read_head(4) in MAGIC_BYTES


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
