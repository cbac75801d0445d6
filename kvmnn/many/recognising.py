"""Of which kind files and folders are: arrays and caches of all formats, frames, weights."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import PurePath

from ..bundle import manifest
from ..compressor import is_weights
from ..errors import KvmnnError
from ..formats import ARRAY_FORMATS
from ..formats.engine_files import engine_file
from ..formats.hf import saved
from ..formats.mnn import dump, live, packed_dump, prefix
from ..formats.raw_pages import page_in
from ..formats.vllm import is_folder as is_vllm
from ..formats.zarr import is_store as is_zarr
from ..formats.zarr import lost_group

_BY_NAME = (*ARRAY_FORMATS, ".session")
"""Suffixes of arrays: these count whatever they hold, so that a damaged file is told of."""

_OF_TORCH = ".pt"

_LAYER = re.compile(r"layer_[0-9]+")


def takes_file(path: str, *, arrays: bool, frames: bool, weights: bool) -> bool:
    """Whether a file counts, for a work that takes these kinds (`Kinds`)."""
    suffix = PurePath(path).suffix.lower()
    if suffix == manifest.FRAME_SUFFIX or (suffix not in _BY_NAME and os.path.exists(path + manifest.SIDE_SUFFIX)):
        return frames
    try:
        return (arrays and (suffix in _BY_NAME or _is_cache_file(path, suffix))) or (weights and is_weights(path))
    except (KvmnnError, OSError):
        return arrays


def takes_folder(path: str, names: set[str], *, arrays: bool, frames: bool) -> bool | None:
    """Whether a folder with these names in it counts as one; None where what is in it does, each by itself."""
    if manifest.FILE_NAME in names or _lost_its_manifest(path, names):
        return frames
    if is_zarr(path) or lost_group(path):  # the latter so that what it lacks is told of
        return arrays or frames
    if _is_cache_folder(path, names):
        return arrays
    return None


def _is_cache_file(path: str, suffix: str) -> bool:
    """Whether a file is a cache by what it holds, or might be one: torch's that cannot be read, and what only has the
    name of such a file; not what torch wrote of something else.
    """
    if engine_file(path) is not None or page_in(path) is not None:
        return True
    return saved.damage(path) is not None or (suffix == _OF_TORCH and not saved.is_file(path))


def _lost_its_manifest(path: str, names: set[str]) -> bool:
    """Whether a folder was a bundle by its name: it counts as one, so that what it lacks is told of."""
    frames = [name for name in names if name.endswith(manifest.FRAME_SUFFIX)]
    return path.rstrip("/" + os.sep).endswith(".frames") and any(
        name + manifest.SIDE_SUFFIX not in names for name in frames
    )


def _is_cache_folder(path: str, names: set[str]) -> bool:
    if _has_metadata(names) or live.is_live(names) or prefix.names_in(names):
        return True
    if any(name.endswith(".safetensors") for name in names) and is_vllm(path):
        return True
    return any(_has_metadata(_listing(os.path.join(path, name))) for name in names if _LAYER.fullmatch(name))


def _has_metadata(names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for name in names for glob in (dump.GLOB, packed_dump.GLOB))


def _listing(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
