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
from .flatbuffer import NotFlatBufferError, find_field, find_vector, follow, iter_tables, read_ints

_BINARY, _CONST, _GATHER, _INPUT, _RESHAPE = 7, 11, 31, 34, 73
_SLICE, _UNARY, _ATTENTION, _ROPE = 91, 101, 299, 306
_ENDS: Final = frozenset([12, 13, 39, 41, 66, 80, 307, 299])
"""Where the walk stops: convolutions, products of matrices, mixtures of experts, attention; and shapes of tensors."""
_NET_OPS = 3
_OP_INPUTS, _OP_MAIN, _OP_OUTPUTS, _OP_TYPE = 0, 2, 4, 5
_BLOB_DIMS, _BLOB_INTS, _BLOB_FLOATS = 0, 5, 7
_KEY = 1
_STEPS = 4  # which input of a slice has its steps

_MAX_NODES = 4_096
_MAX_ALL_NODES = 1 << 18
_MAX_FLOATS = 1 << 24
_MAX_PAIRS = 4_096
_TABLE_TOLERANCE = 1e-4  # of sines and cosines: float32, or rounded to six digits


@dataclass(frozen=True)
class _Op:
    type: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    table: int


@dataclass
class _Found:
    """What K of one layer depends on."""

    frequencies: set[int] = field(default_factory=set)
    tables: set[int] = field(default_factory=set)
    reaches_input: bool = False
    interleaved: bool = False
    complete: bool = True


def read_graph_rope(path: str | Path) -> LayerRopes | None:
    """Read how each layer rotates K; None for a file that is no graph, and where a layer does it in an unknown way."""
    file = MappedFile(path)
    try:
        return _Graph(file.view(0, file.size).data).layer_ropes() if file.size else None
    except (struct.error, NotFlatBufferError, KvmnnError, ValueError, OverflowError):
        return None


