"""The configuration of a model, read for its rotary parameters (RoPE)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ..dense import RopeConfig
from ..errors import KvmnnError, SourceError
from ..files.json_document import read_object

CONFIG_NAMES: Final = ("config.json", "llm_config.json")
LANGUAGE_CONFIG_KEYS: Final = ("text_config", "llm_config", "language_config")
"""Where models of several parts keep the settings of the language model."""
_KNOWN_ROPE_TYPES = ("default", "mrope", "linear", "dynamic", "ntk", "yarn", "llama3")
_POSITION_ONLY_ROPE_TYPES = ("mrope",)
"""Of text they are plain rotary positions."""


def read_config_rotary(path: str, head_dim: int) -> tuple[RopeConfig | None, list[str]]:
    """The rotary parameters in the configuration of a model, and one line for each thing that was passed over.

    Parameters
    ----------
    path
        The model's directory, of transformers or MNN (`CONFIG_NAMES`), or the configuration itself.
    head_dim
        Of the cache, for configurations that do not say it.

    Returns
    -------
    Rotary or None
        None where the configuration says nothing of rotary positions: of exports of MNN only the graph holds them.

    Raises
    ------
    SourceError
        When there is no configuration, it cannot be read, or a value is not what it must be.
    """
    config_path = Path(path)
    if not config_path.exists():
        raise SourceError(f"{path}: cannot be read: No such file or directory")
    config_files = (
        [config_path]
        if config_path.is_file()
        else [config_path / name for name in CONFIG_NAMES if (config_path / name).is_file()]
    )
    if not config_files:
        raise SourceError(
            f"{path}: has neither {CONFIG_NAMES[0]} nor {CONFIG_NAMES[1]}, so it says no rotary parameters"
        )
    fields: dict[str, Any] = {}
    for file in reversed(config_files):  # what transformers wrote, before what an export of MNN says
        fields |= read_object(file, allow_nan=True)
    label = str(config_files[0])
    notes: list[str] = []
    try:
        rotary = RopeConfig.from_config(_select_language_rope(fields, head_dim, label, notes))
    except (KvmnnError, TypeError) as error:
        raise SourceError(f"{label}: {error}") from None
    if rotary is None:
        notes.append(f"{path}: its configuration says no rotary parameters (such as rope_theta): --rope gives them")
    return rotary, notes


def _select_language_rope(fields: dict[str, Any], head_dim: int, label: str, notes: list[str]) -> dict[str, Any]:
    """The settings of the language model, with one set of rotary parameters, whose scaling is known."""
    for part in LANGUAGE_CONFIG_KEYS:
        if isinstance(fields.get(part), dict):
            fields = {**fields, **fields[part], part: None}
    if fields.get("head_dim") is None and not (fields.get("hidden_size") and fields.get("num_attention_heads")):
        fields = {**fields, "head_dim": head_dim}
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise SourceError(f"{label}: {name} is no object but {type(rope).__name__}")
        rope_by_type = {kind: value for kind, value in rope.items() if isinstance(value, dict)}
        if rope_by_type:
            kind = "full_attention" if "full_attention" in rope_by_type else min(rope_by_type)
            notes.append(f"{label}: {name} differs by layers: that of {kind} is taken for all, which costs size only")
            rope = rope_by_type[kind]
        fields = {**fields, name: _normalize_scaling(rope, fields, label, notes)}
    return fields


def _normalize_scaling(rope: dict[str, Any], fields: dict[str, Any], label: str, notes: list[str]) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _KNOWN_ROPE_TYPES:
        notes.append(f"{label}: rope_type {str(kind)!r:.40} is not known: it is left out, which costs size only")
    if kind not in _KNOWN_ROPE_TYPES or kind in _POSITION_ONLY_ROPE_TYPES:
        return {**rope, "rope_type": "default"}
    if "original_max_position_embeddings" not in rope and "max_position_embeddings" in fields:
        rope = {**rope, "original_max_position_embeddings": fields["max_position_embeddings"]}
    return rope
