"""What the directory of an MNN model tells about its cache: geometry where it holds it, and a fingerprint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Final, Literal

from ...arrays.completeness import LayerStateInfo, StateKind
from ...errors import OptionError, SourceError
from ...files.mapped_file import MappedFile
from ...files.schema import read_object
from ...packed.params import FLASH_BLOCK
from ..llama.gguf import is_gguf, read_model_layers
from .graph import read_graph_geometry

SETTINGS_FILES = ("llm_config.json", "config.json")
_HASH_CHUNK_BYTES = 16 << 20
_WEIGHT_SUFFIXES = (".mnn", ".mnn.weight", ".bin", ".safetensors")
_ATTENTION_MODES_PER_KIND = 8
_MAX_LAYERS: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """What was found; None for what the files do not hold."""

    #: Of the language model.
    num_layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    #: 64 or ``"none"``, where ``config.json`` sets ``attention_mode``.
    flash_block: int | Literal["none"] | None = None
    #: As ``llm_config.json`` has it: only with ``"mix"`` the engine loads layers that differ in size.
    attention_type: str | None = None
    #: What each layer keeps; empty where nothing tells.
    states: tuple[LayerStateInfo, ...] = ()
    #: Kv heads and head_dim of each layer, where they are known and differ; else empty.
    layer_geometry: tuple[tuple[int | None, int | None], ...] = ()

    @property
    def file_states(self) -> tuple[LayerStateInfo, ...]:
        """States of the layers that have files: not of those that read K and V of another layer."""
        return tuple(state for state in self.states if state.kind != "shared")


def read_model_geometry(path: str) -> ModelGeometry:
    """Geometry from ``llm_config.json``, ``config.json`` and the graph of a model directory.

    An export of MNN holds ``layer_nums``, and older ones ``key_value_shape``, which ends in ``kv_heads, head_dim``;
    the names of Hugging Face configurations (``num_hidden_layers``, ``num_key_value_heads``, ``head_dim``) are taken
    where those are missing, and the attention operators of the graph (``llm_model``, else ``llm.mnn``) where both are.
    Of a ``.gguf`` file it is what its header has; None for what differs by layers.
    """
    if is_gguf(path):
        return _read_gguf_model_geometry(path)
    fields: dict[str, Any] = {}
    has_settings = False
    for name in SETTINGS_FILES:
        file = Path(path, name)
        if file.is_file():
            has_settings = True
            fields = read_object(file, allow_nan=True) | fields
    graph = find_graph(path, fields)
    if not has_settings and graph is None:
        raise SourceError(f"{path}: has neither llm_config.json nor config.json, so it is not an MNN model directory")
    settings_geometry = _parse_settings_geometry(fields)
    if layer_geometry := _parse_layer_geometry(fields, settings_geometry.states):
        settings_geometry = replace(settings_geometry, layer_geometry=layer_geometry, kv_heads=None, head_dim=None)
    graph_geometry = read_graph_geometry(graph) if graph is not None else None
    if graph_geometry is None:
        return settings_geometry
    is_varying = (
        len({heads_and_dim for heads_and_dim in graph_geometry.layer_geometry if None not in heads_and_dim}) > 1
    )
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
    """`OptionError` where the cache is said to have other kv heads, dimensions or layers than the model at `path`."""
    heads_check = ("kv heads", kv_heads, model.kv_heads)
    for property_name, cache_value, model_value in (
        heads_check,
        ("head_dim", head_dim, model.head_dim),
        ("layers", num_layers, model.num_layers),
    ):
        if None not in (cache_value, model_value) and cache_value != model_value:
            raise OptionError(
                f"{property_name}: {cache_value} for the cache, but the model in {path} has {model_value}"
            )


def find_graph(path: str, fields: dict[str, Any]) -> Path | None:
    """The graph in a model directory whose settings are `fields`; None where there is none."""
    name = fields.get("llm_model")
    is_plain = isinstance(name, str) and name == PurePath(name).name and "\0" not in name
    graph = Path(path, str(name) if is_plain else "llm.mnn")
    return graph if graph.is_file() else None


def _parse_settings_geometry(fields: dict[str, Any]) -> ModelGeometry:
    """What the settings say."""
    shape = fields.get("key_value_shape")
    kv_heads = head_dim = None
    if isinstance(shape, list) and len(shape) >= 2:
        kv_heads, head_dim = _parse_natural(shape[-2]), _parse_natural(shape[-1])
    return ModelGeometry(
        num_layers=_parse_natural(fields.get("layer_nums")) or _parse_natural(fields.get("num_hidden_layers")),
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
"""What MNN keeps for the ``layer_types`` of Hugging Face."""


def _parse_layer_geometry(
    fields: Mapping[str, Any], states: Sequence[LayerStateInfo]
) -> tuple[tuple[int | None, int | None], ...]:
    """Kv heads and head_dim of each layer as gemma4's configuration has them; empty where they do not differ."""
    text_config = fields.get("text_config")
    fields = {**fields, **text_config} if isinstance(text_config, dict) else fields
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


