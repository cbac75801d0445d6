"""Folders of vLLM's ExampleConnector: a ``.safetensors`` file for each layer of a text, named after the layer.

The only tensor of each, ``kv_cache``, contains K and V. Its shape depends on the version and the attention backend, so
the caller specifies it: ``2td`` with heads and dimensions in one (``--shape 2,-1,8,128 --axes 2thd``), ``t2hd``,
``2thd``.
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
from ..errors import KvmnnError, SourceError, build_read_error
from ..files.mapped_file import FileHead, MappedFile
from . import safetensors
from .base import PathFormat
from .options import ReadOptions
from .tensor_selection import select_tensors

TENSOR_NAME = "kv_cache"
_FILE_SUFFIX = ".safetensors"


def list_layer_files(path: str) -> list[str]:
    """Return the files of the layers, ordered by the numbers in their names."""
    try:
        with os.scandir(path) as entries:
            paths = [entry.path for entry in entries if entry.name.endswith(_FILE_SUFFIX) and entry.is_file()]
    except OSError as exc:
        raise build_read_error(path, exc) from exc
    return sorted(paths, key=lambda file: _make_numeric_sort_key(PurePath(file).stem))


def _make_numeric_sort_key(name: str) -> list[tuple[bool, int, str]]:
    parts = re.split(r"([0-9]+)", name)
    return [(part.isdecimal(), int(part[:18]) if part.isdecimal() else 0, part) for part in parts]


def read(path: str, options: ReadOptions) -> Source:
    """Return the tensor of each layer under the layer's name.

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
    source = safetensors.read(MappedFile(file), replace(options, tensors=()))
    if list(source) != [TENSOR_NAME]:
        raise SourceError(f"{file}: expected one tensor, {TENSOR_NAME!r}, as in the other files of the folder")
    return replace(source.arrays[0], name=array_name_from_path(file))


def _has_layer_files(head: FileHead) -> bool:
    """Return whether a folder has ``.safetensors`` files, and the first has a tensor ``kv_cache`` alone."""
    files = list_layer_files(head.path)
    try:
        return bool(files) and list(safetensors.read(MappedFile(files[0]), ReadOptions(skip_unsupported=True))) == [
            TENSOR_NAME
        ]
    except KvmnnError:
        return False


VLLM = PathFormat(name="vllm", check=_has_layer_files, read_path=read)
