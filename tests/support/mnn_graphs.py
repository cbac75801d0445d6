"""Graphs of MNN models as FlatBuffers, written from its schema without kvmnn: what a test needs of K's rotation.

Operators are objects with a type, inputs, outputs and, of constants, numbers. Tensor 0 is the positions, 1 the hidden
state. The writer puts every table after the one that refers to it, each with a vtable of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BINARY, CAST, CONCAT, CONST, CONVOLUTION, GATHER, INPUT = 7, 9, 10, 11, 12, 31, 34
RESHAPE, SHAPE, SLICE, UNARY, ATTENTION, ROPE = 73, 80, 91, 101, 299, 306
_NET_OPS, _OP_INPUTS, _OP_MAIN, _OP_OUTPUTS, _OP_TYPE = 3, 0, 2, 4, 5
_BLOB_DIMS, _BLOB_INTS, _BLOB_FLOATS = 0, 5, 7


@dataclass
class Op:
    """An operator; `value` is that of a constant."""

    type: int
    inputs: Sequence[int]
    outputs: Sequence[int]
    value: Any = None


@dataclass
class Graph:
    """Operators in order; every method adds some and returns the number of the tensor they make."""

    ops: list[Op] = field(default_factory=lambda: [Op(INPUT, [], [0]), Op(INPUT, [], [1])])
    tensors: int = 2

    def add(self, kind: int, *inputs: int, value: Any = None) -> int:
        self.ops.append(Op(kind, inputs, [self.tensors], value))
        self.tensors += 1
        return self.tensors - 1

    def constant(self, value: Any) -> int:
        return self.add(CONST, value=np.asarray(value))

    def angles(self, frequencies: np.ndarray) -> int:
        """Sine and cosine of position times frequency."""
        positions = self.add(RESHAPE, self.add(CAST, 0), self.constant(np.array([-1, 1], np.int32)))
        product = self.add(BINARY, positions, self.constant(frequencies.astype(np.float32)))
        return self.add(CONCAT, self.add(UNARY, product), self.add(UNARY, product))

    def tables(self, frequencies: np.ndarray, rows: int = 64, upper_rows: int = 5) -> int:
        """Sine and cosine out of tables, of the position divided by `rows` and of the rest."""
        lower = np.arange(rows)[:, None] * frequencies
        upper = np.arange(upper_rows)[:, None] * (rows * frequencies)
        quotient = self.add(
            BINARY, self.add(RESHAPE, 0, self.constant(np.array([-1], np.int32))), self.constant([rows])
        )
        rest = self.add(BINARY, 0, quotient)
        found = [
            self.add(GATHER, self.constant(function(angles).astype(np.float32)), index)
            for angles, index in ((upper, quotient), (lower, rest))
            for function in (np.cos, np.sin)
        ]
        products = [self.add(BINARY, found[a], found[b]) for a, b in ((0, 2), (1, 3), (1, 2), (0, 3))]
        return self.add(CONCAT, self.add(BINARY, *products[:2]), self.add(BINARY, *products[2:]))

    def layer(self, rotation: int | None, *, step: int = 1, fused: bool = False) -> None:
        """Projections, the rotation of K by a tensor of sines and cosines, and attention."""
        query, key, value = (self.add(CONVOLUTION, 1) for _ in range(3))
        heads = self.add(CONCAT, self.add(SHAPE, 1), self.constant(np.array([2, 16], np.int32)))
        key = self.add(RESHAPE, key, heads)
        if rotation is not None and fused:
            key = self.add(ROPE, query, key, rotation)
        elif rotation is not None:
            ends = [self.constant(np.array([end], np.int32)) for end in (0, 1 << 30, 3, step)]
            turned = self.add(CONCAT, self.add(UNARY, self.add(SLICE, key, *ends)), self.add(SLICE, key, *ends))
            key = self.add(BINARY, self.add(BINARY, key, rotation), self.add(BINARY, turned, rotation))
        self.add(CONVOLUTION, self.add(ATTENTION, query, key, value))

    def to_bytes(self) -> bytes:
        """The file."""
        tables = [_op(op) for op in self.ops]
        return _place([(0, _table({_NET_OPS: _vector_of_tables(tables)}))])


# -- FlatBuffers: nested parts, each bytes with the places of offsets to further parts ---------------------------------

_Part = tuple[bytes, list[tuple[int, Any]]]


def _table(fields: dict[int, Any]) -> _Part:
    """A table of inline integers and of parts that fields refer to; its vtable comes first, so it begins later."""
    slots = max(fields, default=-1) + 1
    vtable = struct.pack("<HH", 4 + 2 * slots, 4 + 4 * len(fields))
    body, references = b"", []
    offsets = [0] * slots
    for number, value in sorted(fields.items()):
        offsets[number] = 4 + len(body)
        if not isinstance(value, int):
            references.append((4 + len(body), value))
        body += struct.pack("<i", value if isinstance(value, int) else 0)
    vtable += struct.pack(f"<{slots}H", *offsets)
    vtable += bytes(-len(vtable) % 4)
    head = struct.pack("<i", len(vtable))
    return vtable + head + body, [(len(vtable) + place, part) for place, part in references] + [(-1, len(vtable))]


def _vector(format: str, values: Sequence[Any]) -> _Part:
    return struct.pack(f"<I{len(values)}{format}", len(values), *values), []


def _vector_of_tables(parts: Sequence[_Part]) -> _Part:
    return struct.pack("<I", len(parts)) + bytes(4 * len(parts)), [(4 + 4 * n, part) for n, part in enumerate(parts)]


def _op(op: Op) -> _Part:
    fields: dict[int, Any] = {_OP_INPUTS: _vector("i", op.inputs), _OP_OUTPUTS: _vector("i", op.outputs)}
    fields[_OP_TYPE] = op.type
    if op.value is not None:
        values = op.value.reshape(-1).tolist()
        kind = (_BLOB_FLOATS, "f") if op.value.dtype.kind == "f" else (_BLOB_INTS, "i")
        fields[_OP_MAIN] = _table({_BLOB_DIMS: _vector("i", op.value.shape), kind[0]: _vector(kind[1], values)})
    return _table(fields)


def _place(roots: list[tuple[int, _Part]]) -> bytes:
    """Lay all parts out, breadth first, and fill in the offsets."""
    data = bytearray(4)
    waiting = list(roots)
    while waiting:
        place, (content, references) = waiting.pop(0)
        begin = len(data)
        data += content + bytes(-len(content) % 4)
        shift = next((number for at, number in references if at == -1), 0)  # tables begin after their vtable
        struct.pack_into("<I", data, place, begin + shift - place)
        waiting += [(begin + at, part) for at, part in references if at != -1]
    return bytes(data)