def _parse_layer_states(fields: Mapping[str, Any]) -> tuple[LayerStateInfo, ...]:
    """What each layer keeps, as configurations of Hugging Face have it; MNN's own do not list layers."""
    text_config = fields.get("text_config")
    fields = {**fields, **text_config} if isinstance(text_config, dict) else fields
    layer_types = fields.get("layer_types")
    num_layers = _parse_natural(fields.get("layer_nums")) or _parse_natural(fields.get("num_hidden_layers")) or 0
    period = _parse_natural(fields.get("full_attention_interval"))
    if not isinstance(layer_types, list) and period and num_layers <= _MAX_LAYERS:
        layer_types = ["linear_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
    if (
        not isinstance(layer_types, list)
        or not layer_types
        or num_layers not in (0, len(layer_types))
        or len(layer_types) > _MAX_LAYERS
    ):
        return ()
    num_shared = _parse_natural(fields.get("num_kv_shared_layers")) or 0
    states = [
        LayerStateInfo(
            layer=layer_number,
            kind=_STATE_KIND_BY_LAYER_TYPE.get(layer_type, "unknown") if isinstance(layer_type, str) else "unknown",
        )
        for layer_number, layer_type in enumerate(layer_types)
    ]
    first_shared = len(states) - num_shared  # as in gemma: the last layers read K and V of one of their kind
    return (
        *states[: max(first_shared, 0)],
        *(replace(state, kind="shared") for state in states[max(first_shared, 0) :]),
    )


def compute_fingerprint(path: str, settings: Mapping[str, object] | None = None) -> str:
    """SHA-256 over what a model's K and V are made of: graph, weights, embeddings and ``llm_config.json``.

    Settings of the engine (``config.json``) and the tokenizer do not count. Settings that change K and V, such as
    ``memory`` and ``precision``, are said by `settings`: the fingerprint ends in ``" memory=low precision=low"`` then.
    The hash is taken over one line per file, in the order of their names: ``<name> <bytes> <SHA-256 of the contents>``.
    Of a ``.gguf`` file it is that of the file.

    Raises
    ------
    SourceError
        When the directory holds no ``.mnn`` file.
    """
    if settings:
        return " ".join([compute_fingerprint(path), *(f"{name}={settings[name]}" for name in sorted(settings))])
    if is_gguf(path):
        return _hash_file_contents(MappedFile(path))
    try:
        names = sorted(entry.name for entry in os.scandir(path) if entry.is_file())
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    if not any(name.endswith(".mnn") for name in names):
        raise SourceError(f"{path}: has no .mnn file, so it is not an MNN model directory")
    hasher = hashlib.sha256()
    for name in names:
        if name == "llm_config.json" or name.endswith(_WEIGHT_SUFFIXES):
            file = MappedFile(Path(path, name))
            hasher.update(f"{name} {file.size} {_hash_file_contents(file)}\n".encode())
    return hasher.hexdigest()


def has_weights(path: str) -> bool:
    """Whether there is anything at `path` that `compute_fingerprint` is taken of."""
    return is_gguf(path) or any(name.endswith(".mnn") for name in os.listdir(path))


def _hash_file_contents(file: MappedFile) -> str:
    hasher = hashlib.sha256()
    for chunk in file.iter_chunks(0, file.size, _HASH_CHUNK_BYTES):
        hasher.update(chunk.data)
    return hasher.hexdigest()


def _parse_natural(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _parse_flash_block(mode: Any) -> int | Literal["none"] | None:
    """`attention_mode` is 8 times the kind of attention (1: flash) plus how K and V are quantised."""
    if type(mode) is not int or mode < 0:
        return None
    return FLASH_BLOCK if mode // _ATTENTION_MODES_PER_KIND == 1 else "none"
