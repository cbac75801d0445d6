"""Properties of a cache in the directory of its MNN model: geometry, and a fingerprint.

The graph (``llm.mnn``) is a FlatBuffer, a `Net` of MNN's schema, of which only operators and small constants are read.
Each attention operator takes K that was reshaped to ``[batch, token, kv_head, head_dim]``; the last two are constants.
Its bytes are unvalidated: reading outside them raises `struct.error`.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, Final, Literal

from ..._util.dataclass import dataclass
from ..._util.named_tuple import NamedTuple
from ...arrays.completeness import LayerStateInfo, StateKind
from ...errors import OptionError, SourceError, build_read_error
from ...files.mapped_file import MappedFile
from ...files.schema import read_object
from ...packed.params import FLASH_BLOCK
from ..llama.gguf import is_gguf, read_model_layers

MAX_TABLES = 100_000
MAX_VECTOR_ENTRIES = 1_000


class NotFlatBufferError(Exception):
    """The bytes are not those of a FlatBuffer."""


def follow_offset(data: memoryview, offset_position: int) -> int:
    """Return the position to which the offset at `offset_position` points."""
    return offset_position + int(struct.unpack_from("<I", data, offset_position)[0])


def find_field(data: memoryview, table: int, field_index: int) -> int | None:
    """Return the position of a field of a table; None if it is omitted."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise NotFlatBufferError("table of fields before the file")
    if 4 + 2 * field_index >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * field_index)[0]
    return table + offset if offset else None


def find_vector(data: memoryview, table: int, field_index: int, max_entries: int) -> tuple[int, int]:
    """Return the position of a vector's entries, and their number; above `max_entries` it counts as empty."""
    field_position = find_field(data, table, field_index)
    if field_position is None:
        return 0, 0
    vector_start = follow_offset(data, field_position)
    num_entries = int(struct.unpack_from("<I", data, vector_start)[0])
    return vector_start + 4, num_entries if num_entries <= max_entries else 0


def read_ints(data: memoryview, table: int, field_index: int) -> tuple[int, ...]:
    """Return a vector of 32-bit integers of at most `MAX_VECTOR_ENTRIES` entries."""
    start, num_entries = find_vector(data, table, field_index, MAX_VECTOR_ENTRIES)
    return struct.unpack_from(f"<{num_entries}i", data, start)


def iter_tables(data: memoryview, table: int, field_index: int) -> Iterator[int]:
    """Iterate over the tables of a vector of at most `MAX_TABLES` entries."""
    start, num_tables = find_vector(data, table, field_index, MAX_TABLES)
    for index in range(num_tables):
        yield follow_offset(data, start + 4 * index)


_OP_TYPE_CONCAT, OP_TYPE_CONST, OP_TYPE_RESHAPE, OP_TYPE_ATTENTION, _OP_TYPE_LINEAR_ATTENTION = 10, 11, 73, 299, 305
"""Numbers of `OpType`."""
_NET_OPS = 3
_OP_INPUTS, _OP_MAIN, _OP_OUTPUTS, _OP_TYPE = 0, 2, 4, 5
_BLOB_INTS = 5
_ATTENTION_SHARED_LAYER_FIELD = 3
_LINEAR_ATTENTION_KIND_FIELD = 0
_SHORT_CONVOLUTION: Final = "short_conv"
_MAX_NAME_BYTES: Final = 100
KEY_INPUT = 1
"""Which input of an attention operator is K."""

_MAX_WALKED_OPS = 64
"""Operators that may lie between an attention operator and the reshaping of its K, norms and rotation included."""


@dataclass(frozen=True)
class GraphGeometry:
    """Geometry in a graph."""

    #: Number of operators of attention and of linear attention.
    num_layers: int
    #: Values of all attention operators; None if they differ, or if K is reshaped in an unknown way.
    kv_heads: int | None
    head_dim: int | None
    #: State of each layer.
    states: tuple[LayerStateInfo, ...] = ()
    #: Kv heads and head_dim of each layer; (None, None) if it has none or they are unknown.
    layer_geometry: tuple[tuple[int | None, int | None], ...] = ()


