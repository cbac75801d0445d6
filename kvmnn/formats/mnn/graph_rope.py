"""How the graph of an MNN model (``llm.mnn``) rotates K of each layer: the frequencies that the engine computes with.

K of an attention operator is followed upwards to the projection that made it. What else it depends on are the
positions: multiplied by a constant of frequencies whose sine and cosine are taken, or split in two numbers that choose
rows of tables of sines and cosines (exports of MNN after 3.6.1), of which row r of the lower ones is for position r.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...dense.frequencies import RopeFrequencies
from ...errors import KvmnnError
from ...files.mapped import MappedFile
from ..layer_rope import LayerRopes
from .flatbuffer import NotFlatBufferError, find_field, find_vector, follow_offset, iter_tables, read_ints

_OP_TYPE_BINARY, _OP_TYPE_CONST, _OP_TYPE_GATHER, _OP_TYPE_INPUT, _OP_TYPE_RESHAPE = 7, 11, 31, 34, 73
_OP_TYPE_SLICE, _OP_TYPE_UNARY, _OP_TYPE_ATTENTION, _OP_TYPE_ROPE = 91, 101, 299, 306
_WALK_END_TYPES: Final = frozenset([12, 13, 39, 41, 66, 80, 307, 299])
"""Where the walk stops: convolutions, products of matrices, mixtures of experts, attention; and shapes of tensors."""
_NET_OPS = 3
_OP_INPUTS, _OP_MAIN, _OP_OUTPUTS, _OP_TYPE = 0, 2, 4, 5
_BLOB_DIMS, _BLOB_INTS, _BLOB_FLOATS = 0, 5, 7
_KEY_INPUT = 1
_SLICE_STEPS_INPUT = 4  # which input of a slice has its steps

_MAX_LAYER_NODES = 4_096
_MAX_ALL_NODES = 1 << 18
_MAX_FLOATS = 1 << 24
_MAX_PAIRS = 4_096
_TABLE_TOLERANCE = 1e-4  # of sines and cosines: float32, or rounded to six digits


@dataclass(frozen=True)
class _RopeOp:
    type: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    table: int


@dataclass
class _KeyDependencies:
    """What K of one layer depends on."""

    frequencies: set[int] = field(default_factory=set)
    tables: set[int] = field(default_factory=set)
    reaches_input: bool = False
    is_interleaved: bool = False
    is_complete: bool = True


def read_graph_rope(path: str | Path) -> LayerRopes | None:
    """Read how each layer rotates K; None for a file that is no graph, and where a layer does it in an unknown way."""
    file = MappedFile(path)
    try:
        return _RopeGraph(file.view(0, file.size).data).read_layer_ropes() if file.size else None
    except (struct.error, NotFlatBufferError, KvmnnError, ValueError, OverflowError):
        return None


class _RopeGraph:
    """The operators of a graph, and who makes and takes each tensor."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._ops: list[_RopeOp] = []
        num_entries = 0
        for table in iter_tables(data, follow_offset(data, 0), _NET_OPS):
            type_position = find_field(data, table, _OP_TYPE)
            inputs, outputs = (read_ints(data, table, field_index) for field_index in (_OP_INPUTS, _OP_OUTPUTS))
            op_type = struct.unpack_from("<i", data, type_position)[0] if type_position else 0
            self._ops.append(_RopeOp(op_type, inputs, outputs, table))
            num_entries += len(inputs) + len(outputs)
            if 4 * num_entries > len(data):
                raise NotFlatBufferError("operators that share their vectors")
        self._producer_by_tensor = {tensor: op for op in self._ops for tensor in op.outputs}
        self._consumers_by_tensor: dict[int, list[_RopeOp]] = {}
        self._num_visited = 0
        for op in self._ops:
            for tensor in op.inputs:
                self._consumers_by_tensor.setdefault(tensor, []).append(op)

    def read_layer_ropes(self) -> LayerRopes | None:
        """How each attention operator's K is rotated; None where one is unclear, or there are none."""
        ropes: list[RopeFrequencies | None] = []
        rope_by_key: dict[Any, RopeFrequencies | None] = {}
        for op in self._ops:
            if op.type != _OP_TYPE_ATTENTION or len(op.inputs) <= _KEY_INPUT:
                continue
            dependencies = self._collect_dependencies(op.inputs[_KEY_INPUT])
            if not dependencies.is_complete:
                return None
            if not dependencies.frequencies and not dependencies.tables:
                if dependencies.reaches_input:
                    return None
                ropes.append(None)  # K does not depend on positions
                continue
            key = frozenset(dependencies.frequencies), frozenset(dependencies.tables), dependencies.is_interleaved
            if key not in rope_by_key:
                rope_by_key[key] = self._compute_frequencies(dependencies)
            if rope_by_key[key] is None:
                return None
            ropes.append(rope_by_key[key])
        return tuple(ropes) if any(ropes) else None

    def _collect_dependencies(self, tensor: int) -> _KeyDependencies:
        dependencies, visited, queue = _KeyDependencies(), {tensor}, deque([tensor])
        while queue:
            self._num_visited += 1
            if len(visited) > _MAX_LAYER_NODES or self._num_visited > _MAX_ALL_NODES:
                dependencies.is_complete = False
                break
            op = self._producer_by_tensor.get(queue.popleft())
            if op is None or op.type in _WALK_END_TYPES:
                continue
            self._record_op(op, dependencies)
            for input_tensor in op.inputs[:1] if op.type in (_OP_TYPE_RESHAPE, _OP_TYPE_SLICE) else op.inputs:
                if input_tensor not in visited:
                    visited.add(input_tensor)
                    queue.append(input_tensor)
        return dependencies

    def _record_op(self, op: _RopeOp, dependencies: _KeyDependencies) -> None:
        """Take in what one operator above K tells."""
        if op.type == _OP_TYPE_INPUT:
            dependencies.reaches_input = True
        elif op.type == _OP_TYPE_SLICE and len(op.inputs) > _SLICE_STEPS_INPUT:
            dependencies.is_interleaved |= 2 in self._read_blob_ints(op.inputs[_SLICE_STEPS_INPUT])
        elif op.type == _OP_TYPE_GATHER and op.inputs and len(self._read_dims(op.inputs[0])) == 2:
            if self._is_constant(op.inputs[0]):
                dependencies.tables.add(op.inputs[0])
        elif op.type == _OP_TYPE_BINARY and all(self._is_angle(tensor) for tensor in op.outputs):
            dependencies.frequencies.update(
                input_tensor for input_tensor in op.inputs if self._is_constant(input_tensor)
            )

    def _is_angle(self, tensor: int) -> bool:
        """Whether all that takes a tensor are functions of one argument, of which two are: sine and cosine."""
        consumers = self._consumers_by_tensor.get(tensor, [])
        return len(consumers) == 2 and all(op.type == _OP_TYPE_UNARY for op in consumers)

    def _compute_frequencies(self, dependencies: _KeyDependencies) -> RopeFrequencies | None:
        pairing = "interleaved" if dependencies.is_interleaved else "half"
        radians: npt.NDArray[np.float64] | None = None
        if len(dependencies.frequencies) == 1 and not dependencies.tables:
            radians = self._read_floats(*dependencies.frequencies).reshape(-1).astype(np.float64)
        elif len(dependencies.tables) == 4 and not dependencies.frequencies:
            radians = _compute_table_angles([self._read_floats(table) for table in sorted(dependencies.tables)])
        if radians is None or not 0 < radians.size <= _MAX_PAIRS or not (np.isfinite(radians) & (radians >= 0)).all():
            return None
        return RopeFrequencies.from_radians(radians.tolist(), pairing)

    # -- constants -----------------------------------------------------------------------------------------------------

    def _find_blob(self, tensor: int) -> int | None:
        op = self._producer_by_tensor.get(tensor)
        main_position = (
            find_field(self._data, op.table, _OP_MAIN) if op is not None and op.type == _OP_TYPE_CONST else None
        )
        return follow_offset(self._data, main_position) if main_position else None

    def _read_dims(self, tensor: int) -> tuple[int, ...]:
        blob = self._find_blob(tensor)
        return () if blob is None else read_ints(self._data, blob, _BLOB_DIMS)

    def _read_blob_ints(self, tensor: int) -> tuple[int, ...]:
        blob = self._find_blob(tensor)
        return () if blob is None else read_ints(self._data, blob, _BLOB_INTS)

    def _is_constant(self, tensor: int) -> bool:
        """Whether a tensor is a constant of several float32 numbers."""
        blob = self._find_blob(tensor)
        return blob is not None and find_vector(self._data, blob, _BLOB_FLOATS, _MAX_FLOATS)[1] > 1

    def _read_floats(self, tensor: int) -> npt.NDArray[np.float32]:
        blob = self._find_blob(tensor)
        assert blob is not None  # `_is_constant` is asked first
        start, num_floats = find_vector(self._data, blob, _BLOB_FLOATS, _MAX_FLOATS)
        dims = read_ints(self._data, blob, _BLOB_DIMS)
        return np.frombuffer(self._data, "<f4", num_floats, start).reshape(dims or (num_floats,))


