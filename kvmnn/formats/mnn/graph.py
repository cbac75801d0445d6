"""Fields and vectors of FlatBuffers, read out of bytes that nobody has checked; `struct.error` outside of them.

What the graph of an MNN model (``llm.mnn``) tells about its cache: kinds of layers, kv heads, dimensions of a head.

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

from ...arrays.completeness import LayerStateInfo, StateKind
from ...files.mapped_file import MappedFile

MAX_TABLES = 100_000
MAX_INTS = 1_000


class NotFlatBufferError(Exception):
    """The bytes are not those of a FlatBuffer."""


def follow_offset(data: memoryview, offset_position: int) -> int:
    """Return what the offset at `offset_position` leads to."""
    return offset_position + int(struct.unpack_from("<I", data, offset_position)[0])


def find_field(data: memoryview, table: int, field_index: int) -> int | None:
    """Return where a field of a table lies; None for one that is left out."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise NotFlatBufferError("table of fields before the file")
    if 4 + 2 * field_index >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * field_index)[0]
    return table + offset if offset else None


def find_vector(data: memoryview, table: int, field_index: int, max_entries: int) -> tuple[int, int]:
    """Return where the entries of a vector begin, and their number; one of more than `max_entries` counts as empty."""
    field_position = find_field(data, table, field_index)
    if field_position is None:
        return 0, 0
    vector_start = follow_offset(data, field_position)
    num_entries = int(struct.unpack_from("<I", data, vector_start)[0])
    return vector_start + 4, num_entries if num_entries <= max_entries else 0


def read_ints(data: memoryview, table: int, field_index: int) -> tuple[int, ...]:
    """Return a vector of 32-bit integers of at most `MAX_INTS` entries."""
    start, num_entries = find_vector(data, table, field_index, MAX_INTS)
    return struct.unpack_from(f"<{num_entries}i", data, start)


def iter_tables(data: memoryview, table: int, field_index: int) -> Iterator[int]:
    """Iterate over the tables of a vector of at most `MAX_TABLES` entries."""
    start, num_tables = find_vector(data, table, field_index, MAX_TABLES)
    for index in range(num_tables):
        yield follow_offset(data, start + 4 * index)


_OP_TYPE_CONCAT, _OP_TYPE_CONST, _OP_TYPE_RESHAPE, _OP_TYPE_ATTENTION, _OP_TYPE_LINEAR_ATTENTION = 10, 11, 73, 299, 305
"""Numbers of `OpType`."""
_NET_OPS = 3
_OP_INPUTS, _OP_MAIN, _OP_OUTPUTS, _OP_TYPE = 0, 2, 4, 5
_BLOB_INTS = 5
_ATTENTION_SHARED_WITH = 3
_LINEAR_ATTENTION_KIND = 0
_SHORT_CONVOLUTION: Final = "short_conv"
_MAX_NAME_BYTES: Final = 100
_KEY_INPUT = 1
"""Which input of an attention operator is K."""

_MAX_WALKED_OPS = 64
"""Operators that may lie between an attention operator and the reshaping of its K, norms and rotation included."""


@dataclass(frozen=True)
class GraphGeometry:
    """What was found."""

    #: Operators of attention and of linear attention.
    num_layers: int
    #: Of all operators of attention; None where they differ, or where K is reshaped in a way that is not known.
    kv_heads: int | None
    head_dim: int | None
    #: What each layer keeps.
    states: tuple[LayerStateInfo, ...] = ()
    #: Kv heads and head_dim of each layer; Nones where it has none, or where they are not known.
    layer_geometry: tuple[tuple[int | None, int | None], ...] = ()


def read_graph_geometry(path: str | Path) -> GraphGeometry | None:
    """The geometry in a graph; None for a file that is no graph, or one without attention operators."""
    file = MappedFile(path)
    try:
        ops = list(_iter_ops(file.view(0, file.size).data)) if file.size else []
    except (struct.error, NotFlatBufferError):
        return None
    layers = [
        op for op in ops if op.type in (_OP_TYPE_ATTENTION, _OP_TYPE_LINEAR_ATTENTION) and len(op.inputs) > _KEY_INPUT
    ]
    if not any(op.type == _OP_TYPE_ATTENTION for op in layers):
        return None
    producer_by_tensor = {tensor: op for op in ops for tensor in op.outputs}
    states = tuple(
        LayerStateInfo(layer=layer_number, kind=op.kind, shared_with=op.shared_with)
        for layer_number, op in enumerate(layers)
    )
    layer_geometry = tuple(
        _find_reshape_axes(op.inputs[_KEY_INPUT], producer_by_tensor) if op.kind == "full" else (None, None)
        for op in layers
    )
    distinct_geometries = {
        heads_and_dim for heads_and_dim, op in zip(layer_geometry, layers, strict=True) if op.kind == "full"
    }
    kv_heads, head_dim = distinct_geometries.pop() if len(distinct_geometries) == 1 else (None, None)
    return GraphGeometry(len(layers), kv_heads, head_dim, states, layer_geometry)