def read_graph_geometry(path: str | Path) -> GraphGeometry | None:
    """Return the geometry in a graph; None for a file that is no graph, or one without attention operators."""
    file = MappedFile(path)
    try:
        data = file.view(0, file.size).data if file.size else memoryview(b"")
        ops = read_graph_ops(data) if file.size else []
        layers = [
            op for op in ops if op.type in (OP_TYPE_ATTENTION, _OP_TYPE_LINEAR_ATTENTION) and len(op.inputs) > KEY_INPUT
        ]
        states = tuple(_read_layer_state(data, op, layer_number) for layer_number, op in enumerate(layers))
    except (struct.error, NotFlatBufferError):
        return None
    if not any(op.type == OP_TYPE_ATTENTION for op in layers):
        return None
    producer_by_tensor = {tensor: op for op in ops for tensor in op.outputs}
    layer_geometry = tuple(
        _find_reshape_axes(op.inputs[KEY_INPUT], producer_by_tensor) if state.kind == "full" else (None, None)
        for op, state in zip(layers, states, strict=True)
    )
    distinct_geometries = {
        heads_and_dim for heads_and_dim, state in zip(layer_geometry, states, strict=True) if state.kind == "full"
    }
    kv_heads, head_dim = distinct_geometries.pop() if len(distinct_geometries) == 1 else (None, None)
    return GraphGeometry(len(layers), kv_heads, head_dim, states, layer_geometry)


class GraphOp(NamedTuple):
    """An operator of a graph."""

    type: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    #: Of a constant; else empty.
    ints: tuple[int, ...]
    #: Where its constant, or the parameters of attention, lie; None where it has none.
    main_table: int | None


def read_graph_ops(data: memoryview) -> list[GraphOp]:
    """Read the operators of a graph; `struct.error` and `NotFlatBufferError` for bytes that are none."""
    ops: list[GraphOp] = []
    num_entries = 0
    for table in iter_tables(data, follow_offset(data, 0), _NET_OPS):
        type_position = find_field(data, table, _OP_TYPE)
        op_type = struct.unpack_from("<i", data, type_position)[0] if type_position else 0
        inputs, outputs = (read_ints(data, table, field_index) for field_index in (_OP_INPUTS, _OP_OUTPUTS))
        has_main = op_type in (OP_TYPE_CONST, OP_TYPE_ATTENTION, _OP_TYPE_LINEAR_ATTENTION)
        main_position = find_field(data, table, _OP_MAIN) if has_main else None
        main_table = follow_offset(data, main_position) if main_position else None
        ints = read_ints(data, main_table, _BLOB_INTS) if main_table and op_type == OP_TYPE_CONST else ()
        num_entries += len(inputs) + len(outputs) + len(ints)
        if 4 * num_entries > len(data):
            raise NotFlatBufferError("operators that share their vectors")
        ops.append(GraphOp(op_type, inputs, outputs, ints, main_table))
    return ops


def _find_reshape_axes(tensor: int, producer_by_tensor: dict[int, GraphOp]) -> tuple[int | None, int | None]:
    """Return the last two axes of the nearest tensor above `tensor` that was reshaped to constants."""
    visited, queue = {tensor}, deque([tensor])
    while queue and len(visited) < _MAX_WALKED_OPS:
        op = producer_by_tensor.get(queue.popleft())
        if op is None:
            continue
        if op.type == OP_TYPE_RESHAPE and len(op.inputs) == 2:
            shape = _resolve_shape(producer_by_tensor.get(op.inputs[1]), producer_by_tensor)
            if len(shape) >= 3 and min(shape[-2:]) > 0:
                return shape[-2], shape[-1]
        for input_tensor in op.inputs:
            if input_tensor not in visited:
                visited.add(input_tensor)
                queue.append(input_tensor)
    return None, None


def _resolve_shape(op: GraphOp | None, producer_by_tensor: dict[int, GraphOp]) -> tuple[int, ...]:
    """Return a shape, constant or concatenated from numbers, with -1 for computed ones."""
    if op is None or op.type != _OP_TYPE_CONCAT:
        return op.ints if op is not None else ()
    producers = [producer_by_tensor.get(input_tensor) for input_tensor in op.inputs]
    return tuple(part.ints[0] if part and len(part.ints) == 1 else -1 for part in producers)


