"""Read the RoPE parameters of each layer from the graph of an MNN model (``llm.mnn``), or determine those of a cache.

K of an attention operator is followed upwards to its projection. It also depends on the positions: multiplied by a
constant of frequencies whose sine and cosine are taken, or split in two numbers that select rows of tables of sines and
cosines (exports of MNN after 3.6.1), of which row r of the lower ones is for position r.

For rotating K of a cache further, the parameters come from the caller, the model, or a search.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ..._util.dataclass import dataclass
from ..._util.text import pluralize
from ...arrays.layers import LayerArray
from ...dense import RopeConfig, search_rope
from ...dense.rope import RopeFrequencies
from ...dense.rope_search import is_clearly_better, list_similar_ropes, rate_rotations
from ...dtypes import Elements, Positions
from ...errors import KvmnnError, OptionError, SourceError
from ...files.mapped_file import MappedFile
from ..llama.gguf import is_gguf, read_gguf_layer_ropes
from ..rope_config import LayerRopes, read_config_layer_ropes
from .model import (
    KEY_INPUT,
    OP_TYPE_ATTENTION,
    OP_TYPE_CONST,
    OP_TYPE_RESHAPE,
    GraphOp,
    NotFlatBufferError,
    find_graph,
    find_vector,
    read_graph_ops,
    read_ints,
    read_settings,
)

_OP_TYPE_BINARY, _OP_TYPE_GATHER, _OP_TYPE_INPUT, _OP_TYPE_SLICE, _OP_TYPE_UNARY = 7, 31, 34, 91, 101
_WALK_END_TYPES: Final = frozenset([12, 13, 39, 41, 66, 80, 307, OP_TYPE_ATTENTION])
"""Where the walk stops: convolutions, products of matrices, mixtures of experts, attention; and shapes of tensors."""
_BLOB_DIMS, _BLOB_FLOATS = 0, 7
_SLICE_STEPS_INPUT = 4  # which input of a slice has its steps

_MAX_LAYER_NODES = 4_096
_MAX_ALL_NODES = 1 << 18
_MAX_FLOATS = 1 << 24
_MAX_PAIRS = 4_096
_TABLE_TOLERANCE = 1e-4  # of sines and cosines: float32, or rounded to six digits


@dataclass
class _KeyDependencies:
    """Operators and constants that K of one layer depends on."""

    frequencies: set[int] = field(default_factory=set)
    tables: set[int] = field(default_factory=set)
    reaches_input: bool = False
    is_interleaved: bool = False
    is_complete: bool = True


def read_graph_rope(path: str | Path) -> LayerRopes | None:
    """Read how each layer rotates K; None if the file is not a graph, or if a layer rotates K in an unknown way."""
    file = MappedFile(path)
    try:
        return _RopeGraph(file.view(0, file.size).data).read_layer_ropes() if file.size else None
    except (struct.error, NotFlatBufferError, KvmnnError, ValueError, OverflowError):
        return None


def read_graph_rotary(path: str) -> RopeConfig | None:
    """Return the rotation that all layers of the graph in an MNN model's directory have; None if it has no such one."""
    graph = find_graph(path, read_settings(path) or {}) if os.path.isdir(path) else None
    ropes = None if graph is None else read_graph_rope(graph)
    if not ropes or ropes[0] is None:
        return None
    first = ropes[0]
    return first.to_config() if all(rope is not None and rope.is_equivalent(first) for rope in ropes) else None


