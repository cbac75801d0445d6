"""K and V out of a llama.cpp state file, as ``[kv_head, cell, head_dim]``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ... import dtypes
from ...arrays.layers import array_name
from ...arrays.named_array import NamedArray, UnsupportedArrayError
from ...arrays.source import Source
from ...errors import OptionError
from ...files.mapped import MappedFile, head_of
from ...text import count
from ..file_bytes import FileBytes
from ..options import EngineOptions, ReadOptions
from . import gguf
from .cache_choice import CachePart, check_rows, choose_caches, choose_cells, choose_stream
from .description import describe, list_notes, model_of
from .heads import Heads, find_heads
from .layer_numbers import CACHES, LayerNumbers, count_layers, find_completeness, number_layers
from .rows import Cells, cell_runs, head_runs
from .state import MAGICS, State, Stream, Tensor, parse


def is_state(path: str) -> bool:
    """Whether a file begins as state files do."""
    return head_of(path, 4) in MAGICS


def holds_state(file: MappedFile) -> bool:
    """The same of what was read from a stream."""
    return file.head(4) in MAGICS


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
    state, numbers = parse_state(file, options)
    caches = choose_caches(state, numbers, options.engine, file.label)
    stream = choose_stream(file.label, state, caches, options.engine)
    counts = count_layers(state)
    parts = [
        _part(file.label, state, cache, stream, numbers, options)
        for cache in caches
        if cache == caches[0] or state.caches[cache][min(stream, len(state.caches[cache]) - 1)].cells
    ]
    if len(parts) > 1:
        check_rows(file.label, [part.keys[0].row for part in parts], options)
    arrays = [
        (number, _array(file, tensor, number, part, options))
        for part in parts
        for tensor in _by_layer(part.stream)
        for number in [part.numbers[tensor.layer]]
    ]
    arrays.sort(key=lambda entry: entry[0])
    read_caches = [part.cache for part in parts if counts[part.cache]]
    return Source(
        [array for _, array in arrays],
        notes=list(list_notes(state, parts, numbers, options.engine)),
        engine_cache=describe(state, parts, options),
        completeness=find_completeness(state, numbers, read_caches),
    )


def parse_state(file: FileBytes, options: ReadOptions) -> tuple[State, LayerNumbers | None]:
    """Return the structure of a file, and the numbers of its layers where anything tells them; errors as `read`."""
    model = model_of(options)
    state = parse(file, model)
    if None not in (state.architecture, model) and state.architecture != model:
        raise OptionError(f"{file.label}: is of architecture {state.architecture!r}, the model of {model!r}")
    check_layers(file.label, state, options)
    return state, number_layers(file.label, state, options)


def check_layers(where: str, state: State, options: ReadOptions) -> None:
    """`OptionError` where the model that the options name has another number of layers than the file."""
    model = options.packed.model if options.packed else None
    held = count_layers(state)
    if model is None or state.recurrent_bytes or not all(held):
        return
    expected = gguf.cache_layers(model)
    if expected and sum(held) not in expected:
        has = " or ".join(map(str, sorted(expected)))
        raise OptionError(
            f"{where}: has K and V of {count(sum(held), 'layer')}, a cache of the model in {model} has {has}: it is of "
            "another model"
        )


def _part(
    where: str, state: State, cache: int, number: int, numbers: LayerNumbers | None, options: ReadOptions
) -> CachePart:
    streams = state.caches[cache]
    stream = streams[min(number, len(streams) - 1)]
    cells = choose_cells(where, stream, options.engine.sequence, is_window=cache == 1)
    undoing = options.engine.undo not in (None, (), ("none",))
    needed = undoing or not (options.engine.any_heads or _only_blocks(stream, options.engine))
    heads = heads_of(where, state, cache, stream, numbers, options, needed=needed)
    return CachePart(cache=cache, stream=stream, cells=cells, numbers=numbers_in(stream, cache, numbers), heads=heads)


def numbers_in(stream: Stream, cache: int, numbers: LayerNumbers | None) -> tuple[int, ...]:
    """Return the layer of the model that each layer of a stream is; its place where nothing tells."""
    held = sum(tensor.part == "key" for tensor in stream.tensors)
    found = () if numbers is None else numbers.by_cache[cache]
    return found if len(found) == held else tuple(range(held))


def heads_of(
    where: str,
    state: State,
    cache: int,
    stream: Stream,
    numbers: LayerNumbers | None,
    options: ReadOptions,
    *,
    needed: bool,
) -> Heads:
    """Return the kv heads of each layer of a stream; errors as `find_heads`."""
    model = None if numbers is None or numbers.model is None else numbers.model
    of = numbers_in(stream, cache, numbers)
    noted, counts = options.engine.noted_heads, count_layers(state)
    if noted is not None and len(noted) == sum(counts):  # of all caches, one behind the other
        noted = noted[sum(counts[:cache]) : sum(counts[: cache + 1])]
    return find_heads(
        where if len(state.caches) == 1 else f"{where}: {CACHES[cache]} cache",
        stream,
        options,
        needed=needed,
        model_layers=None if model is None else [model[number] for number in of],
        noted=noted,
    )


def _only_blocks(stream: Stream, options: EngineOptions) -> bool:
    """Whether all arrays are blocks of cells, which are of no head."""
    return options.blocks and all(tensor.type.is_block for tensor in stream.tensors)


def _by_layer(stream: Stream) -> Sequence[Tensor]:
    return sorted(stream.tensors, key=lambda tensor: (tensor.layer, tensor.part))


def _array(file: FileBytes, tensor: Tensor, number: int, part: CachePart, options: ReadOptions) -> NamedArray:
    kind, of = tensor.type, part.heads.of[tensor.layer]
    name = array_name(number, tensor.part)
    if kind.is_block and options.engine.blocks:
        return block_array(file, tensor, part.cells, name)
    if options.dtype not in (None, kind.dtype):
        raise UnsupportedArrayError(
            f"{file.label}: {name} holds {kind.name}, read as {kind.dtype}, not {options.dtype}"
        )
    return NamedArray(
        name=name,
        dtype=kind.dtype,
        shape=(of, part.cells.count, tensor.row // of),
        array_dtype=dtypes.by_name(kind.dtype).numpy.str,
        reader=partial(head_runs, file, tensor, of, part.cells),
    )


def block_array(file: FileBytes, tensor: Tensor, taken: Cells, name: str) -> NamedArray:
    """The blocks of a tensor as bytes, ``[cell, block, byte]``."""
    kind = tensor.type
    return NamedArray(
        name=name,
        dtype="fp16",
        shape=(taken.count, tensor.row // kind.values, kind.nbytes),
        array_dtype="|u1",
        reader=partial(cell_runs, file, tensor, taken),
    )
