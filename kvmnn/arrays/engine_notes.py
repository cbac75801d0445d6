"""What another engine's cache says of itself, noted down beside arrays: in manifests, metadata of files, and Zarr."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ..files.json_document import Node, parse
from ..packed.cache_info import MAX_TOKEN_ID, Ranges
from .completeness_notes import write_note
from .engine_cache import BatchText, EngineCache, of_part, text_document
from .source import COMPLETENESS_KEY, ENGINE_KEY, Source, completeness_in
from .undoing import UNDOABLE, Undo

VERSION = 1
_MOST_TOKENS = 1 << 24
"""Whose positions are put out in full."""
_MOST_POSITION = 1 << 31


def noted(source: Source) -> dict[str, str]:
    """The metadata of a source, with what is known of the engine's cache that its arrays are, and its completeness."""
    metadata = {key: text for key, text in note_completeness(source).items() if key != ENGINE_KEY}
    cache = source.engine_cache
    if cache is not None and any(cache.tokens in source[name].shape for name in source):
        said = {
            "version": VERSION,
            "axes": source.axes,
            "cache": document(cache),
            "shapes": {name: list(source[name].shape) for name in sorted(source)},
        }
        metadata[ENGINE_KEY] = json.dumps(said, separators=(",", ":"))
    return metadata


def note_completeness(source: Source) -> dict[str, str]:
    """Return the metadata of a source, with its completeness where that is more than full attention in every layer."""
    if source.completeness is None:
        return dict(source.metadata)
    metadata = {key: text for key, text in source.metadata.items() if key != COMPLETENESS_KEY}
    if not source.completeness.is_plain:
        metadata[COMPLETENESS_KEY] = write_note(source.completeness, source)
    return metadata


def apply_completeness(source: Source, where: str) -> None:
    """Set the completeness of a source from its metadata, unless its reader did.

    Raises
    ------
    ManifestError
        For malformed metadata.
    """
    if source.completeness is None:
        source.completeness = completeness_in(source.metadata, source, where)


def apply(source: Source, where: str, *, part: bool = False) -> None:
    """Give a source what `noted` wrote, if its arrays are those; else the note of the engine is dropped, and a line
    says so. The completeness stays.

    Parameters
    ----------
    part
        Whether some arrays were chosen: of those it is said then.

    Raises
    ------
    ManifestError
        Where it is malformed.
    """
    apply_completeness(source, where)
    if source.engine_cache is not None or ENGINE_KEY not in source.metadata:
        return
    said = parse(source.metadata[ENGINE_KEY], f"{where}: metadata {ENGINE_KEY!r}")
    said.at("version").check_version(VERSION)
    shapes, found = said.at("shapes").value, {array.name: list(array.shape) for array in source.arrays}
    if part and isinstance(shapes, dict):
        shapes, names = {name: shape for name, shape in shapes.items() if name in found}, list(shapes)
    else:
        names = list(found)
    if shapes != found:
        del source.metadata[ENGINE_KEY]
        source.notes.append("the arrays are not those, or not all, of which the file says what engine they come from")
        return
    cache = said.at("cache")
    tokens, by_layer = cache.at("tokens"), cache.value.get("layer_positions")
    if not any(tokens.integer(0) in array.shape for array in source.arrays):
        raise tokens.wrong("the tokens of the arrays")  # before their positions are put out in full
    if isinstance(by_layer, list) and len(by_layer) > len(names):
        raise cache.at("layer_positions").wrong("positions of the layers that there are")
    source.engine_cache = of_part(engine_cache(cache), names, found)
    if source.engine_cache is None:
        del source.metadata[ENGINE_KEY]
        source.notes.append("the file says what engine the arrays come from, but not of which of them")
        return
    source.axes = None if said.at("axes").value is None else said.at("axes").text()


def document(cache: EngineCache) -> dict[str, Any]:
    """The description as JSON values; positions as runs."""
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
        "positions": None if cache.runs is None else _listed(cache.runs),
        "layer_positions": [_listed(runs) for runs in cache.layer_runs or ()] if cache.layer_positions else None,
        **({"positions_unknown": True} if cache.positions_unknown else {}),
        "token_ids": None if cache.token_ids is None else [int(token) for token in cache.token_ids],
        **({"texts": [text_document(text) for text in cache.texts]} if cache.texts else {}),
        "dequantised": list(cache.dequantised),
        "altered": list(cache.altered),
        "perhaps_altered": list(cache.perhaps_altered),
        "details": dict(cache.details),
    }