class _RopeGraph:
    """The operators of a graph, and the producer and consumers of each tensor."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._ops = read_graph_ops(data)
        self._producer_by_tensor = {tensor: op for op in self._ops for tensor in op.outputs}
        self._consumers_by_tensor: dict[int, list[GraphOp]] = {}
        self._num_visited = 0
        for op in self._ops:
            for tensor in op.inputs:
                self._consumers_by_tensor.setdefault(tensor, []).append(op)

    def read_layer_ropes(self) -> LayerRopes | None:
        """Return the rotation of K of each attention operator; None if one is unclear, or there are none."""
        ropes: list[RopeFrequencies | None] = []
        rope_by_key: dict[Any, RopeFrequencies | None] = {}
        for op in self._ops:
            if op.type != OP_TYPE_ATTENTION or len(op.inputs) <= KEY_INPUT:
                continue
            dependencies = self._collect_dependencies(op.inputs[KEY_INPUT])
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
            for input_tensor in op.inputs[:1] if op.type in (OP_TYPE_RESHAPE, _OP_TYPE_SLICE) else op.inputs:
                if input_tensor not in visited:
                    visited.add(input_tensor)
                    queue.append(input_tensor)
        return dependencies

    def _record_op(self, op: GraphOp, dependencies: _KeyDependencies) -> None:
        """Record what one operator above K contributes to the rotation."""
        if op.type == _OP_TYPE_INPUT:
            dependencies.reaches_input = True
        elif op.type == _OP_TYPE_SLICE and len(op.inputs) > _SLICE_STEPS_INPUT:
            steps = self._producer_by_tensor.get(op.inputs[_SLICE_STEPS_INPUT])
            dependencies.is_interleaved |= steps is not None and 2 in steps.ints
        elif op.type == _OP_TYPE_GATHER and op.inputs and len(self._read_dims(op.inputs[0])) == 2:
            if self._is_constant(op.inputs[0]):
                dependencies.tables.add(op.inputs[0])
        elif op.type == _OP_TYPE_BINARY and all(self._is_angle(tensor) for tensor in op.outputs):
            dependencies.frequencies.update(filter(self._is_constant, op.inputs))

    def _is_angle(self, tensor: int) -> bool:
        """Return whether exactly two operators read a tensor and both are unary: sine and cosine of an angle."""
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
        return op.main_table if op is not None and op.type == OP_TYPE_CONST else None

    def _read_dims(self, tensor: int) -> tuple[int, ...]:
        blob = self._find_blob(tensor)
        return () if blob is None else read_ints(self._data, blob, _BLOB_DIMS)

    def _is_constant(self, tensor: int) -> bool:
        """Return whether a tensor is a constant of several float32 numbers."""
        blob = self._find_blob(tensor)
        return blob is not None and find_vector(self._data, blob, _BLOB_FLOATS, _MAX_FLOATS)[1] > 1

    def _read_floats(self, tensor: int) -> npt.NDArray[np.float32]:
        blob = self._find_blob(tensor)
        assert blob is not None  # `_is_constant` is asked first
        start, num_floats = find_vector(self._data, blob, _BLOB_FLOATS, _MAX_FLOATS)
        dims = read_ints(self._data, blob, _BLOB_DIMS)
        return np.frombuffer(self._data, "<f4", num_floats, start).reshape(dims or (num_floats,))


def _compute_table_angles(tables: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float64] | None:
    """Compute the frequencies from two tables of sines and two of cosines; None for tables of another form."""
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
    """Compute the angles of row 1, refined with the last row, whose angles are a known multiple of them."""
    first_angle, last_angle = (np.arctan2(sine[row].astype(np.float64), cosine[row]) for row in (1, -1))
    num_steps = len(sine) - 1
    turns = np.round((num_steps * first_angle - last_angle) / (2 * np.pi))
    refined: npt.NDArray[np.float64] = (last_angle + 2 * np.pi * turns) / num_steps
    return refined


def _is_close(expected: npt.NDArray[np.float64], actual: npt.NDArray[np.float32]) -> bool:
    return bool((np.abs(expected - actual) < _TABLE_TOLERANCE * 10).all())


_MAX_CHECKED_LAYERS: Final = 4
"""Number of layers whose K is checked against the model: wrong parameters show in any."""
_OWN_POSITION_MASKS: Final = ("glm", "glm2")
"""Values of `attention_mask` for which MNN's positions differ from the index in the text."""