def _compute_table_angles(tables: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float64] | None:
    """The frequencies in two tables of sines and two of cosines; None where they are others."""
    if any(table.ndim != 2 or len(table) < 2 or table.shape[1] != tables[0].shape[1] for table in tables):
        return None
    sines = [table for table in tables if not table[0].any()]
    cosines = [table for table in tables if (table[0] == 1).all()]
    if len(sines) != 2 or len(cosines) != 2:
        return None
    for sine in sines:
        for cosine in (candidate for candidate in cosines if len(candidate) == len(sine)):
            upper_sine = next(candidate for candidate in sines if candidate is not sine)
            radians = _compute_row_angles(sine, cosine)
            if _is_close(np.sin(len(sine) * radians), upper_sine[1]) and _is_close(np.sin(radians), sine[1]):
                return radians
    return None


def _compute_row_angles(sine: npt.NDArray[np.float32], cosine: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The angle of row 1, made more exact by the last row, which is as many times as far around the circle."""
    first_angle, last_angle = (np.arctan2(sine[row].astype(np.float64), cosine[row]) for row in (1, -1))
    num_steps = len(sine) - 1
    turns = np.round((num_steps * first_angle - last_angle) / (2 * np.pi))
    refined: npt.NDArray[np.float64] = (last_angle + 2 * np.pi * turns) / num_steps
    return refined


def _is_close(expected: npt.NDArray[np.float64], actual: npt.NDArray[np.float32]) -> bool:
    return bool((np.abs(expected - actual) < _TABLE_TOLERANCE * 10).all())
