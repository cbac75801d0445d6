"""Directories of ``.npy`` files, one for each array: what `dump-kv`, `unpack` and `decode` write with ``-o DIR/``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import PurePath

from ..arrays.named_array import Chunk, LazyArray
from ..arrays.names import parse_conventional_name
from ..arrays.source import Source
from ..arrays.valid_names import array_name_from_path
from ..errors import SourceError
from ..files.mapped import MappedFile
from . import npy
from .options import ReadOptions
from .reading import select_tensors

NPY_SUFFIX = ".npy"


def list_npy_files(path: str) -> list[str]:
    """The ``.npy`` files directly in a directory, K and V of the layers in order, and numbers as such."""
    try:
        with os.scandir(path) as entries:
            paths = [entry.path for entry in entries if entry.name.lower().endswith(NPY_SUFFIX) and entry.is_file()]
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    return sorted(paths, key=lambda file: make_name_sort_key(PurePath(file).stem))


def read_folder(path: str, options: ReadOptions) -> Source:
    """The arrays of all ``.npy`` files in a directory, each named after its file; mapped only while they are read.

    Raises
    ------
    SourceError
        When there is none, or as for a single file.
    """
    files = list_npy_files(path)
    arrays, skipped = select_tensors(
        path, [(array_name_from_path(file), partial(_read_file_array, file, options)) for file in files], options
    )
    return Source(arrays, skipped_arrays=skipped, opened_files=tuple(files))


def make_name_sort_key(name: str) -> tuple[bool, list[int | str]]:
    """Names of layers by layer, first token and part, before all others, which are in the order that people expect."""
    parsed_name = parse_conventional_name(name)
    if parsed_name is not None:
        return False, [parsed_name.layer, parsed_name.start, parsed_name.part]
    return True, [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _read_file_array(path: str, options: ReadOptions) -> LazyArray:
    (array,) = npy.read(path, options).arrays
    return replace(array, reader=partial(_iter_file_chunks, path, array.nbytes))


def _iter_file_chunks(path: str, nbytes: int, chunk_bytes: int) -> Iterator[Chunk]:
    """The data at the end of the file: a directory may have more files than a process may map."""
    mapped_file = MappedFile(path)
    if mapped_file.size < nbytes:
        raise SourceError(
            f"{path}: has {mapped_file.size} bytes, too few for the {nbytes} of its array when it was opened"
        )
    yield from mapped_file.iter_chunks(mapped_file.size - nbytes, nbytes, chunk_bytes)