@dataclass(frozen=True)
class ModelRope:
    """RoPE parameters of each layer of a model."""

    #: None for a layer that is not rotated.
    layers: LayerRopes
    #: Source of the parameters, as the end of a sentence.
    origin: str
    #: One line for each uncertainty.
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Return each different rotation; with several, also the number of layers that have it."""
        texts = Counter("no rotation" if rope is None else rope.label for rope in self.layers)
        if len(texts) == 1:
            return next(iter(texts))
        return " and ".join(f"{text} in {pluralize(num_layers, 'layer')}" for text, num_layers in texts.items())


def resolve_rope(
    key_arrays: Sequence[LayerArray],
    positions: Sequence[Positions],
    num_tokens: int,
    rope: RopeConfig | str | None = None,
    model: str | None = None,
    *,
    is_k_reordered: bool = False,
    ignore_contradictions: bool = False,
) -> ModelRope:
    """Determine how K is rotated.

    Parameters
    ----------
    positions
        Positions to which K of each layer is rotated, int64 ``[token]``.
    ignore_contradictions
        Take `RopeConfig` parameters that K contradicts, with a note.

    Raises
    ------
    SourceError
        When K contradicts the rotation, or nothing tells it.
    """
    if isinstance(rope, RopeConfig):
        if rope.dims > key_arrays[0].geometry[2]:
            raise OptionError(f"rope has {rope.dims} dims, the cache has heads of {key_arrays[0].geometry[2]}")
        caller_rope = ModelRope((RopeFrequencies.from_config(rope),) * len(key_arrays), "as given")
        evidence = _compare_with_keys(caller_rope, key_arrays, positions)
        if evidence.contradictions and not ignore_contradictions:
            raise SourceError(f"{evidence.contradictions[0]}: --ignore contradictions rotates by it all the same")
        origin = "as given and as K shows" if evidence.is_confirmed else "as given, not checked: K does not show it"
        return replace(
            caller_rope,
            origin="as given, though K contradicts it" if evidence.contradictions else origin,
            notes=evidence.contradictions,
        )
    path = rope or model
    if path is not None:
        model_rope = read_model_rope(
            path, len(key_arrays), key_arrays[0].geometry[2], num_tokens, is_k_reordered=is_k_reordered
        )
        if model_rope is not None:
            if doubts := _compare_with_keys(model_rope, key_arrays, positions).contradictions:
                raise SourceError(
                    f"{path}: {doubts[0]}: if it is right after all, give the rotation itself, with --ignore "
                    "contradictions"
                )
            return model_rope
        if rope is not None:
            raise SourceError(f"{path}: does not contain how K is rotated")
    return _search_layer_ropes(key_arrays, positions)


def read_model_rope(
    path: str, num_layers: int, head_dim: int, num_tokens: int, *, is_k_reordered: bool = False
) -> ModelRope | None:
    """Read the RoPE parameters of a model; None if it does not have them. Parameters and errors as `resolve_rope`."""
    if is_gguf(path):
        ropes = read_gguf_layer_ropes(path, num_layers, head_dim, num_tokens)
        if ropes is not None and is_k_reordered:
            if any(rope is not None and rope.dims != head_dim for rope in ropes):
                raise SourceError(f"{path}: rotates a part of each head, and K was brought into another order whole")
            ropes = tuple(None if rope is None else replace(rope, pairing="half") for rope in ropes)
        return None if ropes is None else ModelRope(ropes, f"as {path} has it")
    if os.path.isdir(path):
        fields = read_settings(path) or {}
        graph = find_graph(path, fields)
        if graph is not None and fields.get("attention_mask") in _OWN_POSITION_MASKS:
            raise SourceError(f"{path}: MNN gives tokens of this kind of model positions of their own")
        ropes = None if graph is None else read_graph_rope(graph)
        if ropes is not None:
            if len(ropes) != num_layers:
                raise SourceError(f"{graph}: has {pluralize(len(ropes), 'layer')}, the cache has {num_layers}")
            if any(rope is not None and rope.dims > head_dim for rope in ropes):
                raise SourceError(f"{graph}: rotates more elements than heads of {head_dim} have")
            notes = [f"{path}: right for tokens of text only (mrope)"] if fields.get("is_mrope") is True else []
            return ModelRope(ropes, f"as {graph} has it", tuple(notes))
        if not fields:
            return None
    ropes, doubts = read_config_layer_ropes(path, num_layers, head_dim, num_tokens)
    return None if ropes is None else ModelRope(ropes, f"as {path} has it", tuple(doubts))


@dataclass(frozen=True)
class _KeyEvidence:
    """What K of some layers shows about a rotation."""

    #: Sentences about layers whose K appears to be rotated in another way.
    contradictions: tuple[str, ...]
    #: Whether K of a layer shows the rotation, and none contradicts it.
    is_confirmed: bool


def _compare_with_keys(
    model_rope: ModelRope, key_arrays: Sequence[LayerArray], positions: Sequence[Positions]
) -> _KeyEvidence:
    """Compare a rotation with the one that a search finds in K, and with the other pairing."""
    layer_step = max(1, len(key_arrays) // _MAX_CHECKED_LAYERS)
    sentences, num_confirmed = [], 0
    for key, key_positions, rope in list(zip(key_arrays, positions, model_rope.layers, strict=True))[::layer_step]:
        elements = _read_head_major_elements(key)
        alternatives = _list_other_pairings(rope)
        trial_rope = search_rope(elements, key_positions, dtype=key.array.dtype)
        if trial_rope is not None:
            trial = RopeFrequencies.from_config(trial_rope)
            alternatives.append(trial)
            num_confirmed += rope is not None and trial.is_equivalent(rope)
        ratings = rate_rotations(elements, [rope, *alternatives], key_positions, dtype=key.array.dtype)
        for alternative, rating in zip(alternatives, ratings[1:], strict=False):
            if is_clearly_better(rating, ratings[0]) and not (rope is not None and alternative.is_equivalent(rope)):
                rope_text = "no rotation" if rope is None else rope.label
                sentences.append(f"K of layer {key.layer} looks rotated by {alternative.label}, not by {rope_text}")
                break
    return _KeyEvidence(tuple(sentences), num_confirmed > 0 and not sentences)


def _list_other_pairings(rope: RopeFrequencies | None) -> list[RopeFrequencies]:
    """Return the same frequencies with the other pairings of dimensions."""
    if rope is None:
        return []
    if rope.pairing == "interleaved":
        return [replace(rope, pairing="half", label=rope.label.replace(",pairing=interleaved", ""))]
    label = re.sub(r"(dims=\d+)", r"\1,pairing=interleaved", rope.label, count=1)
    return [replace(rope, pairing="interleaved", label=label)]


def _search_layer_ropes(key_arrays: Sequence[LayerArray], positions: Sequence[Positions]) -> ModelRope:
    """Search the rotation of each layer; a layer without a clear result gets the best of the other layers' results."""
    found_ropes = [
        search_rope(_read_head_major_elements(key), key_positions, dtype=key.array.dtype)
        for key, key_positions in zip(key_arrays, positions, strict=True)
    ]
    clear_ropes = {str(rotary): rotary for rotary in found_ropes if rotary is not None}
    layer_ropes = []
    for key, key_positions, rotary in zip(key_arrays, positions, found_ropes, strict=True):
        best = rotary or _select_best_rope(key, key_positions, list(clear_ropes.values()))
        if best is None:
            shown_text, options_text = "", "--rope theta=NUMBER,dims=NUMBER"
            if len(clear_ropes) == 1:
                # Not taken unasked: models leave layers unrotated, or rotate some by another theta.
                (name,), num_clear = clear_ropes, sum(rope is not None for rope in found_ropes)
                shown_text = f"; that of {num_clear} of {pluralize(len(key_arrays), 'layer')} is rotated by {name}"
                options_text = f"--rope {name}, if all layers are so,"
            raise SourceError(
                f"nothing tells how K is rotated, and K of layer {key.layer} ({pluralize(key.geometry[1], 'token')}) "
                f"does not show it{shown_text}: {options_text} gives it, or --model MODEL has it"
            )
        layer_ropes.append(RopeFrequencies.from_config(best))
    num_clear = sum(rotary is not None for rotary in found_ropes)
    return ModelRope(
        tuple(layer_ropes), f"found by trial, clearly in {num_clear} of {pluralize(len(key_arrays), 'layer')}"
    )


def _select_best_rope(key: LayerArray, positions: Positions, clear_ropes: Sequence[RopeConfig]) -> RopeConfig | None:
    """Return the one of `clear_ropes` that fits a layer best; None if another theta, or no rotation, fits better."""
    if not clear_ropes:
        return None
    similar_ropes = [similar_rope for rotary in clear_ropes for similar_rope in list_similar_ropes(rotary)]
    ropes = [*map(RopeFrequencies.from_config, [*clear_ropes, *similar_ropes]), None]
    ratings = rate_rotations(_read_head_major_elements(key), ropes, positions, dtype=key.array.dtype)
    if not ratings:
        return None
    best_index = int(np.argmax(ratings))
    return clear_ropes[best_index] if best_index < len(clear_ropes) else None


def _read_head_major_elements(key: LayerArray) -> Elements:
    elements = key.array.to_numpy().view(dtypes.parse_dtype(key.array.dtype).numpy_dtype)
    return np.ascontiguousarray(elements.transpose(1, 0, 2)) if key.token_major else elements
