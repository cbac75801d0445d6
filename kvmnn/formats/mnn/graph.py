"""What the graph of an MNN model (``llm.mnn``) tells about its cache: kinds of layers, kv heads, dimensions of a head.

The file is a FlatBuffer, a `Net` of MNN's schema, of which nothing but operators and small constants is looked at. Each
attention operator takes K that was reshaped to ``[batch, token, kv_head, head_dim]``; the last two are constants.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...arrays.completeness import LayerState, StateKind
from ...files.mapped import MappedFile
from .flatbuffer import NotFlatBufferError, find_field, find_vector, follow, iter_tables, read_ints

_CONCAT, _CONST, _RESHAPE, _ATTENTION, _LINEAR_ATTENTION = 10, 11, 73, 299, 305
"""Numbers of `OpType`."""
_NET_OPS = 3
_OP_INPUTS, _OP_MAIN, _OP_OUTPUTS, _OP_TYPE = 0, 2, 4, 5
_BLOB_INTS = 5
_ATTENTION_SHARED_WITH = 3
_LINEAR_ATTENTION_KIND = 0
_SHORT_CONVOLUTION: Final = "short_conv"
_MAX_NAME_BYTES: Final = 100
_KEY = 1
"""Which input of an attention operator is K."""

_FAR = 64
"""Operators that may lie between an attention operator and the reshaping of its K, norms and rotation included."""


@dataclass(frozen=True)
class GraphGeometry:
    """What was found.

    Parameters
    ----------
    layers
        Operators of attention and of linear attention.
    kv_heads, head_dim
        Of all operators of attention; None where they differ, or where K is reshaped in a way that is not known.
    states
        What each layer keeps.
    layer_geometry
        Kv heads and head_dim of each layer; Nones where it has none, or where they are not known.
    """

    layers: int
    kv_heads: int | None
    head_dim: int | None
    states: tuple[LayerState, ...] = ()
    layer_geometry: tuple[tuple[int | None, int | None], ...] = ()


def read_graph(path: str | Path) -> GraphGeometry | None:
    """The geometry in a graph; None for a file that is no graph, or one without attention operators."""
    file = MappedFile(path)
    try:
        ops = list(_ops(file.view(0, file.size).data)) if file.size else []
    except (struct.error, NotFlatBufferError):
        return None
    layers = [op for op in ops if op.type in (_ATTENTION, _LINEAR_ATTENTION) and len(op.inputs) > _KEY]
    if not any(op.type == _ATTENTION for op in layers):
        return None
    makers = {tensor: op for op in ops for tensor in op.outputs}
    states = tuple(
        LayerState(layer=number, kind=op.kind, shared_with=op.shared_with) for number, op in enumerate(layers)
    )
    geometry = tuple(_reshaped(op.inputs[_KEY], makers) if op.kind == "full" else (None, None) for op in layers)
    found = {each for each, op in zip(geometry, layers, strict=True) if op.kind == "full"}
    heads, dims = found.pop() if len(found) == 1 else (None, None)
    return GraphGeometry(len(layers), heads, dims, states, geometry)


@dataclass(frozen=True)
class _Op:
    type: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ints: tuple[int, ...]  # of a constant
    kind: StateKind = "full"
    shared_with: int | None = None


def _reshaped(tensor: int, makers: dict[int, _Op]) -> tuple[int | None, int | None]:
    """The last two axes of the nearest tensor above `tensor` that was reshaped to constants."""
    seen, waiting = {tensor}, deque([tensor])
    while waiting and len(seen) < _FAR:
        op = makers.get(waiting.popleft())
        if op is None:
            continue
        if op.type == _RESHAPE and len(op.inputs) == 2:
            shape = _shape(makers.get(op.inputs[1]), makers)
            if len(shape) >= 3 and min(shape[-2:]) > 0:
                return shape[-2], shape[-1]
        for each in op.inputs:
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    return None, None


def _shape(op: _Op | None, makers: dict[int, _Op]) -> tuple[int, ...]:
    """A shape, constant or put together of numbers, -1 where one is computed."""
    if op is None:
        return ()
    if op.type == _CONST:
        return op.ints
    if op.type != _CONCAT:
        return ()
    parts = [makers.get(each) for each in op.inputs]
    return tuple(part.ints[0] if part and part.type == _CONST and len(part.ints) == 1 else -1 for part in parts)


def _ops(data: memoryview) -> Iterator[_Op]:
    numbers = 0
    for table in iter_tables(data, follow(data, 0), _NET_OPS):
        kind = find_field(data, table, _OP_TYPE)
        number = struct.unpack_from("<i", data, kind)[0] if kind else 0
        inputs, outputs = (read_ints(data, table, end) for end in (_OP_INPUTS, _OP_OUTPUTS))
        ints = _constant(data, table) if number == _CONST else ()
        numbers += len(inputs) + len(outputs) + len(ints)
        if 4 * numbers > len(data):
            raise NotFlatBufferError("operators that share their vectors")
        yield _Op(number, inputs, outputs, ints, *_state(data, table, number))


def _state(data: memoryview, op: int, number: int) -> tuple[StateKind, int | None]:
    """What a layer keeps, and the layer whose K and V it reads."""
    place = find_field(data, op, _OP_MAIN) if number in (_ATTENTION, _LINEAR_ATTENTION) else None
    table = follow(data, place) if place else None
    if number == _LINEAR_ATTENTION:
        is_convolution = table is not None and _text(data, table, _LINEAR_ATTENTION_KIND) == _SHORT_CONVOLUTION
        return "recurrent" if is_convolution else "linear", None
    field = None if table is None else find_field(data, table, _ATTENTION_SHARED_WITH)
    shared = -1 if field is None else int(struct.unpack_from("<i", data, field)[0])
    return ("full", None) if shared < 0 else ("shared", shared)


def _text(data: memoryview, table: int, number: int) -> str:
    start, count = find_vector(data, table, number, _MAX_NAME_BYTES)
    return bytes(data[start : start + count]).decode("utf-8", "replace")


def _constant(data: memoryview, op: int) -> tuple[int, ...]:
    place = find_field(data, op, _OP_MAIN)
    return read_ints(data, follow(data, place), _BLOB_INTS) if place else ()
