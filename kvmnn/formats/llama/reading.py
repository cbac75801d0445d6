"""K and V out of a llama.cpp state file, as ``[kv_head, cell, head_dim]``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ... import dtypes
from ...arrays.engine_cache import EngineCache
from ...arrays.layers import array_name
from ...arrays.named_array import NamedArray, UnsupportedArrayError
from ...arrays.source import Source
from ...arrays.undoing import Undo
from ...errors import MissingOptionError, OptionError, SourceError
from ...files.mapped import MappedFile, head_of
from ...text import count
from ..file_bytes import FileBytes
from ..options import EngineOptions, ReadOptions
from ..reading import dequantised_note
from . import gguf
from .altering import order_of, rotations_of
from .rows import Cells, cell_runs, head_runs
from .state import MAGICS, State, Stream, Tensor, parse

ENGINE = "llama.cpp"


def is_state(path: str) -> bool:
    """Whether a file begins as state files do."""
    return head_of(path, 4) in MAGICS


def holds_state(file: MappedFile) -> bool:
    """The same of what was read from a stream."""
    return file.head(4) in MAGICS


def read(file: FileBytes, options: ReadOptions) -> Source:
    """K and V of the used cells of a stream, in the order of the cells; what the file says besides is described.

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
    model = model_of(options)
    state = parse(file, model)
    if None not in (state.architecture, model) and state.architecture != model:
        raise OptionError(f"{file.label}: is of architecture {state.architecture!r}, the model of {model!r}")
    check_layers(file.label, state, options)
    stream = _chosen(file.label, state, options.engine)
    taken = _cells_of(file.label, stream, options.engine.sequence)
    undoing = options.engine.undo not in (None, (), ("none",))
    needed = undoing or not (options.engine.any_heads or _only_blocks(stream, options.engine))
    heads = heads_of(file.label, stream, options, needed=needed)
    arrays = [_array(file, tensor, taken, heads, options) for tensor in _by_layer(stream)]
    said = described(state, stream, taken, heads, options)
    notes = _notes(state, stream, heads, options.engine)
    notes += _block_notes(stream, taken, heads, options.engine)
    return Source(arrays, notes=notes, engine_cache=said)


def model_of(options: ReadOptions) -> str | None:
    """The architecture of the model that the options name."""
    path = options.packed.model if options.packed else None
    return None if path is None else gguf.architecture(path)


def check_layers(where: str, state: State, options: ReadOptions) -> None:
    """`OptionError` where the model that the options name has another number of layers than the file."""
    model = options.packed.model if options.packed else None
    held = [max(sum(tensor.part == "key" for tensor in each.tensors) for each in streams) for streams in state.caches]
    if model is None or state.recurrent_bytes or not all(held):
        return
    expected = gguf.cache_layers(model)
    if expected and sum(held) not in expected:
        has = " or ".join(map(str, sorted(expected)))
        raise OptionError(
            f"{where}: has K and V of {count(sum(held), 'layer')}, a cache of the model in {model} has {has}: it is of "
            "another model"
        )


@dataclass(frozen=True)
class Heads:
    """Kv heads of each layer, and whether anything says so; one each where nothing does and nobody needs them."""

    of: tuple[int, ...]
    known: bool = True


def _only_blocks(stream: Stream, options: EngineOptions) -> bool:
    """Whether all arrays are blocks of cells, which are of no head."""
    return options.blocks and all(tensor.type.is_block for tensor in stream.tensors)


def _by_layer(stream: Stream) -> list[Tensor]:
    return sorted(stream.tensors, key=lambda tensor: (tensor.layer, tensor.part))


def _chosen(where: str, state: State, options: EngineOptions) -> Stream:
    """The stream that is meant."""
    if options.window and len(state.caches) == 1:
        raise OptionError(f"{where}: holds one cache: --window is about files with a second one, of a sliding window")
    streams = state.caches[options.window]
    used = _used(state, options)
    if not used:
        raise SourceError(f"{where}: no cell is used, there is nothing to read")
    if options.stream is None:
        if len(used) > 1 and not options.any_stream:
            raise MissingOptionError(
                f"{where}: {len(used)} streams hold cells: --stream says which ({_numbers(used)}), in Python stream="
            )
        return streams[used[0]]
    if options.stream not in used:
        raise OptionError(f"{where}: stream {options.stream} holds no cells; --stream may be {_numbers(used)}")
    return streams[options.stream]


def _used(state: State, options: EngineOptions) -> list[int]:
    """Streams that hold cells."""
    return [number for number, stream in enumerate(state.caches[options.window]) if stream.cells]


def _is_of_one_text(state: State, stream: Stream, options: EngineOptions) -> bool:
    """Whether the file holds one text, so that its only list of token ids is of that."""
    return len(_used(state, options)) == 1 and len(set(stream.seq_ids.tolist())) <= 1