def _read_layer_state(data: memoryview, op: GraphOp, layer_number: int) -> LayerStateInfo:
    """Return the state kind of a layer, and the layer whose K and V it reads, or None."""
    table = op.main_table
    if op.type == _OP_TYPE_LINEAR_ATTENTION:
        is_convolution = (
            table is not None and _read_text(data, table, _LINEAR_ATTENTION_KIND_FIELD) == _SHORT_CONVOLUTION
        )
        return LayerStateInfo(layer=layer_number, kind="recurrent" if is_convolution else "linear")
    field = None if table is None else find_field(data, table, _ATTENTION_SHARED_LAYER_FIELD)
    shared_layer = -1 if field is None else int(struct.unpack_from("<i", data, field)[0])
    if shared_layer < 0:
        return LayerStateInfo(layer=layer_number)
    return LayerStateInfo(layer=layer_number, kind="shared", shared_with=shared_layer)


def _read_text(data: memoryview, table: int, field_index: int) -> str:
    start, num_bytes = find_vector(data, table, field_index, _MAX_NAME_BYTES)
    return bytes(data[start : start + num_bytes]).decode("utf-8", "replace")


_SETTINGS_FILES = ("llm_config.json", "config.json")
_WEIGHT_SUFFIXES = (".mnn", ".mnn.weight", ".bin", ".safetensors")
_ATTENTION_MODES_PER_KIND = 8
_MAX_LAYERS: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """Geometry of a model; None for what its files do not contain."""

    #: Number of layers of the language model.
    num_layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    #: 64 or ``"none"``, if ``config.json`` sets ``attention_mode``.
    flash_block: int | Literal["none"] | None = None
    #: Value in ``llm_config.json``: the engine loads layers of different sizes only with ``"mix"``.
    attention_type: str | None = None
    #: State of each layer; empty if unknown.
    states: tuple[LayerStateInfo, ...] = ()
    #: Kv heads and head_dim of each layer, if known and different; else empty.
    layer_geometry: tuple[tuple[int | None, int | None], ...] = ()

    @property
    def full_layer_heads(self) -> tuple[tuple[int | None, int | None], ...]:
        """Kv heads and head_dim of each layer with K and V of its own; empty as `layer_geometry`."""
        layers = zip(self.layer_geometry, self.states, strict=True) if self.layer_geometry else ()
        return tuple(heads for heads, state in layers if state.kind == "full")

    @property
    def file_states(self) -> tuple[LayerStateInfo, ...]:
        """Return the states of the layers that have files: not those that read K and V of another layer."""
        return tuple(state for state in self.states if state.kind != "shared")


def read_model_geometry(path: str) -> ModelGeometry:
    """Return the geometry in ``llm_config.json``, ``config.json`` and the graph of a model directory.

    An export of MNN has ``layer_nums``, and older ones ``key_value_shape``, which ends in ``kv_heads, head_dim``. If
    those are missing, the names of Hugging Face configurations (``num_hidden_layers``, ``num_key_value_heads``,
    ``head_dim``) are used, and then the attention operators of the graph (``llm_model``, else ``llm.mnn``). For a
    ``.gguf`` file its header is used; None for values that differ between layers.
    """
    if is_gguf(path):
        return _read_gguf_model_geometry(path)
    settings = read_settings(path)
    fields = settings or {}
    graph = find_graph(path, fields)
    if settings is None and graph is None:
        raise SourceError(f"{path}: has neither llm_config.json nor config.json, so it is not an MNN model directory")
    settings_geometry = _parse_settings_geometry(fields)
    if layer_geometry := _parse_layer_geometry(fields, settings_geometry.states):
        settings_geometry = replace(settings_geometry, layer_geometry=layer_geometry, kv_heads=None, head_dim=None)
    graph_geometry = read_graph_geometry(graph) if graph is not None else None
    if graph_geometry is None:
        return settings_geometry
    is_varying = len({heads for heads in graph_geometry.layer_geometry if None not in heads}) > 1
    return replace(
        settings_geometry,
        num_layers=settings_geometry.num_layers or graph_geometry.num_layers,
        kv_heads=None if is_varying else settings_geometry.kv_heads or graph_geometry.kv_heads,
        head_dim=None if is_varying else settings_geometry.head_dim or graph_geometry.head_dim,
        states=graph_geometry.states
        if settings_geometry.num_layers in (None, graph_geometry.num_layers)
        else settings_geometry.states,
        layer_geometry=graph_geometry.layer_geometry if is_varying else settings_geometry.layer_geometry,
    )


