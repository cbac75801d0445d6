"""RoPE parameters of a model's configuration, for compression and, strictly, for rotating K.

For compression, wrong parameters only cost size. For rotating K, unknown settings are rejected.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..dense import RopeConfig
from ..dense.rope import RopeFrequencies
from ..errors import KvmnnError, MissingFileError, SourceError
from ..files.schema import read_object

CONFIG_NAMES: Final = ("config.json", "llm_config.json")
LANGUAGE_CONFIG_KEYS: Final = ("text_config", "llm_config", "language_config")
"""Keys under which multimodal models store the settings of the language model."""
_KNOWN_ROPE_TYPES = ("default", "mrope", "linear", "dynamic", "ntk", "yarn", "llama3")
_POSITION_ONLY_ROPE_TYPES = ("mrope",)
"""Rotary types that equal plain RoPE for text."""


def read_config_rotary(path: str, head_dim: int) -> tuple[RopeConfig | None, list[str]]:
    """Return the RoPE parameters in a model's configuration, and a line for each setting that was ignored.

    Parameters
    ----------
    path
        The model's directory, of transformers or MNN (`CONFIG_NAMES`), or the configuration itself.
    head_dim
        The cache's head_dim, for configurations that lack it.

    Returns
    -------
    Rotary or None
        None if the configuration has no RoPE parameters: in exports of MNN only the graph has them.

    Raises
    ------
    SourceError
        When there is no configuration, it cannot be read, or a value is invalid.
    """
    if not os.path.exists(path):
        raise MissingFileError(f"{path}: cannot be read: No such file or directory")
    fields, label = _read_config(path, "says")
    notes: list[str] = []
    try:
        rotary = RopeConfig.from_config(_select_language_rope(fields, head_dim, label, notes))
    except (KvmnnError, TypeError) as error:
        raise SourceError(f"{label}: {error}") from None
    if rotary is None:
        notes.append(f"{path}: its configuration says no rotary parameters (such as rope_theta): --rope gives them")
    return rotary, notes


def _read_config(path: str, verb: str) -> tuple[dict[str, Any], str]:
    """Return the settings of the language model in a configuration, and the file that messages name."""
    folder = Path(path)
    files = [folder] if folder.is_file() else [file for name in CONFIG_NAMES if (file := folder / name).is_file()]
    if not files:
        raise SourceError(f"{path}: has neither {' nor '.join(CONFIG_NAMES)}, so it {verb} no rotary parameters")
    fields: dict[str, Any] = {}
    for file in reversed(files):  # what transformers wrote comes before what an export of MNN has
        fields |= read_object(file, allow_nan=True)
    for part in LANGUAGE_CONFIG_KEYS:
        if isinstance(fields.get(part), dict):
            fields = {**fields, **fields[part], part: None}
    return fields, str(files[0])


def _add_head_dim(fields: dict[str, Any], head_dim: int) -> dict[str, Any]:
    has_head_dim = fields.get("head_dim") is not None or (
        fields.get("hidden_size") and fields.get("num_attention_heads")
    )
    return fields if has_head_dim else {**fields, "head_dim": head_dim}


def _select_language_rope(fields: dict[str, Any], head_dim: int, label: str, notes: list[str]) -> dict[str, Any]:
    """Return the settings with one set of rotary parameters, whose scaling is known."""
    fields = _add_head_dim(fields, head_dim)
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


LayerRopes = tuple[RopeFrequencies | None, ...]
"""RoPE of each layer; None for a layer whose K is not rotated."""

_UNSCALED_ROPE_TYPES: Final = ("default", "mrope")  # mrope gives text the same position on every axis
_SCALED_ROPE_TYPES: Final = ("linear", "yarn", "llama3", "ntk")
_ORIGINAL_LENGTH_KEY: Final = "original_max_position_embeddings"
_UNROTATED_FULL_LAYER_MODELS: Final = ("cohere2", "cohere2_text", "exaone4")
_WINDOW_PATTERN_BY_MODEL: Final = {"gemma3": 6, "gemma3_text": 6, "cohere2": 4, "exaone4": 4}
_FULL_ATTENTION, _SLIDING_ATTENTION = "full_attention", "sliding_attention"


def read_config_layer_ropes(
    path: str, num_layers: int, head_dim: int, num_tokens: int
) -> tuple[LayerRopes | None, list[str]]:
    """Read the RoPE frequencies of each layer from a configuration of transformers or MNN, and notes."""
    fields, label = _read_config(path, "has")
    try:
        return parse_layer_ropes(fields, num_layers, head_dim, num_tokens), _list_doubts(fields, label)
    except (KvmnnError, TypeError) as error:
        raise SourceError(f"{label}: {error}") from None


def _list_doubts(fields: Mapping[str, Any], label: str) -> list[str]:
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if isinstance(rope, dict) and ("mrope_section" in rope or rope.get("type", rope.get("rope_type")) == "mrope"):
        return [f"{label}: pictures and sound have positions of their own (mrope): right for tokens of text only"]
    return []


def parse_layer_ropes(fields: dict[str, Any], num_layers: int, head_dim: int, num_tokens: int) -> LayerRopes | None:
    """Parse how K of each layer is rotated; None where nothing says it. `KvmnnError` for values that are not valid."""
    if fields.get("kv_lora_rank"):
        raise SourceError("K is latent (kv_lora_rank): its rotated part cannot be told apart")
    fields = _add_head_dim(fields, head_dim)
    _check_head_dim(fields, head_dim)
    kinds = _list_layer_kinds(fields, num_layers)
    rotated_flags = _list_rotated_layers(fields, kinds)
    rope_by_kind = {kind: _parse_rope_of_layer_type(fields, kind, num_tokens) for kind in sorted({*kinds})}
    if None in rope_by_kind.values():
        return None
    for rope in rope_by_kind.values():
        if rope is not None and rope.dims > head_dim:
            raise SourceError(f"{rope.dims} elements of a head are rotated, and the cache has {head_dim}")
    return tuple(
        rope_by_kind[kind] if is_rotated else None for kind, is_rotated in zip(kinds, rotated_flags, strict=True)
    )


def _check_head_dim(fields: Mapping[str, Any], head_dim: int) -> None:
    """Raise `SourceError` for larger heads than those of the cache, before their frequencies are computed."""
    hidden_size, num_heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    default_head_dim = (
        hidden_size // num_heads if type(hidden_size) is int and type(num_heads) is int and num_heads > 0 else None
    )
    declared_head_dim = default_head_dim if fields.get("head_dim") is None else fields["head_dim"]
    for key, value in (("head_dim", declared_head_dim), ("rotary_dim", fields.get("rotary_dim"))):
        if type(value) is int and value > head_dim:
            raise SourceError(f"{key} is {value}, the cache has heads of {head_dim}")


def _list_layer_kinds(fields: Mapping[str, Any], num_layers: int) -> Sequence[str]:
    """Return the kind of attention of each layer, as in `layer_types` of transformers."""
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != num_layers or not all(isinstance(kind, str) for kind in kinds):
            raise SourceError(f"layer_types is of {len(kinds)} layers, the cache has {num_layers}")
        return kinds
    pattern = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern"))
    if pattern is None and _has_window_rope(fields):
        pattern = _WINDOW_PATTERN_BY_MODEL.get(str(fields.get("model_type")))
        if pattern is None:
            raise SourceError("layers differ in their rotation, and nothing tells which layers have a window")
    if type(pattern) is int and pattern > 0:
        return [_FULL_ATTENTION if layer % pattern == 0 else _SLIDING_ATTENTION for layer in range(1, num_layers + 1)]
    return [_FULL_ATTENTION] * num_layers


def _has_window_rope(fields: Mapping[str, Any]) -> bool:
    rope = fields.get("rope_parameters")
    is_per_kind = isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values())
    return is_per_kind or "rope_local_base_freq" in fields or fields.get("model_type") in _UNROTATED_FULL_LAYER_MODELS


def _list_rotated_layers(fields: Mapping[str, Any], kinds: Sequence[str]) -> list[bool]:
    """Return for each layer whether K is rotated."""
    flags = fields.get("no_rope_layers")  # of which 1 means that a layer is rotated
    if isinstance(flags, list) and flags:
        if len(flags) != len(kinds) or not all(flag in (0, 1) for flag in flags):
            raise SourceError(f"no_rope_layers is of {len(flags)} layers, the cache has {len(kinds)}")
        return [bool(flag) for flag in flags]
    interval = fields.get("no_rope_layer_interval")
    if type(interval) is int and interval > 0:
        return [layer % interval != 0 for layer in range(1, len(kinds) + 1)]
    if fields.get("model_type") in _UNROTATED_FULL_LAYER_MODELS and _SLIDING_ATTENTION in kinds:
        return [kind == _SLIDING_ATTENTION for kind in kinds]
    return [True] * len(kinds)


def _parse_rope_of_layer_type(fields: Mapping[str, Any], kind: str, num_tokens: int) -> RopeFrequencies | None:
    """Return the frequencies of one kind of layer; None if they are not defined."""
    window_theta = fields.get("rope_local_base_freq")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise SourceError(f"rope_parameters is no object but {type(rope).__name__}")
    if any(isinstance(value, dict) for value in rope.values()):
        if not isinstance(rope.get(kind), dict):
            raise SourceError(f"rope_parameters has nothing of layers of the kind {kind!r:.40}")
        rope = rope[kind]
    elif window_theta is not None and kind == _SLIDING_ATTENTION:
        rope = {"rope_theta": window_theta}  # windows are not scaled
    return _compute_frequencies({**fields, "rope_parameters": rope, "rope_scaling": None}, rope, num_tokens)


def _compute_frequencies(fields: dict[str, Any], rope: dict[str, Any], num_tokens: int) -> RopeFrequencies | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    max_tokens = rope.get(_ORIGINAL_LENGTH_KEY, fields.get(_ORIGINAL_LENGTH_KEY))
    if kind not in ("longrope", "su"):
        max_tokens = fields.get("max_position_embeddings") if max_tokens is None else max_tokens
    if kind in _SCALED_ROPE_TYPES:
        scaled_rope = rope if max_tokens is None else {_ORIGINAL_LENGTH_KEY: max_tokens, **rope}
        return _build_frequencies({**fields, "rope_parameters": scaled_rope})
    if kind in ("dynamic", "xdrope") and "alpha" in rope:
        return _build_frequencies({**fields, "rope_parameters": {**rope, "rope_type": "ntk", "factor": rope["alpha"]}})
    if kind in ("dynamic", "xdrope", "longrope", "su"):
        if type(max_tokens) is not int or num_tokens > max_tokens:
            raise SourceError(
                f"rope_type {kind!r} rotates K of texts above {max_tokens} tokens by their length at that time, which "
                f"no cache records, and this text has {num_tokens:,} tokens"
            )
    elif kind not in _UNSCALED_ROPE_TYPES:
        raise SourceError(
            f"rope_type {kind!r:.40} is unknown: expected one of "
            f"{', '.join((*_UNSCALED_ROPE_TYPES, *_SCALED_ROPE_TYPES))}"
        )
    unscaled = _build_frequencies({**fields, "rope_parameters": {**rope, "rope_type": "default"}})
    is_divided = unscaled is not None and kind in ("longrope", "su")
    return _divide_frequencies(unscaled, rope.get("short_factor")) if unscaled and is_divided else unscaled


def _build_frequencies(fields: Mapping[str, Any]) -> RopeFrequencies | None:
    rotary_fraction = fields["rope_parameters"].get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if isinstance(rotary_fraction, int | float) and rotary_fraction > 1:
        raise SourceError(f"partial_rotary_factor is {rotary_fraction}: expected at most 1")
    rotary = RopeConfig.from_config(fields)
    return None if rotary is None else RopeFrequencies.from_config(rotary)


def _divide_frequencies(frequencies: RopeFrequencies, factors: Any) -> RopeFrequencies:
    """Return the frequencies divided by per-pair factors (longrope)."""
    divisors = factors if isinstance(factors, list) else []
    if len(divisors) != frequencies.dims // 2 or not all(
        type(divisor) in (int, float) and divisor > 0 for divisor in divisors
    ):
        raise SourceError(f"short_factor of the rotation: expected {frequencies.dims // 2} numbers above 0")
    return frequencies.divide_by(divisors)