class _Graph:
    """The operators of a graph, and who makes and takes each tensor."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._ops: list[_Op] = []
        numbers = 0
        for table in iter_tables(data, follow(data, 0), _NET_OPS):
            kind = find_field(data, table, _OP_TYPE)
            inputs, outputs = (read_ints(data, table, end) for end in (_OP_INPUTS, _OP_OUTPUTS))
            number = struct.unpack_from("<i", data, kind)[0] if kind else 0
            self._ops.append(_Op(number, inputs, outputs, table))
            numbers += len(inputs) + len(outputs)
            if 4 * numbers > len(data):
                raise NotFlatBufferError("operators that share their vectors")
        self._makers = {tensor: op for op in self._ops for tensor in op.outputs}
        self._takers: dict[int, list[_Op]] = {}
        self._nodes = 0
        for op in self._ops:
            for tensor in op.inputs:
                self._takers.setdefault(tensor, []).append(op)

    def layer_ropes(self) -> LayerRopes | None:
        """How each attention operator's K is rotated; None where one is unclear, or there are none."""
        ropes: list[RopeFrequencies | None] = []
        known: dict[Any, RopeFrequencies | None] = {}
        for op in self._ops:
            if op.type != _ATTENTION or len(op.inputs) <= _KEY:
                continue
            found = self._walk(op.inputs[_KEY])
            if not found.complete:
                return None
            if not found.frequencies and not found.tables:
                if found.reaches_input:
                    return None
                ropes.append(None)  # K does not depend on positions
                continue
            key = frozenset(found.frequencies), frozenset(found.tables), found.interleaved
            if key not in known:
                known[key] = self._frequencies(found)
            if known[key] is None:
                return None
            ropes.append(known[key])
        return tuple(ropes) if any(ropes) else None

    def _walk(self, tensor: int) -> _Found:
        found, seen, waiting = _Found(), {tensor}, deque([tensor])
        while waiting:
            self._nodes += 1
            if len(seen) > _MAX_NODES or self._nodes > _MAX_ALL_NODES:
                found.complete = False
                break
            op = self._makers.get(waiting.popleft())
            if op is None or op.type in _ENDS:
                continue
            self._note(op, found)
            for each in op.inputs[:1] if op.type in (_RESHAPE, _SLICE) else op.inputs:
                if each not in seen:
                    seen.add(each)
                    waiting.append(each)
        return found

    def _note(self, op: _Op, found: _Found) -> None:
        """Take in what one operator above K tells."""
        if op.type == _INPUT:
            found.reaches_input = True
        elif op.type == _SLICE and len(op.inputs) > _STEPS:
            found.interleaved |= 2 in self._ints(op.inputs[_STEPS])
        elif op.type == _GATHER and op.inputs and len(self._dims(op.inputs[0])) == 2:
            if self._is_constant(op.inputs[0]):
                found.tables.add(op.inputs[0])
        elif op.type == _BINARY and all(self._is_angle(tensor) for tensor in op.outputs):
            found.frequencies.update(each for each in op.inputs if self._is_constant(each))

    def _is_angle(self, tensor: int) -> bool:
        """Whether all that takes a tensor are functions of one argument, of which two are: sine and cosine."""
        takers = self._takers.get(tensor, [])
        return len(takers) == 2 and all(op.type == _UNARY for op in takers)

    def _frequencies(self, found: _Found) -> RopeFrequencies | None:
        pairing = "interleaved" if found.interleaved else "half"
        radians: npt.NDArray[np.float64] | None = None
        if len(found.frequencies) == 1 and not found.tables:
            radians = self._floats(*found.frequencies).reshape(-1).astype(np.float64)
        elif len(found.tables) == 4 and not found.frequencies:
            radians = _angles_of_tables([self._floats(each) for each in sorted(found.tables)])
        if radians is None or not 0 < radians.size <= _MAX_PAIRS or not (np.isfinite(radians) & (radians >= 0)).all():
            return None
        return RopeFrequencies.from_radians(radians.tolist(), pairing)

    # -- constants -----------------------------------------------------------------------------------------------------

    def _blob(self, tensor: int) -> int | None:
        op = self._makers.get(tensor)
        place = find_field(self._data, op.table, _OP_MAIN) if op is not None and op.type == _CONST else None
        return follow(self._data, place) if place else None

    def _dims(self, tensor: int) -> tuple[int, ...]:
        blob = self._blob(tensor)
        return () if blob is None else read_ints(self._data, blob, _BLOB_DIMS)

    def _ints(self, tensor: int) -> tuple[int, ...]:
        blob = self._blob(tensor)
        return () if blob is None else read_ints(self._data, blob, _BLOB_INTS)

    def _is_constant(self, tensor: int) -> bool:
        """Whether a tensor is a constant of several float32 numbers."""
        blob = self._blob(tensor)
        return blob is not None and find_vector(self._data, blob, _BLOB_FLOATS, _MAX_FLOATS)[1] > 1

    def _floats(self, tensor: int) -> npt.NDArray[np.float32]:
        blob = self._blob(tensor)
        assert blob is not None  # `_is_constant` is asked first
        start, count = find_vector(self._data, blob, _BLOB_FLOATS, _MAX_FLOATS)
        dims = read_ints(self._data, blob, _BLOB_DIMS)
        return np.frombuffer(self._data, "<f4", count, start).reshape(dims or (count,))


def _angles_of_tables(tables: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float64] | None:
    """The frequencies in two tables of sines and two of cosines; None where they are others."""
    if any(table.ndim != 2 or len(table) < 2 or table.shape[1] != tables[0].shape[1] for table in tables):
        return None
    sines = [table for table in tables if not table[0].any()]
    cosines = [table for table in tables if (table[0] == 1).all()]
    if len(sines) != 2 or len(cosines) != 2:
        return None
    for sine in sines:
        for cosine in (each for each in cosines if len(each) == len(sine)):
            upper = next(each for each in sines if each is not sine)
            radians = _angles_of_rows(sine, cosine)
            if _differs_little(np.sin(len(sine) * radians), upper[1]) and _differs_little(np.sin(radians), sine[1]):
                return radians
    return None


def _angles_of_rows(sine: npt.NDArray[np.float32], cosine: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The angle of row 1, made more exact by the last row, which is as many times as far around the circle."""
    first, last = (np.arctan2(sine[row].astype(np.float64), cosine[row]) for row in (1, -1))
    rows = len(sine) - 1
    turns = np.round((rows * first - last) / (2 * np.pi))
    refined: npt.NDArray[np.float64] = (last + 2 * np.pi * turns) / rows
    return refined


def _differs_little(expected: npt.NDArray[np.float64], found: npt.NDArray[np.float32]) -> bool:
    return bool((np.abs(expected - found) < _TABLE_TOLERANCE * 10).all())
