"""Recognition of the kind of a file or folder: arrays and caches of all formats, frames, weights."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import PurePath

from .._util.patterns import declare_pattern
from ..arrays.naming import array_name_from_path, parse_conventional_name
from ..bundle import manifest
from ..compressor import has_weight_file_magic
from ..errors import KvmnnError
from ..files.file_names import FOLDER_FILES
from ..files.mapped_file import FileHead
from ..formats import ARRAY_FORMATS, ZARR
from ..formats.hf import saved
from ..formats.layer_streams.document import LAYERS_NAME
from ..formats.mnn import dump, mmap_cache, packed_files
from ..formats.npy import NPY_SUFFIX
from ..formats.raw import parse_page_name
from ..formats.registry import find_engine_format
from ..formats.vllm import VLLM
from ..formats.zarr import ORPHANED_ARRAYS

_ARRAY_SUFFIXES = (*ARRAY_FORMATS, ".session")
"""Suffixes of arrays: inputs whatever they contain, so that a damaged file is reported."""

_TORCH_SUFFIX = ".pt"

_LAYER_FOLDER_REGEX = declare_pattern(r"layer_[0-9]+")


def accepts_file(path: str, *, arrays: bool, frames: bool, weights: bool) -> bool:
    """Return whether a file is an input for these kinds (`InputKinds`)."""
    suffix = PurePath(path).suffix.lower()
    if suffix == manifest.FRAME_SUFFIX or (
        suffix not in _ARRAY_SUFFIXES and os.path.exists(path + manifest.SIDECAR_SUFFIX)
    ):
        return frames
    try:
        return (arrays and (suffix in _ARRAY_SUFFIXES or _is_cache_file(path, suffix))) or (
            weights and has_weight_file_magic(path)
        )
    except (KvmnnError, OSError):
        return arrays


def accepts_folder(path: str, names: set[str], *, arrays: bool, frames: bool) -> bool | None:
    """Return whether a folder with these names is one input; None if its entries are inputs of their own."""
    if manifest.MANIFEST_NAME in names or LAYERS_NAME in names or _is_bundle_without_manifest(path, names):
        return frames
    head = FileHead.from_path(path)
    if ZARR.detect(head) or ORPHANED_ARRAYS.detect(head):  # the latter is reported as incomplete
        return arrays or frames
    if _is_cache_folder(path, names):
        return arrays
    return None


def find_array_folder_files(names: set[str]) -> set[str]:
    """Return the names that are one input together: the arrays of a cache by layer, and the files that describe them.

    Empty for a folder whose arrays are inputs of their own: none are K and V of a layer, and no file describes them.
    """
    arrays = {name for name in names if name.lower().endswith(NPY_SUFFIX)}
    descriptions = names & {*FOLDER_FILES}
    parsed_names = filter(None, (parse_conventional_name(array_name_from_path(name)) for name in arrays))
    parts = {(parsed_name.layer, parsed_name.part) for parsed_name in parsed_names}
    is_cache = bool(descriptions) or any((layer, "value") in parts for layer, part in parts if part == "key")
    return arrays | descriptions if arrays and is_cache else set()


def _is_cache_file(path: str, suffix: str) -> bool:
    """Return whether a file is a cache by its contents, or a damaged one; not any other file of torch."""
    head = FileHead.from_path(path)
    if find_engine_format(head) is not None or parse_page_name(path) is not None:
        return True
    return saved.describe_damage(head) is not None or (suffix == _TORCH_SUFFIX and not saved.is_torch_head(head.data))


def _is_bundle_without_manifest(path: str, names: set[str]) -> bool:
    """Return whether a folder was a bundle by its name: as an input it is reported as incomplete."""
    frames = [name for name in names if name.endswith(manifest.FRAME_SUFFIX)]
    return path.rstrip("/" + os.sep).endswith(".frames") and any(
        name + manifest.SIDECAR_SUFFIX not in names for name in frames
    )


def _is_cache_folder(path: str, names: set[str]) -> bool:
    if _has_dump_metadata(names) or mmap_cache.has_mmap_files(names) or packed_files.list_prefix_names(names):
        return True
    if any(name.endswith(".safetensors") for name in names) and VLLM.detect(FileHead.from_path(path)):
        return True
    return any(
        _has_dump_metadata(_list_names(os.path.join(path, name)))
        for name in names
        if _LAYER_FOLDER_REGEX.fullmatch(name)
    )


def _has_dump_metadata(names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for name in names for glob in (dump.META_GLOB, dump.PACKED_META_GLOB))


def _list_names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
