"""Descriptions of other engines' caches as metadata of arrays: in manifests, files, and Zarr."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ..files.schema import JsonReader, parse_document
from ..packed.cache_info import MAX_TOKEN_ID, PositionRuns
from .completeness import SHIFTED_KEYS_TEXT, add_missing_state, dump_completeness_json
from .engine_cache import BatchText, EngineCacheInfo, select_engine_layers
from .llama_transforms import TRANSFORMS, Transform
from .source import COMPLETENESS_KEY, ENGINE_KEY, Source, parse_completeness

METADATA_VERSION = 1
_MAX_EXPANDED_TOKENS = 1 << 24  # whose runs of positions are expanded
_MAX_POSITION = 1 << 31
_MAX_TYPE_BITS = 64


def dump_metadata(source: Source) -> dict[str, str]:
    """Return the metadata of a source, with the description of its engine's cache and its completeness."""
    metadata = {key: text for key, text in add_completeness_metadata(source).items() if key != ENGINE_KEY}
    cache = source.engine_cache
    if cache is not None and any(cache.tokens in source[name].shape for name in source):
        engine_document = {
            "version": METADATA_VERSION,
            "axes": source.axes,
            "cache": build_engine_document(cache),
            "shapes": {name: list(source[name].shape) for name in sorted(source)},
        }
        metadata[ENGINE_KEY] = json.dumps(engine_document, separators=(",", ":"))
    return metadata


def add_completeness_metadata(source: Source) -> dict[str, str]:
    """Return the metadata of a source, with its completeness where that is more than full attention in every layer."""
    if source.completeness is None:
        return dict(source.metadata)
    metadata = {key: text for key, text in source.metadata.items() if key != COMPLETENESS_KEY}
    if not source.completeness.is_plain:
        metadata[COMPLETENESS_KEY] = dump_completeness_json(source.completeness, source)
    return metadata


def restore_completeness(source: Source, where: str) -> None:
    """Set the completeness of a source from its metadata, unless its reader did; K that was int8 is never complete."""
    if source.completeness is None:
        source.completeness = parse_completeness(source.metadata, source, where)
    if source.lossy:
        source.completeness = add_missing_state(source.completeness, SHIFTED_KEYS_TEXT)


def restore_metadata(source: Source, where: str, *, is_subset: bool = False) -> None:
    """Restore what `dump_metadata` wrote; drop the engine's description with a note if the arrays do not match it."""
    restore_completeness(source, where)
    if source.engine_cache is not None or ENGINE_KEY not in source.metadata:
        return
    root = parse_document(source.metadata[ENGINE_KEY], f"{where}: metadata {ENGINE_KEY!r}")
    root.get("version").check_version(METADATA_VERSION)
    shapes, array_shapes = root.get("shapes").value, {array.name: list(array.shape) for array in source.arrays}
    if is_subset and isinstance(shapes, dict):
        shapes, names = {name: shape for name, shape in shapes.items() if name in array_shapes}, list(shapes)
    else:
        names = list(array_shapes)
    if shapes != array_shapes:
        del source.metadata[ENGINE_KEY]
        source.notes.append("the arrays are not those, or not all, of which the file says what engine they come from")
        return
    cache_node = root.get("cache")
    tokens, layer_positions = cache_node.get("tokens"), cache_node.value.get("layer_positions")
    if not any(tokens.read_int(0) in array.shape for array in source.arrays):
        raise tokens.error("the tokens of the arrays")  # before their positions are put out in full
    if isinstance(layer_positions, list) and len(layer_positions) > len(names):
        raise cache_node.get("layer_positions").error("positions of the layers that there are")
    source.engine_cache = select_engine_layers(parse_engine_cache(cache_node), names, array_shapes)
    if source.engine_cache is None:
        del source.metadata[ENGINE_KEY]
        source.notes.append("the file says what engine the arrays come from, but not of which of them")
        return
    source.axes = None if root.get("axes").value is None else root.get("axes").read_str()


def build_engine_document(cache: EngineCacheInfo) -> dict[str, Any]:
    """Return the description as JSON values; positions as runs."""
    return {
        "engine": cache.engine,
        "kind": cache.kind,
        "layers": cache.layers,
        "kv_heads": cache.kv_heads,
        **({"layer_kv_heads": list(cache.layer_kv_heads)} if cache.layer_kv_heads else {}),
        "head_dim": cache.head_dim,
        **({"layer_head_dims": list(cache.layer_head_dims)} if cache.layer_head_dims else {}),
        "tokens": cache.tokens,
        "types": list(cache.types),
        "batch": cache.batch,
        "positions": None if cache.position_runs is None else _runs_to_lists(cache.position_runs),
        "layer_positions": [_runs_to_lists(runs) for runs in cache.layer_position_runs or ()]
        if cache.layer_positions
        else None,
        **({"positions_unknown": True} if cache.positions_unknown else {}),
        "token_ids": None if cache.token_ids is None else [int(token) for token in cache.token_ids],
        **({"texts": [text.to_dict() for text in cache.texts]} if cache.texts else {}),
        "dequantised": list(cache.dequantised),
        **({"type_bits": dict(cache.type_bits)} if cache.type_bits else {}),
        "altered": list(cache.altered),
        "perhaps_altered": list(cache.perhaps_altered),
        "details": dict(cache.details),
    }