def read_settings(path: str) -> dict[str, Any] | None:
    """Return the fields of the settings in a model directory, ``llm_config.json`` first; None where it has neither."""
    files = [file for name in _SETTINGS_FILES if (file := Path(path, name)).is_file()]
    fields: dict[str, Any] = {}
    for file in files:
        fields = read_object(file, allow_nan=True) | fields
    return fields if files else None


def _read_gguf_model_geometry(path: str) -> ModelGeometry:
    layers = [layer for layer in read_model_layers(path) or () if layer.kv_heads and layer.state.kind != "shared"]
    kv_heads, head_dims = {layer.kv_heads for layer in layers}, {layer.head_dim for layer in layers}
    return ModelGeometry(
        num_layers=len(layers) or None,
        kv_heads=kv_heads.pop() if len(kv_heads) == 1 else None,
        head_dim=head_dims.pop() if len(head_dims) == 1 else None,
    )


def check_model_agrees(
    path: str, model: ModelGeometry, kv_heads: int | None, head_dim: int | None, num_layers: int | None = None
) -> None:
    """Raise `OptionError` if kv heads, dimensions or layers of a cache differ from those of the model at `path`."""
    for name, cache_value, model_value in (
        ("kv heads", kv_heads, model.kv_heads),
        ("head_dim", head_dim, model.head_dim),
        ("layers", num_layers, model.num_layers),
    ):
        if None not in (cache_value, model_value) and cache_value != model_value:
            raise OptionError(f"{name}: {cache_value} for the cache, but the model in {path} has {model_value}")


def find_graph(path: str, fields: dict[str, Any]) -> Path | None:
    """Return the path of the graph in a model directory with settings `fields`; None if there is none."""
    name = fields.get("llm_model")
    is_plain = isinstance(name, str) and name == PurePath(name).name and "\0" not in name
    graph = Path(path, str(name) if is_plain else "llm.mnn")
    return graph if graph.is_file() else None


def _parse_settings_geometry(fields: dict[str, Any]) -> ModelGeometry:
    """Return the geometry in the settings."""
    text_fields = _merge_text_config(fields)
    shape = fields.get("key_value_shape")
    kv_heads = head_dim = None
    if isinstance(shape, list) and len(shape) >= 2:
        kv_heads, head_dim = _parse_natural(shape[-2]), _parse_natural(shape[-1])
    return ModelGeometry(
        num_layers=_parse_natural(fields.get("layer_nums")) or _parse_natural(text_fields.get("num_hidden_layers")),
        kv_heads=kv_heads or _parse_natural(fields.get("num_key_value_heads")),
        head_dim=head_dim or _parse_natural(fields.get("head_dim")),
        flash_block=_parse_flash_block(fields.get("attention_mode")),
        attention_type=attention_type if isinstance(attention_type := fields.get("attention_type"), str) else None,
        states=_parse_layer_states(fields),
    )


_STATE_KIND_BY_LAYER_TYPE: Final[dict[str, StateKind]] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "full",  # MNN hides tokens from such a layer, and keeps the K and V of all
    "chunked_attention": "full",
    "linear_attention": "linear",
    "conv": "recurrent",
    "mamba": "recurrent",
    "recurrent": "recurrent",
}
"""State kinds in MNN by the ``layer_types`` of Hugging Face."""


def _parse_layer_geometry(
    fields: Mapping[str, Any], states: Sequence[LayerStateInfo]
) -> tuple[tuple[int | None, int | None], ...]:
    """Return kv heads and head_dim of each layer in gemma4's configuration; empty if they do not differ."""
    fields = _merge_text_config(fields)
    window_geometry = _parse_natural(fields.get("num_key_value_heads")), _parse_natural(fields.get("head_dim"))
    full_geometry = (
        _parse_natural(fields.get("num_global_key_value_heads")) or window_geometry[0],
        _parse_natural(fields.get("global_head_dim")) or window_geometry[1],
    )
    layer_types = fields.get("layer_types")
    if (
        None in (*window_geometry, *full_geometry)
        or window_geometry == full_geometry
        or not isinstance(layer_types, list)
        or len(layer_types) != len(states)
    ):
        return ()
    return tuple(full_geometry if layer_type == "full_attention" else window_geometry for layer_type in layer_types)