@dataclass(frozen=True)
class _GraphOp:
    type: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ints: tuple[int, ...]  # of a constant
    kind: StateKind = "full"
    shared_with: int | None = None


def _find_reshape_axes(tensor: int, producer_by_tensor: dict[int, _GraphOp]) -> tuple[int | None, int | None]:
    """The last two axes of the nearest tensor above `tensor` that was reshaped to constants."""
    visited, queue = {tensor}, deque([tensor])
    while queue and len(visited) < _MAX_WALKED_OPS:
        op = producer_by_tensor.get(queue.popleft())
        if op is None:
            continue
        if op.type == _OP_TYPE_RESHAPE and len(op.inputs) == 2:
            shape = _resolve_shape(producer_by_tensor.get(op.inputs[1]), producer_by_tensor)
            if len(shape) >= 3 and min(shape[-2:]) > 0:
                return shape[-2], shape[-1]
        for input_tensor in op.inputs:
            if input_tensor not in visited:
                visited.add(input_tensor)
                queue.append(input_tensor)
    return None, None


def _resolve_shape(op: _GraphOp | None, producer_by_tensor: dict[int, _GraphOp]) -> tuple[int, ...]:
    """A shape, constant or put together of numbers, -1 where one is computed."""
    if op is None:
        return ()
    if op.type == _OP_TYPE_CONST:
        return op.ints
    if op.type != _OP_TYPE_CONCAT:
        return ()
    producers = [producer_by_tensor.get(input_tensor) for input_tensor in op.inputs]
    return tuple(
        part.ints[0] if part and part.type == _OP_TYPE_CONST and len(part.ints) == 1 else -1 for part in producers
    )


def _iter_ops(data: memoryview) -> Iterator[_GraphOp]:
    num_entries = 0
    for table in iter_tables(data, follow_offset(data, 0), _NET_OPS):
        type_position = find_field(data, table, _OP_TYPE)
        op_type = struct.unpack_from("<i", data, type_position)[0] if type_position else 0
        inputs, outputs = (read_ints(data, table, field_index) for field_index in (_OP_INPUTS, _OP_OUTPUTS))
        ints = _read_constant_ints(data, table) if op_type == _OP_TYPE_CONST else ()
        num_entries += len(inputs) + len(outputs) + len(ints)
        if 4 * num_entries > len(data):
            raise NotFlatBufferError("operators that share their vectors")
        yield _GraphOp(op_type, inputs, outputs, ints, *_read_layer_state(data, table, op_type))


def _read_layer_state(data: memoryview, op: int, op_type: int) -> tuple[StateKind, int | None]:
    """What a layer keeps, and the layer whose K and V it reads."""
    main_position = (
        find_field(data, op, _OP_MAIN) if op_type in (_OP_TYPE_ATTENTION, _OP_TYPE_LINEAR_ATTENTION) else None
    )
    table = follow_offset(data, main_position) if main_position else None
    if op_type == _OP_TYPE_LINEAR_ATTENTION:
        is_convolution = table is not None and _read_text(data, table, _LINEAR_ATTENTION_KIND) == _SHORT_CONVOLUTION
        return "recurrent" if is_convolution else "linear", None
    field = None if table is None else find_field(data, table, _ATTENTION_SHARED_WITH)
    shared_layer = -1 if field is None else int(struct.unpack_from("<i", data, field)[0])
    return ("full", None) if shared_layer < 0 else ("shared", shared_layer)


def _read_text(data: memoryview, table: int, field_index: int) -> str:
    start, num_bytes = find_vector(data, table, field_index, _MAX_NAME_BYTES)
    return bytes(data[start : start + num_bytes]).decode("utf-8", "replace")


def _read_constant_ints(data: memoryview, op: int) -> tuple[int, ...]:
    main_position = find_field(data, op, _OP_MAIN)
    return read_ints(data, follow_offset(data, main_position), _BLOB_INTS) if main_position else ()
