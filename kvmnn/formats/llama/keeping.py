"""A llama.cpp state file for frames: K and V of all layers, streams and caches as they lie there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ... import dtypes
from ...arrays.layers import array_name
from ...arrays.named_array import NamedArray, UnsupportedArrayError
from ...arrays.source import Source
from ...errors import MissingOptionError, SourceError
from ...files.mapped import MappedFile
from .. import keeping
from ..keeping import Region, byte_array, field_array, gains_by_fields
from ..options import ReadOptions
from .cache_choice import CachePart
from .description import describe
from .layer_numbers import LayerNumbers, count_layers, find_completeness
from .reading import heads_of, numbers_in, parse_state
from .rows import Cells
from .state import State, Tensor

NAME = "llama-state"


def keep(file: MappedFile, options: ReadOptions) -> Source:
    """All K and V of a file, each ``[cell, value]``, V that is transposed ``[value, cell]``, blocks as their fields.

    With `EngineOptions.by_heads`, where kv heads are known and one stream of each cache holds cells, ``[cell, kv_head,
    head_dim]``.

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
    state, numbers = parse_state(file, options)
    parts = list(_parts(file.label, state, numbers, options))
    if not parts:
        raise SourceError(f"{file.label}: no cell is used, there is nothing to encode")
    is_one_text = len(parts) == len({part.cache for _, part in parts})
    by_heads = options.engine.by_heads and is_one_text and all(part.heads.known for _, part in parts)
    if by_heads and len(parts) > 1 and numbers is None:
        raise MissingOptionError(
            f"{file.label}: dense streams of two caches need the layers of the model: say --model FILE.gguf (in Python "
            "model=)"
        )
    regions = [
        _region(
            file,
            tensor,
            part.stream.cells,
            array_name(part.numbers[tensor.layer], tensor.part)
            if by_heads
            else f"{prefix}{array_name(tensor.layer, tensor.part)}",
            options,
            part.heads.of[tensor.layer] if by_heads else None,
        )
        for prefix, part in parts
        for tensor in part.stream.tensors
    ]
    known = all(part.heads.known for _, part in parts)
    heads = tuple(count for _, part in parts for count in part.heads.of)
    of_model = numbers is not None and len(state.caches) > 1 and is_one_text
    kept = keeping.keep(
        file,
        NAME,
        regions,
        heads if known and (is_one_text or len({*heads}) == 1) else None,
        layer_numbers=tuple(number for _, part in parts for number in part.numbers) if of_model else None,
    )
    every = [cache for cache, layers in enumerate(count_layers(state)) if layers]
    kept.completeness = replace(find_completeness(state, numbers, every), other=())  # what K and V lack is in the file
    if by_heads:
        kept.token_major = True
        kept.engine_cache = describe(state, [part for _, part in parts], options)
    return kept


def _parts(
    where: str, state: State, numbers: LayerNumbers | None, options: ReadOptions
) -> Iterator[tuple[str, CachePart]]:
    """Streams that hold cells, and what their names begin with."""
    for cache, streams in enumerate(state.caches):
        used = [number for number, stream in enumerate(streams) if stream.cells]
        for number in used:
            prefix = f"stream_{number}." if len(used) > 1 else ""
            stream = streams[number]
            heads = heads_of(where, state, cache, stream, numbers, options, needed=False)
            yield (
                ("window." if cache else "") + prefix,
                CachePart(
                    cache=cache,
                    stream=stream,
                    cells=Cells(stream.cells),
                    numbers=numbers_in(stream, cache, numbers),
                    heads=heads,
                ),
            )


def _region(
    file: MappedFile,
    tensor: Tensor,
    cells: int,
    name: str,
    options: ReadOptions,
    heads: int | None,
) -> Region:
    kind, blocks = tensor.type, tensor.row // tensor.type.values
    if options.dtype not in (None, kind.dtype):
        raise UnsupportedArrayError(f"{file.label}: {name} holds {kind.name}, not {options.dtype}")
    if not kind.is_block:
        shape: tuple[int, ...] = (tensor.row, cells) if tensor.transposed else (cells, tensor.row)
        if heads and not tensor.transposed:
            shape = (cells, heads, tensor.row // heads)
        word = dtypes.by_name(kind.dtype).numpy.str
        runs = byte_array(file, name, shape, tensor.offset, tensor.nbytes).reader
        array = NamedArray(name=name, dtype=kind.dtype, shape=shape, array_dtype=word, reader=runs)
        return Region(tensor.offset, tensor.nbytes, ((array, tensor.nbytes),))
    sizes = [size for _, size in kind.fields]
    if not gains_by_fields(file.view(tensor.offset, tensor.nbytes), sizes):
        array = byte_array(file, name, (cells, blocks, kind.nbytes), tensor.offset, tensor.nbytes)
        return Region(tensor.offset, tensor.nbytes, ((array, tensor.nbytes),))
    arrays, begin = [], 0
    for field, size in kind.fields:
        words = field == "scales"
        held = (cells, blocks, size // 2 if words else size)
        where, place = (tensor.offset, tensor.nbytes), (begin, size, kind.nbytes)
        arrays.append((field_array(file, f"{name}.{field}", held, where, place, "<f2" if words else "|u1"), size))
        begin += size
    return Region(tensor.offset, tensor.nbytes, tuple(arrays))
