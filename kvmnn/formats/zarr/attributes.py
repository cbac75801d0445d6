"""What kvmnn notes down beside the arrays of a store: names, hashes, and what the input said of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...arrays import engine_notes
from ...arrays.engine_cache import select_engine_layers
from ...arrays.named_array import ArrayInfo
from ...arrays.names import parse_conventional_name
from ...arrays.source import DUMP_KEY, ENGINE_KEY, FILE_KEY, Source, parse_cache_info
from ...files.json_document import JsonReader
from ..reading import build_subset_metadata
from .documents import ATTRIBUTES_KEY

ATTRIBUTES_VERSION = 1
_EXCLUDED_METADATA_KEYS = (DUMP_KEY, FILE_KEY, ENGINE_KEY)
_DIMENSION_NAME_BY_AXIS = {"2": "key_value", "l": "layer", "b": "batch", "h": "kv_head", "t": "token", "d": "head_dim"}


def build_group_attributes(source: Source) -> dict[str, Any]:
    """Attributes of the group."""
    cache = source.engine_cache
    document: dict[str, Any] = {
        "version": ATTRIBUTES_VERSION,
        "arrays": list(source),
        "axes": source.axes,
        "token_major": source.token_major,
        "lossy": source.lossy,
        "metadata": {
            key: text
            for key, text in engine_notes.add_completeness_metadata(source).items()
            if key not in _EXCLUDED_METADATA_KEYS
        },
    }
    if cache is not None:
        document["cache"] = engine_notes.build_engine_document(cache)
    return {ATTRIBUTES_KEY: document}


def build_array_attributes(array: ArrayInfo, sha256: str) -> dict[str, Any]:
    """Attributes of an array."""
    document: dict[str, Any] = {"name": array.name, "dtype": array.dtype, "sha256": sha256}
    parsed_name = parse_conventional_name(array.name)
    if parsed_name is not None:
        document |= {"layer": parsed_name.layer, "part": parsed_name.part}
    return {ATTRIBUTES_KEY: document}


def choose_dimension_names(source: Source) -> list[list[str]]:
    """Names for the axes of every array: those that differ in length from array to array end in it.

    xarray takes all arrays of a store as one data set, where a name has one length.
    """
    names = [
        [_DIMENSION_NAME_BY_AXIS.get(letter, letter) for letter in _list_axis_names(source, array)]
        for array in source.arrays
    ]
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


def _list_axis_names(source: Source, array: ArrayInfo) -> Sequence[str]:
    """A letter for each axis, or what stands for one where nothing says what the axes are."""
    num_axes = len(array.shape)
    if source.axes is not None and len(source.axes) == num_axes:
        return source.axes
    parsed_name = parse_conventional_name(array.name)
    if parsed_name is not None and num_axes == 3:
        return "thd" if source.token_major else parsed_name.order
    if parsed_name is not None and num_axes == 4 and parsed_name.order == "htd":
        return "bthd" if source.token_major else "bhtd"
    return [f"axis_{index}" for index in range(num_axes)]


def restore_attributes(source: Source, attributes: Mapping[str, Any], label: str, *, is_subset: bool = False) -> None:
    """Give a source what `build_group_attributes` noted down of it; nothing where that is from somebody else.

    Parameters
    ----------
    is_subset
        Whether some arrays were chosen: of those it is said then.

    Raises
    ------
    ManifestError
        Where it is malformed.
    """
    node = JsonReader(attributes, label, "attributes")
    if ATTRIBUTES_KEY not in attributes:
        return
    own_node = node.get(ATTRIBUTES_KEY)
    own_node.get("version").check_version(ATTRIBUTES_VERSION)
    metadata = own_node.get("metadata").read_str_map()
    source.metadata = build_subset_metadata(metadata, parse_cache_info(metadata, label)) if is_subset else metadata
    engine_notes.restore_completeness(source, label)
    source.token_major = own_node.get("token_major").read_bool()
    source.lossy = own_node.get("lossy").read_bool()
    axes = own_node.get("axes")
    source.axes = None if axes.value is None else axes.read_str()
    if "cache" in own_node.value:
        cache = engine_notes.parse_engine_cache(own_node.get("cache"))
        source.engine_cache = select_engine_layers(cache, list_array_names(attributes), source) if is_subset else cache


def list_array_names(attributes: Mapping[str, Any]) -> list[str]:
    """The names of the arrays in their order, as far as they are noted down."""
    document = attributes.get(ATTRIBUTES_KEY)
    names = document.get("arrays") if isinstance(document, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