def engine_cache(node: Node) -> EngineCache:
    """The cache that `document` describes.

    Raises
    ------
    ManifestError
        Where it is malformed.
    """
    tokens = node.at("tokens").integer(0)
    return EngineCache(
        engine=node.at("engine").text(),
        kind=node.at("kind").text(),
        layers=node.at("layers").integer(0),
        kv_heads=_maybe(node.at("kv_heads")),
        head_dim=_maybe(node.at("head_dim")),
        layer_kv_heads=_of_layers(node, "layer_kv_heads"),
        layer_head_dims=_of_layers(node, "layer_head_dims"),
        tokens=tokens,
        types=node.at("types").texts(),
        batch=node.at("batch").integer(1),
        positions=_positions(node.at("positions"), tokens),
        layer_positions=_layer_positions(node, tokens),
        positions_unknown="positions_unknown" in node.value and node.at("positions_unknown").boolean(),
        token_ids=_token_ids(node.at("token_ids")),
        texts=_texts(node, tokens),
        dequantised=node.at("dequantised").texts(),
        altered=_undoable(node, "altered"),
        perhaps_altered=_undoable(node, "perhaps_altered"),
        details=node.at("details").value if isinstance(node.at("details").value, dict) else {},
    )


def _texts(node: Node, tokens: int) -> tuple[BatchText, ...]:
    """The texts of a batch, where they have padding or token ids."""
    if "texts" not in node.value:
        return ()
    texts = node.at("texts").items()
    if len(texts) != node.at("batch").integer(1) or len(texts) * tokens > 4 * _MOST_TOKENS:
        raise node.at("texts").wrong(f"the texts of the batch, of at most {4 * _MOST_TOKENS:,} tokens")
    found = []
    for text in texts:
        positions, ids = _positions(text.at("positions"), tokens, some=True), _token_ids(text.at("token_ids"))
        if positions is None or (np.diff(positions) <= 0).any():
            raise text.at("positions").wrong("ascending positions")
        if ids is not None and ids.size != positions.size:
            raise text.at("token_ids").wrong(f"{positions.size} token ids")
        found.append(BatchText(positions, ids))
    return tuple(found)


def _of_layers(node: Node, key: str) -> tuple[int, ...]:
    """A number of each layer, where they differ."""
    said = node.at(key).items() if key in node.value else []
    return tuple(each.integer(1) for each in said)


def _undoable(node: Node, key: str) -> tuple[Undo, ...]:
    """Names of what was done to K and V; stores of earlier versions say none."""
    said = node.at(key).texts() if key in node.value else ()
    return tuple(name for name in UNDOABLE if name in said)


def _maybe(node: Node) -> int | None:
    return None if node.value is None else node.integer(0)


def _listed(runs: Ranges) -> list[list[int]]:
    return [list(run) for run in runs]


def _layer_positions(node: Node, tokens: int) -> Any:
    """Of each layer, where they hold different tokens."""
    if node.value.get("layer_positions") is None:
        return None
    layers = node.at("layer_positions").items()
    if len(layers) * tokens > 4 * _MOST_TOKENS:
        raise node.at("layer_positions").wrong(f"positions of at most {4 * _MOST_TOKENS:,} tokens")
    return tuple(_positions(entry, tokens, some=True) for entry in layers)


def _positions(node: Node, tokens: int, *, some: bool = False) -> Any:
    """Runs of (begin, size), put out in full: of all tokens, or of `some`."""
    if node.value is None:
        return None
    runs = [tuple(entry.integer(0) for entry in run.items(2, 2)) for run in node.items()]
    found = sum(size for _, size in runs)
    wrong = found > tokens if some else found != tokens
    if wrong or tokens > _MOST_TOKENS or any(begin > _MOST_POSITION for begin, _ in runs):
        raise node.wrong(f"runs of {tokens} tokens, of at most {_MOST_TOKENS:,}")
    return np.concatenate([np.arange(begin, begin + size) for begin, size in runs] or [np.empty(0, np.int64)])


def _token_ids(node: Node) -> Any:
    if node.value is None:
        return None
    ids = [entry.whole() for entry in node.items()]
    if any(not -_MOST_POSITION <= token <= MAX_TOKEN_ID for token in ids):
        raise node.wrong("token ids of 32 bits")
    return np.array(ids, np.int64)
