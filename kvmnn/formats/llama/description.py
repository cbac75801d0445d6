"""What a state file says of the cells that are read: an `EngineCache`, and lines about what was inferred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import dtypes
from ...arrays.engine_cache import EngineCache
from ...arrays.undoing import Undo
from ...dtypes import Positions
from ...text import count
from ..options import EngineOptions, ReadOptions
from ..reading import dequantised_note
from . import gguf
from .altering import order_of, rotations_of
from .cache_choice import CachePart, has_one_text, list_numbers, used_streams
from .layer_numbers import LayerNumbers
from .state import State, Tensor

ENGINE = "llama.cpp"


class _Layer(NamedTuple):
    """A layer of the model in the part of the file that has it."""

    number: int
    part: CachePart
    place: int

    @property
    def kv_heads(self) -> int:
        """Heads of K and V."""
        return self.part.heads.of[self.place]

    @property
    def tensors(self) -> list[Tensor]:
        """K, and V where there is any."""
        return [tensor for tensor in self.part.stream.tensors if tensor.layer == self.place]


def _layers(parts: Sequence[CachePart]) -> list[_Layer]:
    found = [_Layer(number, part, place) for part in parts for place, number in enumerate(part.numbers)]
    return sorted(found, key=lambda layer: layer.number)


def describe(state: State, parts: Sequence[CachePart], options: ReadOptions) -> EngineCache:
    """Return what a file says of the cells that are read."""
    layers, known = _layers(parts), all(part.heads.known for part in parts)
    heads = tuple(layer.kv_heads for layer in layers)
    dims = tuple(layer.tensors[0].row // layer.kv_heads for layer in layers)
    architecture = state.architecture or model_of(options)
    altered, perhaps = _altered(layers, architecture, options, known=known)
    positions, by_layer = _positions(layers)
    types = [tensor.type.name for of in (0, 1) for layer in layers for tensor in layer.tensors[of : of + 1]]
    return EngineCache(
        engine=ENGINE,
        kind=state.kind,
        layers=len(layers),
        kv_heads=heads[0] if known and len({*heads}) == 1 else None,
        layer_kv_heads=heads if known and len({*heads}) > 1 else (),
        head_dim=dims[0] if known and len({*dims}) == 1 else None,
        layer_head_dims=dims if known and len({*dims}) > 1 else (),
        tokens=max(part.cells.count for part in parts),
        types=tuple(types),
        positions=positions,
        layer_positions=by_layer,
        token_ids=state.tokens if has_one_text(state, parts[0]) else None,
        dequantised=_dequantised(parts, options.engine),
        altered=altered,
        perhaps_altered=perhaps,
        details={**_details(state, parts, options.engine), "architecture": architecture},
    )


def model_of(options: ReadOptions) -> str | None:
    """The architecture of the model that the options name."""
    path = options.packed.model if options.packed else None
    return None if path is None else gguf.architecture(path)


def _positions(layers: Sequence[_Layer]) -> tuple[Positions | None, tuple[Positions, ...] | None]:
    """Positions of all layers, or of each where they differ."""
    of_parts = {id(layer.part): layer.part.positions for layer in layers}
    first, *others = of_parts.values()
    if all(np.array_equal(first, other) for other in others):
        return first, None
    return None, tuple(of_parts[id(layer.part)] for layer in layers)


_Altered = tuple[Undo, ...]


def _altered(
    layers: Sequence[_Layer], architecture: str | None, options: ReadOptions, *, known: bool
) -> tuple[_Altered, _Altered]:
    """What surely was done to K and V, and what may have been; nothing of blocks, or where heads are not known."""
    if not known or options.engine.blocks:
        return (), ()
    model = options.packed.model if options.packed else None
    rotary = None if model is None else gguf.rotary_dim(model)
    perhaps = tuple(sorted({way for layer in layers for way in rotations_of(layer.tensors, layer.part.heads.of)}))
    orders = {order_of(architecture, layer.tensors[0].row // layer.kv_heads, rotary) for layer in layers}
    order: _Altered = ("k-order",)
    if orders == {True}:
        return order, perhaps
    return (), perhaps if orders == {False} else (*perhaps, *order)


def _details(state: State, parts: Sequence[CachePart], options: EngineOptions) -> dict[str, Any]:
    first = parts[0]
    streams = state.caches[first.cache]
    cells = [[each.cells for each in state.caches[part.cache]] for part in parts]
    return {
        "version": state.version,
        "architecture": state.architecture,
        "caches": len(state.caches),
        "recurrent_bytes": state.recurrent_bytes,
        "window": options.window,
        "streams": len(streams),
        "cells": cells[0],
        **({"window_cells": cells[1]} if len(cells) > 1 else {}),
        "stream": next(number for number, each in enumerate(streams) if each is first.stream),
        "sequences": sorted(set(first.stream.seq_ids.tolist())),
        **({} if options.sequence is None else {"sequence": options.sequence}),
        "v_transposed": any(tensor.transposed for part in parts for tensor in part.stream.tensors),
        "row_values": sorted({tensor.row for part in parts for tensor in part.stream.tensors}),
    }


def list_notes(
    state: State, parts: Sequence[CachePart], numbers: LayerNumbers | None, options: EngineOptions
) -> Iterator[str]:
    """Return a line for each thing that was inferred, or that the arrays do not say."""
    first = parts[0]
    if state.recurrent_bytes:
        yield (
            f"state of recurrent layers ({count(state.recurrent_bytes, 'byte')}) lies behind K and V, and is not read; "
            "layers are counted without these"
        )
    used = used_streams(state, first.cache)
    if len(used) > 1 and options.stream is None:
        yield f"{len(used)} streams hold cells ({list_numbers(used)}): this is the first"
    if len(sequences := sorted(set(first.stream.seq_ids.tolist()))) > 1 and options.sequence is None:
        yield f"cells are of {len(sequences)} sequences ({list_numbers(sequences)}): --sequence N takes those of one"
    if state.tokens.size and not has_one_text(state, first):
        yield (
            f"the {count(state.tokens.size, 'token id')} of the file may be of any of its texts, and are left out "
            "(--token-ids says those of what is read)"
        )
    elif state.tokens.size:
        yield from _id_notes(state.tokens.size, parts)
    if numbers is not None and numbers.rule:
        yield f"{numbers.rule} (--model FILE.gguf has those of this model)"
    elif len(state.caches) > len(parts) and numbers is None:
        yield "layers are counted by cache: --model FILE.gguf tells which they are"
    if not all(part.heads.known or _only_blocks(part, options) for part in parts):
        yield "kv heads are not in the file: each row is taken as one head (--kv-heads N or --model FILE.gguf)"
    yield from _block_notes(parts, options)


def _id_notes(ids: int, parts: Sequence[CachePart]) -> Iterator[str]:
    """Return a line where token ids and cells are not as many: builds write the id of a token not yet evaluated."""
    end = 1 + max(int(part.positions.max(initial=-1)) for part in parts)
    if ids > end:
        rest = "the last token id" if ids - end == 1 else f"the last {ids - end:,} token ids"
        has, it = ("has", "it") if ids - end == 1 else ("have", "them")
        yield f"{rest} of {ids:,} {has} no cell: no K and V belong to {it}"
    elif ids < end:
        yield f"the file has {count(ids, 'token id')}, its cells have positions up to {end - 1:,}"


def _block_notes(parts: Sequence[CachePart], options: EngineOptions) -> Iterator[str]:
    """What numbers that stand for blocks were made from, and what nothing says of them."""
    quantised = [(tensor, part) for part in parts for tensor in part.stream.tensors if tensor.type.is_block]
    if options.blocks or not quantised:
        return
    values = sum(tensor.row * part.cells.count for tensor, part in quantised)
    blocks = sum(tensor.row // tensor.type.values * tensor.type.nbytes * part.cells.count for tensor, part in quantised)
    dtype = dtypes.by_name(quantised[0][0].type.dtype)
    yield dequantised_note(_dequantised(parts, options), dtype.name, blocks, values * dtype.itemsize)
    found = {way for tensor, part in quantised for way in rotations_of([tensor], part.heads.of)}
    turned = sorted(found) if options.undo is None else ()
    if turned:
        names = " and ".join(way[0].upper() for way in turned)
        yield (
            f"newer builds of llama.cpp store quantised {names} rotated by a Hadamard matrix, and the file does not "
            f"say so: rotated numbers are not those that other types and engines hold (--undo {','.join(turned)} turns "
            "them back)"
        )


def _dequantised(parts: Sequence[CachePart], options: EngineOptions) -> tuple[str, ...]:
    if options.blocks:
        return ()
    return tuple(sorted({each.type.name for part in parts for each in part.stream.tensors if each.type.is_block}))


def _only_blocks(part: CachePart, options: EngineOptions) -> bool:
    """Whether all arrays are blocks of cells, which are of no head."""
    return options.blocks and all(tensor.type.is_block for tensor in part.stream.tensors)
