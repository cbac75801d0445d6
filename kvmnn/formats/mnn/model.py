"""What the directory of an MNN model tells about its cache: geometry where it holds it, and a fingerprint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Final, Literal

from ...arrays.completeness import LayerState, StateKind
from ...errors import OptionError, SourceError
from ...files.json_document import read_object
from ...files.mapped import MappedFile
from ...packed.addressing import FLASH_BLOCK
from ..llama.gguf import is_gguf
from ..llama.model_layers import read_layers
from .graph import read_graph

SETTINGS = ("llm_config.json", "config.json")
_STEP = 16 << 20
_WEIGHT_SUFFIXES = (".mnn", ".mnn.weight", ".bin", ".safetensors")
_FLASH_MODE = 8
_MAX_LAYERS: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """What was found; None for what the files do not hold.

    Parameters
    ----------
    layers, kv_heads, head_dim
        Of the language model.
    flash_block
        64 or ``"none"``, where ``config.json`` sets ``attention_mode``.
    attention_type
        As ``llm_config.json`` has it: only with ``"mix"`` the engine loads layers that differ in size.
    states
        What each layer keeps; empty where nothing tells.
    layer_geometry
        Kv heads and head_dim of each layer, where they are known and differ; else empty.
    """

    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    flash_block: int | Literal["none"] | None = None
    attention_type: str | None = None
    states: tuple[LayerState, ...] = ()
    layer_geometry: tuple[tuple[int | None, int | None], ...] = ()

    @property
    def file_states(self) -> tuple[LayerState, ...]:
        """States of the layers that have files: not of those that read K and V of another layer."""
        return tuple(state for state in self.states if state.kind != "shared")


def read_geometry(path: str) -> ModelGeometry:
    """Geometry from ``llm_config.json``, ``config.json`` and the graph of a model directory.

    An export of MNN holds ``layer_nums``, and older ones ``key_value_shape``, which ends in ``kv_heads, head_dim``;
    the names of Hugging Face configurations (``num_hidden_layers``, ``num_key_value_heads``, ``head_dim``) are taken
    where those are missing, and the attention operators of the graph (``llm_model``, else ``llm.mnn``) where both are.
    Of a ``.gguf`` file it is what its header has; None for what differs by layers.

    Raises
    ------
    SourceError
        When none of the files is there or one cannot be read.
    """
    if is_gguf(path):
        return _geometry_of_gguf(path)
    fields: dict[str, Any] = {}
    found = False
    for name in SETTINGS:
        file = Path(path, name)
        if file.is_file():
            found = True
            fields = read_object(file, constants=True) | fields
    graph = graph_of(path, fields)
    if not found and graph is None:
        raise SourceError(f"{path}: has neither llm_config.json nor config.json, so it is not an MNN model directory")
    said = _said(fields)
    if own := _layer_geometry(fields, said.states):
        said = replace(said, layer_geometry=own, kv_heads=None, head_dim=None)
    drawn = read_graph(graph) if graph is not None else None
    if drawn is None:
        return said
    varies = len({each for each in drawn.layer_geometry if None not in each}) > 1
    return replace(
        said,
        layers=said.layers or drawn.layers,
        kv_heads=None if varies else said.kv_heads or drawn.kv_heads,
        head_dim=None if varies else said.head_dim or drawn.head_dim,
        states=drawn.states if said.layers in (None, drawn.layers) else said.states,
        layer_geometry=drawn.layer_geometry if varies else said.layer_geometry,
    )


def _geometry_of_gguf(path: str) -> ModelGeometry:
    layers = [layer for layer in read_layers(path) or () if layer.kv_heads and layer.state.kind != "shared"]
    heads, dims = {layer.kv_heads for layer in layers}, {layer.head_dim for layer in layers}
    return ModelGeometry(
        layers=len(layers) or None,
        kv_heads=heads.pop() if len(heads) == 1 else None,
        head_dim=dims.pop() if len(dims) == 1 else None,
    )


def check_agrees(
    path: str, model: ModelGeometry, kv_heads: int | None, head_dim: int | None, layers: int | None = None
) -> None:
    """`OptionError` where the cache is said to have other kv heads, dimensions or layers than the model at `path`."""
    heads = ("kv heads", kv_heads, model.kv_heads)
    for what, said, found in (heads, ("head_dim", head_dim, model.head_dim), ("layers", layers, model.layers)):
        if None not in (said, found) and said != found:
            raise OptionError(f"{what}: {said} for the cache, but the model in {path} has {found}")


def graph_of(path: str, fields: dict[str, Any]) -> Path | None:
    """The graph in a model directory whose settings are `fields`; None where there is none."""
    name = fields.get("llm_model")
    plain = isinstance(name, str) and name == PurePath(name).name and "\0" not in name
    graph = Path(path, str(name) if plain else "llm.mnn")
    return graph if graph.is_file() else None


def _said(fields: dict[str, Any]) -> ModelGeometry:
    """What the settings say."""
    shape = fields.get("key_value_shape")
    heads = dims = None
    if isinstance(shape, list) and len(shape) >= 2:
        heads, dims = _natural(shape[-2]), _natural(shape[-1])
    return ModelGeometry(
        layers=_natural(fields.get("layer_nums")) or _natural(fields.get("num_hidden_layers")),
        kv_heads=heads or _natural(fields.get("num_key_value_heads")),
        head_dim=dims or _natural(fields.get("head_dim")),
        flash_block=_flash(fields.get("attention_mode")),
        attention_type=kind if isinstance(kind := fields.get("attention_type"), str) else None,
        states=_states(fields),
    )


_STATE_OF: Final[dict[str, StateKind]] = {
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


def _layer_geometry(
    fields: Mapping[str, Any], states: Sequence[LayerState]
) -> tuple[tuple[int | None, int | None], ...]:
    """Kv heads and head_dim of each layer as gemma4's configuration has them; empty where they do not differ."""
    nested = fields.get("text_config")
    fields = {**fields, **nested} if isinstance(nested, dict) else fields
    window = _natural(fields.get("num_key_value_heads")), _natural(fields.get("head_dim"))
    full = (
        _natural(fields.get("num_global_key_value_heads")) or window[0],
        _natural(fields.get("global_head_dim")) or window[1],
    )
    kinds = fields.get("layer_types")
    if None in (*window, *full) or window == full or not isinstance(kinds, list) or len(kinds) != len(states):
        return ()
    return tuple(full if kind == "full_attention" else window for kind in kinds)