def _cells_of(where: str, stream: Stream, sequence: int | None) -> Cells:
    """The cells of a sequence, or all."""
    if sequence is None:
        return Cells(stream.cells)
    is_one = np.zeros(stream.cells, bool)
    is_one[np.repeat(np.arange(stream.cells), stream.seq_counts)[stream.seq_ids == sequence]] = True
    if not is_one.any():
        known = _numbers(sorted(set(stream.seq_ids.tolist())))
        raise OptionError(f"{where}: no cell is of sequence {sequence}; --sequence may be {known}")
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_one, [False]]).astype(np.int8)))
    return Cells(stream.cells, list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)))


def _numbers(found: Sequence[int]) -> str:
    shown = ", ".join(map(str, found[:8]))
    return shown if len(found) <= 8 else f"{shown} ... {found[-1]}"


def heads_of(where: str, stream: Stream, options: ReadOptions, *, needed: bool) -> Heads:
    """How many kv heads the rows of each layer are of; errors as `read`, but where they are not `needed`."""
    keys = [tensor for tensor in stream.tensors if tensor.part == "key"]
    said = options.packed.geometry if options.packed else None
    model = options.packed.model if options.packed else None
    found: tuple[int, ...] | None = None
    if said and said.kv_heads:
        found = (said.kv_heads,) * len(keys)
    elif said and said.head_dim:
        found = tuple(tensor.row // said.head_dim for tensor in keys)
    if model is not None:
        geometry = gguf.read_geometry(model, len(keys))
        if found is not None and found != geometry.kv_heads:
            raise OptionError(
                f"kv heads: {found[0]} for the cache, but the model in {model} has {geometry.kv_heads[0]}"
            )
        found = geometry.kv_heads
        _check_model(where, model, keys, geometry)
    if found is None and len(options.engine.noted_heads or ()) == len(keys):
        found = options.engine.noted_heads
    if found is None:
        if not needed:
            return Heads((1,) * len(keys), known=False)
        raise MissingOptionError(
            f"{where}: a row of K has {keys[0].row:,} values, and nothing in the file says of how many kv heads: say "
            "--kv-heads N, or --model FILE.gguf (in Python kv_heads=N, or model=)"
        )
    for tensor in stream.tensors:
        heads = found[tensor.layer]
        wrong_dims = said and said.head_dim and tensor.part == "key" and tensor.row != heads * said.head_dim
        if not heads or tensor.row % heads or wrong_dims:
            dims = f" of {said.head_dim}" if said and said.head_dim else ""
            raise OptionError(
                f"{where}: {tensor.part[0].upper()} of layer {tensor.layer} has {tensor.row:,} values a cell, which "
                f"are not {count(heads, 'kv head')}{dims}"
            )
    return Heads(found)


def _check_model(where: str, model: str, keys: Sequence[Tensor], geometry: gguf.Geometry) -> None:
    for tensor in keys:
        expected = geometry.kv_heads[tensor.layer] * geometry.head_dim
        if tensor.row != expected:
            raise OptionError(
                f"{where}: K of layer {tensor.layer} has {tensor.row:,} values a cell, in {model} it has "
                f"{expected:,}: it is of another model"
            )


def _array(file: FileBytes, tensor: Tensor, taken: Cells, heads: Heads, options: ReadOptions) -> NamedArray:
    kind, of = tensor.type, heads.of[tensor.layer]
    name = array_name(tensor.layer, tensor.part)
    if kind.is_block and options.engine.blocks:
        return block_array(file, tensor, taken, name)
    if options.dtype not in (None, kind.dtype):
        raise UnsupportedArrayError(
            f"{file.label}: {name} holds {kind.name}, read as {kind.dtype}, not {options.dtype}"
        )
    dims = tensor.row // of
    return NamedArray(
        name=name,
        dtype=kind.dtype,
        shape=(of, taken.count, dims),
        array_dtype=dtypes.by_name(kind.dtype).numpy.str,
        reader=partial(head_runs, file, tensor, of, taken),
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


def _notes(state: State, stream: Stream, heads: Heads, options: EngineOptions) -> list[str]:
    """What was inferred."""
    notes = []
    if state.recurrent_bytes:
        notes.append(
            f"state of recurrent layers ({count(state.recurrent_bytes, 'byte')}) lies behind K and V, and is not read; "
            "layers are counted without these"
        )
    used = _used(state, options)
    if len(used) > 1 and options.stream is None:
        notes.append(f"{len(used)} streams hold cells ({_numbers(used)}): this is the first")
    if len(sequences := sorted(set(stream.seq_ids.tolist()))) > 1 and options.sequence is None:
        notes.append(
            f"cells are of {len(sequences)} sequences ({_numbers(sequences)}): --sequence N takes those of one"
        )
    if state.tokens.size and not _is_of_one_text(state, stream, options):
        notes.append(
            f"the {count(state.tokens.size, 'token id')} of the file may be of any of its texts, and are left out "
            "(--token-ids says those of what is read)"
        )
    if len(state.caches) > 1 and not options.window:
        notes.append(
            "a second cache, of layers with a sliding window, is read with --window; layers are counted by cache"
        )
    if not heads.known and not _only_blocks(stream, options):
        notes.append("kv heads are not in the file: each row is taken as one head (--kv-heads N or --model FILE.gguf)")
    return notes


def _block_notes(stream: Stream, taken: Cells, heads: Heads, options: EngineOptions) -> Iterator[str]:
    """What numbers that stand for blocks were made from, and what nothing says of them."""
    quantised = [tensor for tensor in stream.tensors if tensor.type.is_block]
    if options.blocks or not quantised:
        return
    values = sum(tensor.row for tensor in quantised)
    blocks = sum(tensor.row // tensor.type.values * tensor.type.nbytes for tensor in quantised)
    dtype = dtypes.by_name(quantised[0].type.dtype)
    yield dequantised_note(
        _dequantised(stream, options), dtype.name, blocks * taken.count, values * taken.count * dtype.itemsize
    )
    turned = rotations_of(quantised, heads.of) if options.undo is None else ()
    if turned:
        parts = " and ".join(way[0].upper() for way in turned)
        yield (
            f"newer builds of llama.cpp store quantised {parts} rotated by a Hadamard matrix, and the file does not "
            f"say so: rotated numbers are not those that other types and engines hold (--undo {','.join(turned)} turns "
            "them back)"
        )


def _dequantised(stream: Stream, options: EngineOptions) -> tuple[str, ...]:
    if options.blocks:
        return ()
    return tuple(sorted({tensor.type.name for tensor in stream.tensors if tensor.type.is_block}))


def described(state: State, stream: Stream, taken: Cells, heads: Heads, options: ReadOptions) -> EngineCache:
    """What a file says of the cells that are taken."""
    keys = [tensor for tensor in stream.tensors if tensor.part == "key"]
    counts, dims = {*heads.of}, {tensor.row // heads.of[tensor.layer] for tensor in keys}
    architecture = state.architecture or model_of(options)
    altered, perhaps = _altered(stream, heads, architecture, options)
    return EngineCache(
        engine=ENGINE,
        kind=state.kind,
        layers=len(keys),
        kv_heads=heads.of[0] if heads.known and len(counts) == 1 else None,
        layer_kv_heads=heads.of if heads.known and len(counts) > 1 else (),
        head_dim=dims.pop() if heads.known and len(dims) == 1 else None,
        tokens=taken.count,
        types=tuple(tensor.type.name for tensor in stream.tensors),
        positions=np.concatenate([stream.positions[begin:end] for begin, end in taken.spans]),
        token_ids=state.tokens if _is_of_one_text(state, stream, options.engine) else None,
        dequantised=_dequantised(stream, options.engine),
        altered=altered,
        perhaps_altered=perhaps,
        details={**_details(state, stream, options.engine), "architecture": architecture},
    )


_Altered = tuple[Undo, ...]


def _altered(stream: Stream, heads: Heads, architecture: str | None, options: ReadOptions) -> tuple[_Altered, _Altered]:
    """What surely was done to K and V, and what may have been; nothing of blocks, or where heads are not known."""
    if not heads.known or options.engine.blocks:
        return (), ()
    perhaps, model = rotations_of(stream.tensors, heads.of), options.packed.model if options.packed else None
    rotary = None if model is None else gguf.rotary_dim(model)
    keys = {tensor.row // heads.of[tensor.layer] for tensor in stream.tensors if tensor.part == "key"}
    orders = {order_of(architecture, dims, rotary) for dims in keys}
    order: _Altered = ("k-order",)
    if orders == {True}:
        return order, perhaps
    return (), perhaps if orders == {False} else (*perhaps, *order)


def _details(state: State, stream: Stream, options: EngineOptions) -> dict[str, Any]:
    streams = state.caches[options.window]
    return {
        "version": state.version,
        "architecture": state.architecture,
        "caches": len(state.caches),
        "recurrent_bytes": state.recurrent_bytes,
        "window": options.window,
        "streams": len(streams),
        "cells": [each.cells for each in streams],
        "stream": next(number for number, each in enumerate(streams) if each is stream),
        "sequences": sorted(set(stream.seq_ids.tolist())),
        **({} if options.sequence is None else {"sequence": options.sequence}),
        "v_transposed": any(tensor.transposed for tensor in stream.tensors),
        "row_values": sorted({tensor.row for tensor in stream.tensors}),
    }
