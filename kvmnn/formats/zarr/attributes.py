"""What kvmnn notes down beside the arrays of a store: names, hashes, and what the input said of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...arrays import engine_notes
from ...arrays.engine_cache import of_part
from ...arrays.named_array import ArrayInfo
from ...arrays.names import conventional
from ...arrays.source import DUMP_KEY, ENGINE_KEY, FILE_KEY, Source, described_by
from ...files.json_document import Node
from ..reading import said_of_part
from .documents import KEY

VERSION = 1
_NOT_OF_STORES = (DUMP_KEY, FILE_KEY, ENGINE_KEY)
_AXES = {"2": "key_value", "l": "layer", "b": "batch", "h": "kv_head", "t": "token", "d": "head_dim"}


def of_store(source: Source) -> dict[str, Any]:
    """Attributes of the group."""
    cache = source.engine_cache
    said: dict[str, Any] = {
        "version": VERSION,
        "arrays": list(source),
        "axes": source.axes,
        "token_major": source.token_major,
        "lossy": source.lossy,
        "metadata": {
            key: text for key, text in engine_notes.note_completeness(source).items() if key not in _NOT_OF_STORES
        },
    }
    if cache is not None:
        said["cache"] = engine_notes.document(cache)
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


def apply(source: Source, attributes: Mapping[str, Any], where: str, *, part: bool = False) -> None:
    """Give a source what `of_store` noted down of it; nothing where that is from somebody else.

    Parameters
    ----------
    part
        Whether some arrays were chosen: of those it is said then.

    Raises
    ------
    ManifestError
        Where it is malformed.
    """
    node = Node(attributes, where, "attributes")
    if KEY not in attributes:
        return
    said = node.at(KEY)
    said.at("version").check_version(VERSION)
    metadata = said.at("metadata").text_map()
    source.metadata = said_of_part(metadata, described_by(metadata, where)) if part else metadata
    engine_notes.apply_completeness(source, where)
    source.token_major = said.at("token_major").boolean()
    source.lossy = said.at("lossy").boolean()
    axes = said.at("axes")
    source.axes = None if axes.value is None else axes.text()
    if "cache" in said.value:
        cache = engine_notes.engine_cache(said.at("cache"))
        source.engine_cache = of_part(cache, names_in(attributes), source) if part else cache


def names_in(attributes: Mapping[str, Any]) -> list[str]:
    """The names of the arrays in their order, as far as they are noted down."""
    said = attributes.get(KEY)
    names = said.get("arrays") if isinstance(said, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