def _merge_text_config(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    text_config = fields.get("text_config")
    return {**fields, **text_config} if isinstance(text_config, dict) else fields


def _parse_layer_states(fields: Mapping[str, Any]) -> tuple[LayerStateInfo, ...]:
    """Return the state of each layer in configurations of Hugging Face; MNN's own do not list layers."""
    fields = _merge_text_config(fields)
    layer_types = fields.get("layer_types")
    num_layers = _parse_natural(fields.get("layer_nums")) or _parse_natural(fields.get("num_hidden_layers")) or 0
    period = _parse_natural(fields.get("full_attention_interval"))
    if not isinstance(layer_types, list) and period and num_layers <= _MAX_LAYERS:
        layer_types = ["linear_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
    if not isinstance(layer_types, list) or num_layers not in (0, len(layer_types)) or len(layer_types) > _MAX_LAYERS:
        return ()
    kinds: list[StateKind] = [
        _STATE_KIND_BY_LAYER_TYPE.get(layer_type, "unknown") if isinstance(layer_type, str) else "unknown"
        for layer_type in layer_types
    ]
    # As in gemma: the last layers read K and V of one of their kind.
    first_shared = len(kinds) - (_parse_natural(fields.get("num_kv_shared_layers")) or 0)
    return tuple(
        LayerStateInfo(layer=layer, kind=kind if layer < first_shared else "shared") for layer, kind in enumerate(kinds)
    )


def compute_fingerprint(path: str, settings: Mapping[str, object] | None = None) -> str:
    """Return a SHA-256 over the files that determine K and V: graph, weights, embeddings and ``llm_config.json``.

    Settings of the engine (``config.json``) and the tokenizer do not count. Settings that change K and V, such as
    ``memory`` and ``precision``, are passed as `settings` and appended: ``" memory=low precision=low"``. The hash is
    taken over one line per file, in the order of their names: ``<name> <bytes> <SHA-256 of the contents>``. For a
    ``.gguf`` file it is that of the file.

    Raises
    ------
    SourceError
        When the directory contains no ``.mnn`` file.
    """
    if settings:
        return " ".join([compute_fingerprint(path), *(f"{name}={settings[name]}" for name in sorted(settings))])
    if is_gguf(path):
        return MappedFile(path).compute_sha256()
    hasher = hashlib.sha256()
    for file_path in list_fingerprint_files(path):
        file = MappedFile(file_path)
        hasher.update(f"{os.path.basename(file_path)} {file.size} {file.compute_sha256()}\n".encode())
    return hasher.hexdigest()


def list_fingerprint_files(path: str) -> list[str]:
    """Return the paths of the files that `compute_fingerprint` reads, in order; errors as there."""
    if is_gguf(path):
        return [path]
    try:
        names = sorted(entry.name for entry in os.scandir(path) if entry.is_file())
    except OSError as exc:
        raise build_read_error(path, exc) from exc
    if not any(name.endswith(".mnn") for name in names):
        raise SourceError(f"{path}: has no .mnn file, so it is not an MNN model directory")
    return [os.path.join(path, name) for name in names if name == "llm_config.json" or name.endswith(_WEIGHT_SUFFIXES)]


def try_compute_fingerprint(path: str | None, notes: list[str]) -> str | None:
    """Return the model's fingerprint; None, with a note, if its directory contains only settings."""
    if path is None:
        return None
    if not is_gguf(path) and not any(name.endswith(".mnn") for name in os.listdir(path)):
        notes.append(f"{path} has no .mnn file: its settings are taken, and no fingerprint of the model is noted down")
        return None
    return compute_fingerprint(path)


def _parse_natural(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _parse_flash_block(mode: Any) -> int | Literal["none"] | None:
    """Return the flash block of `attention_mode`: 8 * kind of attention (1: flash) + kind of quantisation."""
    if type(mode) is not int or mode < 0:
        return None
    return FLASH_BLOCK if mode // _ATTENTION_MODES_PER_KIND == 1 else "none"