def parse_engine_cache(node: JsonReader) -> EngineCacheInfo:
    """Parse what `build_engine_document` returned."""
    tokens = node.get("tokens").read_int(0)
    return EngineCacheInfo(
        engine=node.get("engine").read_str(),
        kind=node.get("kind").read_str(),
        layers=node.get("layers").read_int(0),
        kv_heads=_parse_optional_int(node.get("kv_heads")),
        head_dim=_parse_optional_int(node.get("head_dim")),
        layer_kv_heads=_parse_layer_ints(node, "layer_kv_heads"),
        layer_head_dims=_parse_layer_ints(node, "layer_head_dims"),
        tokens=tokens,
        types=node.get("types").read_str_list(),
        batch=node.get("batch").read_int(1),
        positions=_parse_positions(node.get("positions"), tokens),
        layer_positions=_parse_layer_positions(node, tokens),
        positions_unknown="positions_unknown" in node.value and node.get("positions_unknown").read_bool(),
        token_ids=_parse_token_ids(node.get("token_ids")),
        texts=_parse_texts(node, tokens),
        dequantised=node.get("dequantised").read_str_list(),
        type_bits=_parse_type_bits(node),
        altered=_parse_transforms(node, "altered"),
        perhaps_altered=_parse_transforms(node, "perhaps_altered"),
        details=node.get("details").value if isinstance(node.get("details").value, dict) else {},
    )


def _parse_texts(node: JsonReader, tokens: int) -> tuple[BatchText, ...]:
    """Parse the texts of a batch that has padding or token ids."""
    if "texts" not in node.value:
        return ()
    texts = node.get("texts").read_list()
    if len(texts) != node.get("batch").read_int(1) or len(texts) * tokens > 4 * _MAX_EXPANDED_TOKENS:
        raise node.get("texts").error(f"the texts of the batch, of at most {4 * _MAX_EXPANDED_TOKENS:,} tokens")
    batch_texts = []
    for text in texts:
        positions = _parse_positions(text.get("positions"), tokens, allow_fewer=True)
        ids = _parse_token_ids(text.get("token_ids"))
        if positions is None or (np.diff(positions) <= 0).any():
            raise text.get("positions").error("ascending positions")
        if ids is not None and ids.size != positions.size:
            raise text.get("token_ids").error(f"{positions.size} token ids")
        batch_texts.append(BatchText(positions, ids))
    return tuple(batch_texts)


def _parse_layer_ints(node: JsonReader, key: str) -> tuple[int, ...]:
    """Parse a number for each layer, if layers differ."""
    items = node.get(key).read_list() if key in node.value else []
    return tuple(item.read_int(1) for item in items)


def _parse_transforms(node: JsonReader, key: str) -> tuple[Transform, ...]:
    """Parse names of transforms of K and V; files of earlier versions have none."""
    names = node.get(key).read_str_list() if key in node.value else ()
    return tuple(name for name in TRANSFORMS if name in names)


def _parse_type_bits(node: JsonReader) -> dict[str, float]:
    """Parse the bits of each quantised type; files of earlier versions have none."""
    if "type_bits" not in node.value:
        return {}
    bits_node = node.get("type_bits")
    if not isinstance(bits_node.value, dict):
        raise bits_node.error("an object of numbers")
    for bits in bits_node.value.values():
        if type(bits) not in (int, float) or not 0 < bits <= _MAX_TYPE_BITS:
            raise bits_node.error(f"numbers above 0 and up to {_MAX_TYPE_BITS}")
    return {name: float(bits) for name, bits in bits_node.value.items()}


def _parse_optional_int(node: JsonReader) -> int | None:
    return None if node.value is None else node.read_int(0)


def _runs_to_lists(runs: PositionRuns) -> list[list[int]]:
    return [list(run) for run in runs]


def _parse_layer_positions(node: JsonReader, tokens: int) -> Any:
    """Parse positions of each layer, if layers contain different tokens."""
    if node.value.get("layer_positions") is None:
        return None
    layers = node.get("layer_positions").read_list()
    if len(layers) * tokens > 4 * _MAX_EXPANDED_TOKENS:
        raise node.get("layer_positions").error(f"positions of at most {4 * _MAX_EXPANDED_TOKENS:,} tokens")
    return tuple(_parse_positions(entry, tokens, allow_fewer=True) for entry in layers)


def _parse_positions(node: JsonReader, tokens: int, *, allow_fewer: bool = False) -> Any:
    """Expand runs of (begin, size): of all tokens, or with `allow_fewer` of some."""
    if node.value is None:
        return None
    runs = [tuple(entry.read_int(0) for entry in run.read_list(2, 2)) for run in node.read_list()]
    num_positions = sum(size for _, size in runs)
    is_invalid = num_positions > tokens if allow_fewer else num_positions != tokens
    if is_invalid or tokens > _MAX_EXPANDED_TOKENS or any(begin > _MAX_POSITION for begin, _ in runs):
        raise node.error(f"runs of {tokens} tokens, of at most {_MAX_EXPANDED_TOKENS:,}")
    return np.concatenate([np.arange(begin, begin + size) for begin, size in runs] or [np.empty(0, np.int64)])


def _parse_token_ids(node: JsonReader) -> Any:
    if node.value is None:
        return None
    ids = [entry.read_any_int() for entry in node.read_list()]
    if any(not -_MAX_POSITION <= token <= MAX_TOKEN_ID for token in ids):
        raise node.error("token ids of 32 bits")
    return np.array(ids, np.int64)
