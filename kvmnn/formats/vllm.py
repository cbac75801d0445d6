"""Folders that vLLM's ExampleConnector writes for a text: a ``.safetensors`` file for each layer, named after it.

The one tensor of each, ``kv_cache``, holds K and V; its shape depends on the version and the attention backend, so the
caller says it: ``2td`` with heads and dimensions in one (``--shape 2,-1,8,128 --axes 2thd``), ``t2hd``, ``2thd``.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import PurePath

from ..arrays.array import LazyArray
from ..arrays.naming import array_name_from_path
from ..arrays.source import Source
from ..errors import KvmnnError, SourceError
from . import safetensors
from .options import ReadOptions
from .tensor_selection import select_tensors

TENSOR_NAME = "kv_cache"
_FILE_SUFFIX = ".safetensors"


def is_vllm_folder(path: str) -> bool:
    """Whether a directory has ``.safetensors`` files, the first of which holds a tensor ``kv_cache`` and no other."""
    files = list_layer_files(path)
    if not files:
        return False
    try:
        return list(safetensors.read(files[0], ReadOptions(skip_unsupported=True))) == [TENSOR_NAME]
    except KvmnnError:
        return False


def list_layer_files(path: str) -> list[str]:
    """The files of the layers, by the numbers in their names."""
    try:
        with os.scandir(path) as entries:
            paths = [entry.path for entry in entries if entry.name.endswith(_FILE_SUFFIX) and entry.is_file()]
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    return sorted(paths, key=lambda file: _make_numeric_sort_key(PurePath(file).stem))


def _make_numeric_sort_key(name: str) -> list[tuple[bool, int, str]]:
    parts = re.split(r"([0-9]+)", name)
    return [(part.isdecimal(), int(part[:18]) if part.isdecimal() else 0, part) for part in parts]


def read(path: str, options: ReadOptions) -> Source:
    """The tensor of each layer under the layer's name.

    Raises
    ------
    SourceError
        For a file without the tensor, or with others.
    """
    files = list_layer_files(path)
    entries = [(array_name_from_path(file), partial(_read_layer_array, file, options)) for file in files]
    arrays, skipped = select_tensors(path, entries, options)
    return Source(arrays, skipped_arrays=skipped, opened_files=tuple(files))


def _read_layer_array(file: str, options: ReadOptions) -> LazyArray:
    source = safetensors.read(file, replace(options, tensors=()))
    if list(source) != [TENSOR_NAME]:
        raise SourceError(f"{file}: expected one tensor, {TENSOR_NAME!r}, as in the other files of the folder")
    return replace(source.arrays[0], name=array_name_from_path(file))
