"""What kvmnn notes down beside the arrays of a store: names, hashes, and what the input said of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.engine_cache import EngineCache
from ...arrays.named_array import ArrayInfo
from ...arrays.names import conventional
from ...arrays.source import DUMP_KEY, FILE_KEY, Source
from ...arrays.undoing import UNDOABLE, Undo
from ...files.json_document import Node
from ...packed.cache_info import Ranges
from .documents import KEY

VERSION = 1
_AXES = {"2": "key_value", "l": "layer", "b": "batch", "h": "kv_head", "t": "token", "d": "head_dim"}
_MOST_TOKENS = 1 << 24
"""Whose positions are put out in full."""
_MOST_POSITION = 1 << 31


def of_store(source: Source) -> dict[str, Any]:
    """Attributes of the group."""
    cache = source.engine_cache
    said: dict[str, Any] = {
        "version": VERSION,
        "arrays": list(source),
        "axes": source.axes,
        "token_major": source.token_major,
        "lossy": source.lossy,
        "metadata": {key: text for key, text in source.metadata.items() if key not in (DUMP_KEY, FILE_KEY)},
    }
    if cache is not None:
        said["cache"] = {
            "engine": cache.engine,
            "kind": cache.kind,
            "layers": cache.layers,
            "kv_heads": cache.kv_heads,
            "head_dim": cache.head_dim,
            "tokens": cache.tokens,
            "types": list(cache.types),
            "batch": cache.batch,
            "positions": None if cache.runs is None else _listed(cache.runs),
            "layer_positions": [_listed(runs) for runs in cache.layer_runs or ()] if cache.layer_positions else None,
            "token_ids": None if cache.token_ids is None else [int(token) for token in cache.token_ids],
            "dequantised": list(cache.dequantised),
            "altered": list(cache.altered),
            "perhaps_altered": list(cache.perhaps_altered),
            "details": dict(cache.details),
        }
    return {KEY: said}


def of_array(array: ArrayInfo, sha256: str) -> dict[str, Any]:
    """Attributes of an array."""
    said: dict[str, Any] = {"name": array.name, "dtype": array.dtype, "sha256": sha256}
    place = conventional(array.name)
    if place is not None:
        said |= {"layer": place.layer, "part": place.part}
    return {KEY: said}


def dimension_names(source: Source) -> list[list[str]]:
    """Names for the axes of every array: those that differ in length from array to array end in it.

    xarray takes all arrays of a store as one data set, where a name has one length.
    """
    names = [[_AXES.get(letter, letter) for letter in _letters(source, array)] for array in source.arrays]
    lengths: dict[str, set[int]] = {}
    for array, axes in zip(source.arrays, names, strict=True):
        for name, length in zip(axes, array.shape, strict=True):
            lengths.setdefault(name, set()).add(length)
    return [
        [
            name if len(lengths[name]) == 1 else f"{name}_{length}"
            for name, length in zip(axes, array.shape, strict=True)
        ]
        for array, axes in zip(source.arrays, names, strict=True)
    ]


def _letters(source: Source, array: ArrayInfo) -> Sequence[str]:
    """A letter for each axis, or what stands for one where nothing says what the axes are."""
    axes = len(array.shape)
    if source.axes is not None and len(source.axes) == axes:
        return source.axes
    place = conventional(array.name)
    if place is not None and axes == 3:
        return "thd" if source.token_major else place.order
    if place is not None and axes == 4 and place.order == "htd":
        return "bthd" if source.token_major else "bhtd"
    return [f"axis_{index}" for index in range(axes)]


def apply(source: Source, attributes: Mapping[str, Any], where: str) -> None:
    """Give a source what `of_store` noted down of it; nothing where that is from somebody else.

    Raises
    ------
    ManifestError
        Where it is malformed.
    """
    node = Node(attributes, where, "attributes")
    if KEY not in attributes:
        return
    said = node.at(KEY)
    if said.at("version").integer(1) > VERSION:
        raise said.at("version").wrong(f"at most {VERSION}: a later kvmnn wrote this")
    source.metadata = said.at("metadata").text_map()
    source.token_major = said.at("token_major").boolean()
    source.lossy = said.at("lossy").boolean()
    axes = said.at("axes")
    source.axes = None if axes.value is None else axes.text()
    if "cache" in said.value:
        source.engine_cache = _engine_cache(said.at("cache"))


def names_in(attributes: Mapping[str, Any]) -> list[str]:
    """The names of the arrays in their order, as far as they are noted down."""
    said = attributes.get(KEY)
    names = said.get("arrays") if isinstance(said, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _engine_cache(node: Node) -> EngineCache:
    tokens = node.at("tokens").integer(0)
    return EngineCache(
        engine=node.at("engine").text(),
        kind=node.at("kind").text(),
        layers=node.at("layers").integer(0),
        kv_heads=_maybe(node.at("kv_heads")),
        head_dim=_maybe(node.at("head_dim")),
        tokens=tokens,
        types=node.at("types").texts(),
        batch=node.at("batch").integer(1),
        positions=_positions(node.at("positions"), tokens),
        layer_positions=_layer_positions(node, tokens),
        token_ids=_token_ids(node.at("token_ids")),
        dequantised=node.at("dequantised").texts(),
        altered=_undoable(node, "altered"),
        perhaps_altered=_undoable(node, "perhaps_altered"),
        details=node.at("details").value if isinstance(node.at("details").value, dict) else {},
    )


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
    if any(abs(token) > _MOST_POSITION for token in ids):
        raise node.wrong("token ids of 32 bits")
    return np.array(ids, np.int64)
