"""A llama.cpp state file for frames: K and V of all layers, streams and caches as they lie there."""

from __future__ import annotations

from collections.abc import Iterator

from ... import dtypes
from ...arrays.layers import array_name
from ...arrays.named_array import NamedArray, UnsupportedArrayError
from ...arrays.source import Source
from ...errors import SourceError
from ...files.mapped import MappedFile
from .. import keeping
from ..keeping import Region, byte_array, field_array, gains_by_fields
from ..options import ReadOptions
from .reading import check_layers, described, heads_of, model_of
from .rows import Cells
from .state import State, Stream, Tensor, parse

NAME = "llama-state"


def keep(file: MappedFile, options: ReadOptions) -> Source:
    """All K and V of a file, each ``[cell, value]``, V that is transposed ``[value, cell]``, blocks as their fields.

    With `EngineOptions.by_heads`, where kv heads are known and one stream holds cells, ``[cell, kv_head, head_dim]``.

    Names are ``layer_<n>.key`` and ``.value``, with ``stream_<n>.`` in front where several streams hold cells and
    ``window.`` for the second cache; fields of blocks add ``.scales``, ``.bits`` and ``.codes``.

    Raises
    ------
    SourceError
        As `read`; kv heads need not be known.
    """
    state = parse(file, model_of(options))
    check_layers(file.label, state, options)
    found = list(_streams(state))
    if not found:
        raise SourceError(f"{file.label}: no cell is used, there is nothing to encode")
    _, stream = found[0]
    heads = heads_of(file.label, stream, options, needed=False)
    by_heads = options.engine.by_heads and heads.known and len(found) == 1
    regions = [
        _region(
            file,
            tensor,
            stream.cells,
            f"{prefix}{array_name(tensor.layer, tensor.part)}",
            options,
            heads.of[tensor.layer] if by_heads else None,
        )
        for prefix, stream in found
        for tensor in stream.tensors
    ]
    kept = keeping.keep(file, NAME, regions, heads.of if heads.known else None)
    if by_heads:
        kept.token_major = True
        kept.engine_cache = described(state, stream, Cells(stream.cells), heads, options)
    return kept


def _streams(state: State) -> Iterator[tuple[str, Stream]]:
    """Streams that hold cells, and what their names begin with."""
    for cache, streams in enumerate(state.caches):
        used = [number for number, stream in enumerate(streams) if stream.cells]
        for number in used:
            stream = f"stream_{number}." if len(used) > 1 else ""
            yield ("window." if cache else "") + stream, streams[number]


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