def _states(fields: Mapping[str, Any]) -> tuple[LayerState, ...]:
    """What each layer keeps, as configurations of Hugging Face have it; MNN's own do not list layers."""
    nested = fields.get("text_config")
    fields = {**fields, **nested} if isinstance(nested, dict) else fields
    kinds = fields.get("layer_types")
    count = _natural(fields.get("layer_nums")) or _natural(fields.get("num_hidden_layers")) or 0
    period = _natural(fields.get("full_attention_interval"))
    if not isinstance(kinds, list) and period and count <= _MAX_LAYERS:
        kinds = ["linear_attention" if (layer + 1) % period else "full_attention" for layer in range(count)]
    if not isinstance(kinds, list) or not kinds or count not in (0, len(kinds)) or len(kinds) > _MAX_LAYERS:
        return ()
    shared = _natural(fields.get("num_kv_shared_layers")) or 0
    states = [
        LayerState(layer=number, kind=_STATE_OF.get(kind, "unknown") if isinstance(kind, str) else "unknown")
        for number, kind in enumerate(kinds)
    ]
    first = len(states) - shared  # as in gemma: the last layers read K and V of one of their kind
    return (*states[: max(first, 0)], *(replace(state, kind="shared") for state in states[max(first, 0) :]))


def fingerprint(path: str, settings: Mapping[str, object] | None = None) -> str:
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
        return " ".join([fingerprint(path), *(f"{name}={settings[name]}" for name in sorted(settings))])
    if is_gguf(path):
        return _digest(MappedFile(path))
    try:
        names = sorted(entry.name for entry in os.scandir(path) if entry.is_file())
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    if not any(name.endswith(".mnn") for name in names):
        raise SourceError(f"{path}: has no .mnn file, so it is not an MNN model directory")
    total = hashlib.sha256()
    for name in names:
        if name == "llm_config.json" or name.endswith(_WEIGHT_SUFFIXES):
            file = MappedFile(Path(path, name))
            total.update(f"{name} {file.size} {_digest(file)}\n".encode())
    return total.hexdigest()


def has_weights(path: str) -> bool:
    """Whether there is anything at `path` that `fingerprint` is taken of."""
    return is_gguf(path) or any(name.endswith(".mnn") for name in os.listdir(path))


def _digest(file: MappedFile) -> str:
    digest = hashlib.sha256()
    for run in file.runs(0, file.size, _STEP):
        digest.update(run.data)
    return digest.hexdigest()


def _natural(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _flash(mode: Any) -> int | Literal["none"] | None:
    """`attention_mode` is 8 times the kind of attention (1: flash) plus how K and V are quantised."""
    if type(mode) is not int or mode < 0:
        return None
    return FLASH_BLOCK if mode // _FLASH_MODE == 1 else "none"
