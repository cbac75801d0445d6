"""How a model rotates K of each of its layers, strictly: what is not understood is refused, not passed over.

`rotary_config` serves compression, where wrong parameters cost size only. Here K is rotated by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..dense import Rotary
from ..dense.frequencies import RopeFrequencies
from ..errors import KvmnnError, SourceError
from ..files.json_document import read_object
from .rotary_config import PARTS, SETTINGS

LayerRopes = tuple[RopeFrequencies | None, ...]
"""Of each layer; None for one whose K is not rotated at all."""

_UNSCALED: Final = ("default", "mrope")  # mrope gives text the same position on every axis
_SCALED: Final = ("linear", "yarn", "llama3", "ntk")
_LENGTH: Final = "original_max_position_embeddings"
_NO_ROPE_IN_FULL_LAYERS: Final = ("cohere2", "cohere2_text", "exaone4")
_KNOWN_PATTERNS: Final = {"gemma3": 6, "gemma3_text": 6, "cohere2": 4, "exaone4": 4}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_config_rope(path: str, layers: int, head_dim: int, length: int) -> tuple[LayerRopes | None, list[str]]:
    """Read from a configuration of transformers or MNN how K of each layer is rotated.

    Parameters
    ----------
    path
        The model's directory, or the configuration itself.
    layers, head_dim
        Of the cache.
    length
        Tokens of the text: some scalings depend on it.

    Returns
    -------
    Of each layer, None where the configuration has no rotary parameters; and a line for each doubt.

    Raises
    ------
    SourceError
        When there is no configuration, when it cannot be read, and for a rotation that kvmnn cannot compute.
    """
    given = Path(path)
    files = [given] if given.is_file() else [given / name for name in SETTINGS if (given / name).is_file()]
    if not files:
        raise SourceError(f"{path}: has neither {SETTINGS[0]} nor {SETTINGS[1]}, so it has no rotary parameters")
    fields: dict[str, Any] = {}
    for file in reversed(files):  # what transformers wrote comes before what an export of MNN has
        fields |= read_object(file, constants=True)
    where = str(files[0])
    fields = _language_settings(fields)
    try:
        return _read_layers(fields, layers, head_dim, length), _doubts(fields, where)
    except (KvmnnError, TypeError) as error:
        raise SourceError(f"{where}: {error}") from None


def _doubts(fields: Mapping[str, Any], where: str) -> list[str]:
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if isinstance(rope, dict) and ("mrope_section" in rope or rope.get("type", rope.get("rope_type")) == "mrope"):
        return [f"{where}: pictures and sound have positions of their own (mrope): right for tokens of text only"]
    return []


def _language_settings(fields: dict[str, Any]) -> dict[str, Any]:
    for part in PARTS:
        if isinstance(fields.get(part), dict):
            fields = {**fields, **fields[part], part: None}
    return fields


def _read_layers(fields: dict[str, Any], layers: int, head_dim: int, length: int) -> LayerRopes | None:
    if fields.get("kv_lora_rank"):
        raise SourceError("K is latent (kv_lora_rank): its rotated part cannot be told apart")
    if fields.get("head_dim") is None and not (fields.get("hidden_size") and fields.get("num_attention_heads")):
        fields = {**fields, "head_dim": head_dim}
    _check_head_dim(fields, head_dim)
    kinds = _layer_kinds(fields, layers)
    rotated = _rotated_layers(fields, kinds)
    by_kind: dict[str, RopeFrequencies | None] = {kind: _rope_of(fields, kind, length) for kind in sorted({*kinds})}
    if None in by_kind.values():
        return None
    for rope in by_kind.values():
        if rope is not None and rope.dims > head_dim:
            raise SourceError(f"{rope.dims} elements of a head are rotated, and the cache has {head_dim}")
    return tuple(by_kind[kind] if turns else None for kind, turns in zip(kinds, rotated, strict=True))


def _check_head_dim(fields: Mapping[str, Any], head_dim: int) -> None:
    """Raise `SourceError` for larger heads than those of the cache, before their frequencies are computed."""
    width, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    usual = width // heads if type(width) is int and type(heads) is int and heads > 0 else None
    own = fields.get("head_dim")
    for key, value in (("head_dim", usual if own is None else own), ("rotary_dim", fields.get("rotary_dim"))):
        if type(value) is int and value > head_dim:
            raise SourceError(f"{key} is {value}, the cache has heads of {head_dim}")


def _layer_kinds(fields: Mapping[str, Any], layers: int) -> Sequence[str]:
    """The kind of attention of each layer, as `layer_types` of transformers has it."""
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds):
            raise SourceError(f"layer_types is of {len(kinds)} layers, the cache has {layers}")
        return kinds
    pattern = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern"))
    if pattern is None and _has_window_rope(fields):
        pattern = _KNOWN_PATTERNS.get(str(fields.get("model_type")))
        if pattern is None:
            raise SourceError("layers differ in their rotation, and nothing tells which layers have a window")
    if type(pattern) is int and pattern > 0:
        return [_FULL if number % pattern == 0 else _SLIDING for number in range(1, layers + 1)]
    return [_FULL] * layers


def _has_window_rope(fields: Mapping[str, Any]) -> bool:
    rope = fields.get("rope_parameters")
    by_kind = isinstance(rope, dict) and any(isinstance(each, dict) for each in rope.values())
    return by_kind or "rope_local_base_freq" in fields or fields.get("model_type") in _NO_ROPE_IN_FULL_LAYERS


def _rotated_layers(fields: Mapping[str, Any], kinds: Sequence[str]) -> list[bool]:
    """Whether K of each layer is rotated."""
    said = fields.get("no_rope_layers")  # of which 1 means that a layer is rotated
    if isinstance(said, list) and said:
        if len(said) != len(kinds) or not all(each in (0, 1) for each in said):
            raise SourceError(f"no_rope_layers is of {len(said)} layers, the cache has {len(kinds)}")
        return [bool(each) for each in said]
    interval = fields.get("no_rope_layer_interval")
    if type(interval) is int and interval > 0:
        return [number % interval != 0 for number in range(1, len(kinds) + 1)]
    if fields.get("model_type") in _NO_ROPE_IN_FULL_LAYERS and _SLIDING in kinds:
        return [kind == _SLIDING for kind in kinds]
    return [True] * len(kinds)


def _rope_of(fields: Mapping[str, Any], kind: str, length: int) -> RopeFrequencies | None:
    """The frequencies of one kind of layer; None where nothing gives them."""
    local = fields.get("rope_local_base_freq")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise SourceError(f"rope_parameters is no object but {type(rope).__name__}")
    if any(isinstance(each, dict) for each in rope.values()):
        if not isinstance(rope.get(kind), dict):
            raise SourceError(f"rope_parameters has nothing of layers of the kind {kind!r:.40}")
        rope = rope[kind]
    elif local is not None and kind == _SLIDING:
        rope = {"rope_theta": local}  # windows are not scaled
    return _frequencies({**fields, "rope_parameters": rope, "rope_scaling": None}, rope, length)


def _frequencies(fields: dict[str, Any], rope: dict[str, Any], length: int) -> RopeFrequencies | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    limit = rope.get(_LENGTH, fields.get(_LENGTH))
    if kind not in ("longrope", "su"):
        limit = fields.get("max_position_embeddings") if limit is None else limit
    if kind in _SCALED:
        scaled = rope if limit is None else {_LENGTH: limit, **rope}
        return _of_config({**fields, "rope_parameters": scaled})
    if kind in ("dynamic", "xdrope") and "alpha" in rope:
        return _of_config({**fields, "rope_parameters": {**rope, "rope_type": "ntk", "factor": rope["alpha"]}})
    if kind in ("dynamic", "xdrope", "longrope", "su"):
        if type(limit) is not int or length > limit:
            raise SourceError(
                f"rope_type {kind!r} rotates K of texts above {limit} tokens by their length at that time, which no "
                f"cache records, and this text has {length:,} tokens"
            )
    elif kind not in _UNSCALED:
        raise SourceError(f"rope_type {kind!r:.40} is unknown: expected one of {', '.join((*_UNSCALED, *_SCALED))}")
    plain = _of_config({**fields, "rope_parameters": {**rope, "rope_type": "default"}})
    return plain if plain is None or kind not in ("longrope", "su") else _divided(plain, rope.get("short_factor"))


def _of_config(fields: Mapping[str, Any]) -> RopeFrequencies | None:
    share = fields["rope_parameters"].get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if isinstance(share, int | float) and share > 1:
        raise SourceError(f"partial_rotary_factor is {share}: expected at most 1")
    rotary = Rotary.from_config(fields)
    return None if rotary is None else RopeFrequencies.from_rotary(rotary)


def _divided(plain: RopeFrequencies, factors: Any) -> RopeFrequencies:
    """Frequencies divided by factors of their own (longrope)."""
    numbers = factors if isinstance(factors, list) else []
    if len(numbers) != plain.dims // 2 or not all(type(each) in (int, float) and each > 0 for each in numbers):
        raise SourceError(f"short_factor of the rotation: expected {plain.dims // 2} numbers above 0")
    return plain.divided_by(numbers)
