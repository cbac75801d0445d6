"""What the graph of an MNN model (``llm.mnn``) tells about its cache: layers, kv heads, dimensions of a head.

The file is a FlatBuffer, a `Net` of MNN's schema, of which nothing but operators and small constants is looked at. Each
attention operator takes K that was reshaped to ``[batch, token, kv_head, head_dim]``; the last two are constants.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...files.mapped import MappedFile
from .flatbuffer import NotFlatBufferError, find_field, follow, iter_tables, read_ints

_CONCAT, _CONST, _RESHAPE, _ATTENTION = 10, 11, 73, 299
"""Numbers of `OpType`."""
_NET_OPS = 3
_OP_INPUTS, _OP_MAIN, _OP_OUTPUTS, _OP_TYPE = 0, 2, 4, 5
_BLOB_INTS = 5
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
        Attention operators.
    kv_heads, head_dim
        Of the first of them; None where its K is reshaped in a way that is not known.
    """

    layers: int
    kv_heads: int | None
    head_dim: int | None


def read_graph(path: str | Path) -> GraphGeometry | None:
    """The geometry in a graph; None for a file that is no graph, or one without attention operators."""
    file = MappedFile(path)
    try:
        ops = list(_ops(file.view(0, file.size).data)) if file.size else []
    except (struct.error, NotFlatBufferError):
        return None
    attention = [op for op in ops if op.type == _ATTENTION and len(op.inputs) > _KEY]
    if not attention:
        return None
    makers = {tensor: op for op in ops for tensor in op.outputs}
    found = {_reshaped(op.inputs[_KEY], makers) for op in attention}
    heads, dims = found.pop() if len(found) == 1 else (None, None)
    return GraphGeometry(len(attention), heads, dims)


@dataclass(frozen=True)
class _Op:
    type: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ints: tuple[int, ...]  # of a constant


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
        yield _Op(number, inputs, outputs, ints)


def _constant(data: memoryview, op: int) -> tuple[int, ...]:
    place = find_field(data, op, _OP_MAIN)
    return read_ints(data, follow(data, place), _BLOB_INTS) if place else ()
