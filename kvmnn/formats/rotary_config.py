"""The configuration of a model, read for its rotary parameters (RoPE)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ..dense import Rotary
from ..errors import KvmnnError, SourceError
from ..files.json_document import read_object

SETTINGS: Final = ("config.json", "llm_config.json")
PARTS: Final = ("text_config", "llm_config", "language_config")
"""Where models of several parts keep the settings of the language model."""
_KNOWN = ("default", "mrope", "linear", "dynamic", "ntk", "yarn", "llama3")
_UNSCALED = ("mrope",)
"""Of text they are plain rotary positions."""


def read_rotary(path: str, head_dim: int) -> tuple[Rotary | None, list[str]]:
    """The rotary parameters in the configuration of a model, and one line for each thing that was passed over.

    Parameters
    ----------
    path
        The model's directory, of transformers or MNN (`SETTINGS`), or the configuration itself.
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
    given = Path(path)
    if not given.exists():
        raise SourceError(f"{path}: cannot be read: No such file or directory")
    found = [given] if given.is_file() else [given / name for name in SETTINGS if (given / name).is_file()]
    if not found:
        raise SourceError(f"{path}: has neither {SETTINGS[0]} nor {SETTINGS[1]}, so it says no rotary parameters")
    fields: dict[str, Any] = {}
    for file in reversed(found):  # what transformers wrote, before what an export of MNN says
        fields |= read_object(file, constants=True)
    where = str(found[0])
    notes: list[str] = []
    try:
        rotary = Rotary.from_config(_plain(fields, head_dim, where, notes))
    except (KvmnnError, TypeError) as error:
        raise SourceError(f"{where}: {error}") from None
    if rotary is None:
        notes.append(f"{path}: its configuration says no rotary parameters (such as rope_theta): --rope gives them")
    return rotary, notes


def _plain(fields: dict[str, Any], head_dim: int, where: str, notes: list[str]) -> dict[str, Any]:
    """The settings of the language model, with one set of rotary parameters, whose scaling is known."""
    for part in PARTS:
        if isinstance(fields.get(part), dict):
            fields = {**fields, **fields[part], part: None}
    if fields.get("head_dim") is None and not (fields.get("hidden_size") and fields.get("num_attention_heads")):
        fields = {**fields, "head_dim": head_dim}
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise SourceError(f"{where}: {name} is no object but {type(rope).__name__}")
        by_type = {kind: each for kind, each in rope.items() if isinstance(each, dict)}
        if by_type:
            kind = "full_attention" if "full_attention" in by_type else min(by_type)
            notes.append(f"{where}: {name} differs by layers: that of {kind} is taken for all, which costs size only")
            rope = by_type[kind]
        fields = {**fields, name: _scaling(rope, fields, where, notes)}
    return fields


def _scaling(rope: dict[str, Any], fields: dict[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _KNOWN:
        notes.append(f"{where}: rope_type {str(kind)!r:.40} is not known: it is left out, which costs size only")
    if kind not in _KNOWN or kind in _UNSCALED:
        return {**rope, "rope_type": "default"}
    if "original_max_position_embeddings" not in rope and "max_position_embeddings" in fields:
        rope = {**rope, "original_max_position_embeddings": fields["max_position_embeddings"]}
    return rope
